"""The table of PyTorch's FSDP tests in `docs/fsdp-tests.md`: read, counted, and held against the tests that it names.

`python -m tests.distributed.fsdp_tests` writes the counts at its top anew, after a change of the rows.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "fsdp-tests.md"
RESULTS = ("holds", "refused", "not applicable")
_BEGIN = "<!-- counts: written by `python -m tests.distributed.fsdp_tests` -->\n"
_END = "<!-- end of counts -->"
_NAMED = re.compile(r"`([a-z_/0-9]+)::(test_\w+)(?:\[([^`]*)\])?`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of PyTorch's tests, what memfit does, and the tests or the reason."""

    folder: str
    file: str
    test: str
    result: str
    how: str

    @property
    def named(self) -> list[tuple[str, str, str]]:
        """The tests of memfit's that the row names: file, function and case."""
        return [(match[1], match[2], match[3] or "") for match in _NAMED.finditer(self.how)]


def read_rows(text: str) -> list[Row]:
    """Read the tables of the page."""
    rows: list[Row] = []
    folder = file = ""
    for line in text.splitlines():
        if line.startswith("## "):
            folder = line.split("`")[1]
        elif line.startswith("### "):
            file = line.removeprefix("### ")
        elif line.startswith("| `test_"):
            test, _, result, how = (each.strip() for each in line.strip("|").split(" | ", 3))
            rows.append(Row(folder=folder, file=file, test=test.strip("`"), result=result, how=how.removesuffix(" |")))
    return rows


def counts(rows: Sequence[Row]) -> str:
    """Return the counts, as they are at the top of the page."""
    results = Counter(row.result for row in rows)
    files = {(row.folder, row.file) for row in rows}
    named = {each for row in rows for each in row.named}
    ported = {each for each in named if each[0] == "ported"}
    lines = [
        "| | |",
        "|---|---|",
        f"| test files of PyTorch | {len(files)} |",
        f"| tests in them | {len(rows)} |",
        *(f"| {result} | {results[result]} |" for result in RESULTS),
        f"| behaviours, each a test of memfit's that a row names | {len(named)} |",
        f"| of these in `test_sharded_ported.py` | {len(ported)} |",
    ]
    return "\n".join(lines) + "\n"


def replace_counts(text: str) -> str:
    """Return the page with its counts written anew."""
    before, rest = text.split(_BEGIN)
    return f"{before}{_BEGIN}{counts(read_rows(text))}{_END}{rest.partition(_END)[2]}"


def find_test(file: str, name: str) -> Callable[..., Any] | None:
    """Return a test function that the table names."""
    folder, _, short = file.rpartition("/")
    module = f"tests.{folder}.test_{short}" if folder else f"tests.distributed.test_sharded_{short}"
    return getattr(importlib.import_module(module), name, None)


def case_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of a test's cases, as pytest gives them."""
    every: list[list[str]] = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
            every.append([_case_name(names, value, number) for number, value in enumerate(values)])
    return {"-".join(each) for each in product(*every)} if every else set()


def _case_name(names: Sequence[str], value: Any, number: int) -> str:
    parts = value if len(names) > 1 else (value,)
    return "-".join(_value_name(name, part, number) for name, part in zip(names, parts, strict=True))


def _value_name(name: str, value: Any, number: int) -> str:
    if value is None or isinstance(value, str | int | float | bool):
        return str(value)
    return getattr(value, "__name__", f"{name}{number}")


if __name__ == "__main__":
    PAGE.write_text(replace_counts(PAGE.read_text()))
