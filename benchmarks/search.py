"""How long a search over 20 batch sizes takes, against one plan of the best of them and against 20 plans.

Interleaved, medians: in one warm process, where a plan is a capture and a solve; and as commands, `memfit plan` and
`memfit search`, which is what a person waits for. Answers are compared: the largest that fits by the search is planned,
and so is one more, which must not fit.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import memfit
from memfit.presets import step_at

SIZES = 20
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A model on a target; `step` is how many samples the sizes lie apart, so that not all of them fit."""

    shape: str
    target: str
    seq: int | None
    step: int = 1
    budget: str | None = None

    @property
    def values(self) -> list[int]:
        return [self.step * (number + 1) for number in range(SIZES)]

    def make(self, batch: int) -> memfit.Step:
        return step_at(self.shape, batch=batch, seq=self.seq)

    def options(self) -> list[str]:
        found = [self.shape, "--target", self.target]
        found += [] if self.seq is None else ["--seq", str(self.seq)]
        return found if self.budget is None else [*found, "--budget", self.budget]


CASES = (
    Case("llama3.2-1b", "h100-sxm", 2048),
    Case("llama3.2-1b", "h100-sxm", 2048, budget="72GiB"),
    Case("gpt2-medium", "a100-sxm-40gb", 1024),
    Case("vit-large", "rtx-4090", None, step=16),
)


def seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def command(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "memfit", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compare(case: Case) -> tuple[float, float]:
    """Print a case and return the ratios, in one process and as commands."""

    def search() -> memfit.plans.Search:
        return memfit.search(case.make, target=case.target, values=case.values, budget=case.budget, progress=False)

    def plan(batch: int) -> memfit.Plan:
        return memfit.plan(case.make(batch), target=case.target, budget=case.budget, progress=False)

    found = search()
    assert found.best is not None and found.largest is not None
    assert plan(found.largest.value).status != "infeasible"
    above = found.first_above
    assert above is None or plan(above.value).status == "infeasible"
    largest = found.largest.value
    sizes = ",".join(map(str, case.values))
    times: dict[str, list[float]] = {"plan": [], "search": [], "memfit plan": [], "memfit search": []}
    for _ in range(REPEATS):
        times["plan"].append(seconds(lambda: plan(largest)))
        times["search"].append(seconds(search))
        times["memfit plan"].append(seconds(lambda: command("plan", *case.options(), "--batch", str(largest))))
        times["memfit search"].append(seconds(lambda: command("search", *case.options(), "--values", sizes)))
    medians = {name: statistics.median(found) for name, found in times.items()}
    within, outside = medians["search"] / medians["plan"], medians["memfit search"] / medians["memfit plan"]
    print(
        f"{case.shape} on {case.target}{f' in {case.budget}' if case.budget else ''}: best {found.best.value}, largest "
        f"{largest} of {len(found.points)} tried, {found.captured} captured; in one process {medians['search']:.2f} s, "
        f"{within:.1f} plans; as a command {medians['memfit search']:.1f} s, {outside:.2f} plans"
    )
    return within, outside


def main() -> None:
    ratios = [compare(case) for case in CASES if len(sys.argv) == 1 or case.shape in sys.argv[1:]]
    print(
        f"a search over {SIZES} batch sizes takes {max(within for within, _ in ratios):.1f} plans at most in a warm "
        f"process, {max(outside for _, outside in ratios):.2f} at most as a command"
    )


if __name__ == "__main__":
    main()
