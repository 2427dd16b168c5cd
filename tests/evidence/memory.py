"""Compares predicted with published memory: prints tables and writes them between the marks of a page.

python -m tests.evidence.memory [--runs few|all] [--write docs/evidence.md]
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from memfit.memory import Room
from tests.evidence import memory_steps, single_gpu, snapshots, timm_fits
from tests.evidence.memory_steps import PublishedMemory
from tests.evidence.pages import write_section
from tests.evidence.timm_fits import TimmBatch

HERE = Path(__file__).parent
MARK = "memory"
SAYS = {
    Room.ENOUGH: "fits",
    Room.MARGIN: "within the margin: cannot tell",
    Room.TIGHT: "does not fit: at its limit",
    Room.TOO_LITTLE: "does not fit",
}


def snapshot_table() -> list[str]:
    """A row for each recording: how much of it was compared, and how much differs."""
    lines = ["| recording | mallocs compared | segments compared | differences |", "|---|---|---|---|"]
    total = same = 0
    for path in snapshots.files():
        found = snapshots.compare(path)
        total += found.mallocs
        same += not found.differences
        lines.append(f"| {path.stem} | {found.mallocs:,} | {found.segments} | {len(found.differences)} |")
    return [*lines, "", f"{same} of {len(snapshots.files())} are the same, {total:,} mallocs."]


def step_table(runs: Sequence[PublishedMemory], kind: str) -> list[str]:
    """A row for each run with a published figure of this kind, and what they come to."""
    lines = [f"| run | published, GiB | predicted {kind}, GiB | error |", "|---|---|---|---|"]
    errors = []
    for run in runs:
        for name, published in run.published_gib.items():
            if published is not None and name.split(",")[0] == kind:
                error = run.errors()[name]
                errors.append(error)
                title = run.name + name.removeprefix(kind)
                lines.append(f"| {title} | {published:.2f} | {published * (1 + error):.2f} | {error:+.1%} |")
    absolute = np.abs(errors)
    return [*lines, "", f"{len(errors)} figures: median {np.median(absolute):.1%}, worst {absolute.max():.1%}."]


def root_table(runs: Sequence[PublishedMemory]) -> list[str]:
    """What the runs with embedding and head as units come to with both in the root unit."""
    lines = ["| run | error with both apart | in the root unit |", "|---|---|---|"]
    for run in runs:
        if run.units == "apart" and not run.model.startswith("Qwen3"):
            other = run.in_root().errors()
            lines += [
                f"| {run.name}, {name} | {error:+.1%} | {other[name]:+.1%} |" for name, error in run.errors().items()
            ]
    return lines


def fit_table(runs: Sequence[PublishedMemory], batches: Sequence[TimmBatch]) -> list[str]:
    """A row for each run of which only this is known: that it ran, or ran out of memory."""
    said = [(run.name, run.fits, run.room) for run in runs if run.fits is not None]
    said += [(batch.name, batch.fits, batch.room()) for batch in batches]
    lines = ["| run | source says | memfit says |", "|---|---|---|"]
    for name, fits, room in said:
        lines.append(f"| {name} | {'ran' if fits else 'out of memory'} | {SAYS[room]} |")
    open_ones = sum(room is Room.MARGIN for _, _, room in said)
    wrong = sum((room is Room.ENOUGH) != fits for _, fits, room in said if room is not Room.MARGIN)
    right = len(said) - open_ones - wrong
    return [*lines, "", f"{right} of {len(said)} are told, {open_ones} are within the margin, {wrong} are wrong."]


def sections(which: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each table of the page, and the table."""
    steps = memory_steps.read_runs()
    yield "snapshots", snapshot_table()
    yield "allocated", step_table(steps, "allocated")
    yield "reserved", step_table(steps, "reserved")
    yield "root", root_table(steps)
    yield "fits", fit_table(steps, timm_fits.read_batches())
    runs = [run for run in single_gpu.read_runs() if which == "all" or run.sampled]
    yield "single_gpu", single_gpu.table(runs)


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", choices=("few", "all"), default="few")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    text = (HERE / "memory.md").read_text().replace("{date}", datetime.date.today().isoformat())
    text = text.replace("{which}", "all of them" if given.runs == "all" else "of timm's an eighth of them")
    for name, lines in sections(given.runs):
        print("\n".join(("", *lines)), flush=True)
        text = text.replace(f"{{{name}}}", "\n".join(lines))
    if given.write is not None:
        write_section(given.write, MARK, text)


if __name__ == "__main__":
    sys.exit(main())
