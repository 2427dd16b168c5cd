"""Compares predicted with published speeds: prints tables and writes them between the marks of a page.

python tests/evidence/speeds.py [--steps none|few|all] [--write docs/evidence.md]
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.evidence.kernel_times import Errors, by_group, read_rows
from tests.evidence.pages import write_section
from tests.evidence.whole_steps import PublishedRun, read_runs

MARK = "speeds"
FAR = 0.25
HERE = Path(__file__).parent


def kernel_table() -> list[str]:
    """A row for each group: rows, median and 90th percentile of the errors, fitted and left out."""
    lines = [
        "| kernels | GPU | fitted to | median | 90 % | left out | median | 90 % | predicted / measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, gpu), rows in by_group(read_rows()).items():
        fitted = Errors.of([row for row in rows if row.fitted])
        left_out = Errors.of([row for row in rows if not row.fitted])
        cells = [kind, gpu, *_cells(fitted), *_cells(left_out), f"{left_out.ratio:.2f}" if left_out else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def step_table(runs: Sequence[PublishedRun]) -> list[str]:
    """A row for each source and GPU, and one for each run that is far off."""
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    far = []
    for run in runs:
        error = run.error()
        found[run.family, run.source, run.fitted].append(error)
        if abs(error) > FAR:
            far.append(f"- {run.name}: {run.tokens_per_s:,.0f} tokens/s, predicted {error:+.0%}")
    lines = [
        "| GPU | source | steps | of them | median error | median, absolute | from | to |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (family, source, fitted), errors in sorted(found.items()):
        values = np.array(errors)
        cells = [family, source, "fitted to" if fitted else "left out", f"{len(values)}", f"{np.median(values):+.1%}"]
        cells += [f"{np.median(np.abs(values)):.1%}", f"{values.min():+.0%}", f"{values.max():+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Beyond {FAR:.0%}: {len(far) or 'none'}.", *sorted(far)]


def _cells(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", "-", "-"]
    return [f"{errors.count:,}", f"{errors.median:.1%}", f"{errors.ninetieth:.1%}"]


def page(kernels: Sequence[str], steps: Sequence[str], which: str) -> str:
    """The speeds' part of the page: the text beside this file, with the tables in it."""
    text = (HERE / "speeds.md").read_text()
    texts = {"{date}": datetime.date.today().isoformat(), "{which}": which}
    for name, value in {**texts, "{kernels}": "\n".join(kernels), "{steps}": "\n".join(steps)}.items():
        text = text.replace(name, value)
    return text


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", choices=("none", "few", "all"), default="few")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    kernels = kernel_table()
    print("\n".join(kernels), flush=True)
    runs = [run for run in read_runs() if given.steps == "all" or (given.steps == "few" and run.sampled)]
    steps = step_table(runs)
    print("\n".join(steps))
    if given.write is not None:
        which = f"all {len(runs)} runs" if given.steps == "all" else f"a sample of {len(runs)} runs"
        write_section(given.write, MARK, page(kernels, steps, which))


if __name__ == "__main__":
    sys.exit(main())
