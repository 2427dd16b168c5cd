"""Writes docs/zoo.md: every examined model in a table, with what did not hold and what was refused."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
from collections.abc import Iterable
from pathlib import Path

from memfit.units import display_bytes
from tests.zoo.catalogue.examination import PART, Examined

_HEAD = f"""# Models that were tried

Written by `python -m tests.zoo.catalogue --write` (`make zoo-table`). One generic maker builds every architecture of
transformers, diffusers, timm and torchvision that it can from its configuration, at a small size; nothing in it knows a
single model. Each is trained in plain PyTorch first. What PyTorch itself cannot train that way is left out; everything
else is here.

Each step is captured for a CPU, planned for a budget {PART:.0%} of the way from the smallest that can be met to its own
peak, applied and verified: **plain** is the measured peak of the plain step, **off** how many bytes the captured one
differs from it; **planned** is the measured peak under the plan, and its own difference; **bits** says whether losses,
gradients and parameters are equal to the last bit; **speed** is the planned step's time over the plain one's, of small
models on a shared machine, so a rough figure; **s** is what capture and planning took.
"""


def write_page(path: Path, rows: Iterable[Examined], untrainable: int) -> None:
    """Write the page."""
    every = sorted(rows, key=lambda row: (row.library, row.name.lower()))
    libraries = list(dict.fromkeys(row.library for row in every))
    held = [row for row in every if row.holds]
    refused = [row for row in every if row.refused]
    wrong = [row for row in every if not row.holds and not row.refused]
    speeds = [row.speed for row in held if row.speed is not None]
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ["torch", *libraries])
    lines = [
        _HEAD,
        f"{today}, {versions}.",
        "",
        "| | models | captured to the byte, planned within the budget, same bits | refused, with advice | wrong |",
        "|---|---|---|---|---|",
    ]
    for library in [*libraries, "all"]:
        own = [row for row in every if library in (row.library, "all")]
        counts = [sum(row in kind for row in own) for kind in (held, refused, wrong)]
        lines.append(f"| {library} | {len(own)} | " + " | ".join(map(str, counts)) + " |")
    off = [row for row in held if row.planned_difference_bytes]
    most = max((abs(row.planned_difference_bytes or 0) for row in off), default=0)
    lines += [
        "",
        f"Under the plan {len(held) - len(off)} of them are as predicted to the byte too"
        + (f", the others off by {most:,} bytes at most." if off else "."),
        "",
        f"{untrainable} more could not be built by the maker, or do not train in plain PyTorch as it builds them."
        + (f" Planned over plain time at the median: {statistics.median(speeds):.2f}." if speeds else ""),
    ]
    for library in libraries:
        lines += [
            "",
            f"## {library}",
            "",
            "| model | class | parameters | ops | plain | off | planned | off | units | bits | speed | s |",
        ]
        lines.append("|---" * 12 + "|")
        lines += [_row(row) for row in held if row.library == library]
    lines += _errors("Refused", "What memfit says that it cannot do.", refused)
    lines += _errors("Wrong", "What did not hold.", wrong)
    path.write_text("\n".join(lines).rstrip() + "\n")


def _row(row: Examined) -> str:
    assert row.plain_bytes is not None and row.planned_bytes is not None
    speed = "" if row.speed is None else f"{row.speed:.2f}"
    cells = [
        row.name,
        f"`{row.model}`",
        f"{row.parameters:,}",
        str(row.ops),
        display_bytes(row.plain_bytes),
        str(row.plain_difference_bytes),
        display_bytes(row.planned_bytes),
        str(row.planned_difference_bytes),
        str(row.units),
        "same" if row.same_bits else "differ",
        speed,
        f"{row.plan_s:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _errors(title: str, what: str, rows: list[Examined]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"## {title}", "", what, "", "| library | model | why |", "|---|---|---|"]
    for row in rows:
        why = row.error or _differences(row)
        lines.append(f"| {row.library} | {row.name} | {' '.join(why.split()).replace('|', '/')} |")
    return lines


def _differences(row: Examined) -> str:
    return (
        f"plain peak off by {row.plain_difference_bytes} bytes, planned by {row.planned_difference_bytes}; budget "
        f"{row.budget_bytes}, measured {row.planned_bytes}; same bits: {row.same_bits}"
    )
