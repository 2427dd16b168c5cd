"""How long it takes until `memfit plan` has printed its plan, against `python -c "import torch"` in the same run.

The plan is printed when it is known and levers follow, so the time ends when the last line of the plan has come through
a pipe, and the process is ended then. Interleaved, medians. So is the import of memfit, which loads what it needs when
that is used. memfit's files are compiled to bytecode first, as pip does for a package that it installs.
"""

from __future__ import annotations

import compileall
import statistics
import subprocess
import sys
import time
from pathlib import Path

import memfit

REPEATS = 5
PLANS = (
    (("llama3-8b", "--target", "h100-sxm", "--ranks", "8"), 1.5, 5.0),
    (("llama3-405b", "--target", "h100-sxm", "--ranks", "512"), 4.0, 12.0),
)
"""Arguments of `memfit plan`, and at most how many imports of torch and how many seconds it may take."""


def seconds(*words: str) -> float:
    """Return how long a Python process takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - began


def seconds_until_printed(arguments: tuple[str, ...]) -> float:
    """Return how long it takes until the plan is on standard output: its first line, since it is written as a whole."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", "plan", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    taken = time.perf_counter() - began
    process.terminate()
    process.wait()
    assert first.strip(), "nothing was printed"
    return taken


def main() -> None:
    compileall.compile_dir(Path(memfit.__file__).parent, quiet=1)
    torch_s: list[float] = []
    memfit_s: list[float] = []
    plan_s: list[list[float]] = [[] for _ in PLANS]
    for _ in range(REPEATS):
        torch_s.append(seconds("-c", "import torch"))
        memfit_s.append(seconds("-c", "import memfit"))
        for found, (arguments, _, _) in zip(plan_s, PLANS, strict=True):
            found.append(seconds_until_printed(arguments))
    base = statistics.median(torch_s)
    print(f"import torch {base:.2f} s, import memfit {statistics.median(memfit_s):.2f} s")
    print(f"import of memfit over that of torch: {statistics.median(memfit_s) / base:.2f} (must be at most 1.1)")
    for found, (arguments, most, most_s) in zip(plan_s, PLANS, strict=True):
        taken = statistics.median(found)
        print(
            f"memfit plan {' '.join(arguments)}: printed after {taken:.2f} s, {taken / base:.2f} imports of torch "
            f"(must be at most {most_s:.0f} s and {most:.1f})"
        )


if __name__ == "__main__":
    main()
