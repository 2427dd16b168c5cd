"""`memfit compare`: two plans or two traces side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from memfit.cli.options import Json, arg
from memfit.cli.output import show_result
from memfit.cli.problems import UsageError
from memfit.cli.resolve import check_is_there, is_trace, read_plan, read_trace
from memfit.errors import InputError

if TYPE_CHECKING:
    from memfit.capture import Trace
    from memfit.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Two plans or two traces side by side: what changed, and what it did.

    Traces are what memfit.save_trace wrote.

    examples:
      memfit compare 60GiB.json 72GiB.json
      memfit compare before.memfit after.memfit
    """

    first: Annotated[tyro.conf.Positional[Path], arg("A")]
    """A plan (`memfit plan -o`) or a trace (.memfit)."""
    second: Annotated[tyro.conf.Positional[Path], arg("B")]
    """Another one of the same kind."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.analysis import compare

        first, second = _read(self.first, "A"), _read(self.second, "B")
        if type(first) is not type(second):
            kinds = [type(each).__name__.lower() for each in (first, second)]
            what = f"{self.first} is a {kinds[0]} and {self.second} a {kinds[1]}"
            raise UsageError(f"A and B: {what}; give two plans or two traces")
        found = compare(first, second)
        show_result(found, json=self.json)
        return 0


def _read(path: Path, option: str) -> Plan | Trace:
    check_is_there(path, option, "a plan (memfit plan -o) or a trace (memfit.save_trace)")
    if is_trace(path):
        return read_trace(path)
    if path.suffix != ".json":
        raise InputError(f"{path} is neither a plan nor a trace; give what `memfit plan -o` or memfit.save_trace wrote")
    return read_plan(path)
