"""Writes the table of runs that were captured from torchtitan's own code: the planner's figures beside them.

python -m tests.evidence.titan [--runs name ...] [--write docs/evidence.md]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tests.evidence import titan_captures
from tests.evidence.pages import write_section

HERE = Path(__file__).parent
MARK = "torchtitan"
Figure = tuple[str, str, float, float, float]
"""Run, what was measured, and the published, the planner's and the captured figure."""


def table(figures: Sequence[Figure]) -> list[str]:
    """A row for each figure, and what each kind comes to."""
    lines = [
        "| run | figure | published | planner's, code of the source | error | captured, torchtitan of today | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, kind, published, planned, captured in figures:
        shown = (f"{each:,.0f}" if kind == "tokens/s" else f"{each:.2f}" for each in (published, planned, captured))
        first, second, third = shown
        errors = f"{planned / published - 1:+.1%}", f"{captured / published - 1:+.1%}"
        lines.append(f"| {run} | {kind} | {first} | {second} | {errors[0]} | {third} | {errors[1]} |")
    return [*lines, "", *_summary(figures)]


def _summary(figures: Sequence[Figure]) -> list[str]:
    said = []
    for title, kinds in (("Bytes", ("GiB",)), ("Tokens each second", ("tokens/s",))):
        own = [each for each in figures if each[1].endswith(kinds)]
        if own:
            planner, captured = (np.array([each[place] / each[2] - 1 for each in own]) for place in (3, 4))
            said.append(
                f"{title}, {len(own)} figures: the planner's median error {np.median(planner):+.1%}, captured "
                f"{np.median(captured):+.1%}."
            )
    return said


def figures(names: Iterable[str]) -> list[Figure]:
    """Capture the runs, all of them unless some are named, and return their figures."""
    wanted = set(names)
    found = []
    for run in titan_captures.read_runs():
        if not wanted or run.run.name in wanted:
            found += [(run.run.name, *figure) for figure in run.figures()]
            print(*found[-3:], sep="\n", flush=True)
    return found


def write(path: Path, found: Sequence[Figure]) -> None:
    """Write the section with these figures."""
    text = (HERE / "titan.md").read_text().replace("{date}", datetime.date.today().isoformat())
    text = text.replace("{version}", importlib.metadata.version("torchtitan"))
    write_section(path, MARK, text.replace("{captured}", "\n".join(table(found))))


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", nargs="*", default=())
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    found = figures(given.runs)
    print("\n".join(table(found)))
    if given.write is not None:
        write(given.write, found)


if __name__ == "__main__":
    sys.exit(main())
