"""`memfit report`: a plan and its step as files for people and for other tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from memfit.cli.options import FileOptions, Json, TimedStepOptions, arg
from memfit.cli.output import show_json, show_text, write_files
from memfit.cli.problems import check_files
from memfit.cli.resolve import check_is_there, find_levers, read_plan, reading, resolve_step
from memfit.errors import InputError
from memfit.progress import Progress

if TYPE_CHECKING:
    from memfit.verify import Verification


@dataclass(frozen=True, kw_only=True)
class Report:
    """A plan laid over the step that it is for: a page, a Perfetto trace, a snapshot, Markdown or JSON.

    Without an option for a file, the Markdown is printed.

    examples:
      memfit report plan.json train.py:step --html report.html --curve
      memfit report plan.json train.py:step --verified verification.json --html report.html
      memfit report plan.json llama3-8b --batch 2 --seq 8192 --perfetto step.json
    """

    plan: Annotated[tyro.conf.Positional[Path], arg("PLAN")]
    """The plan, as `memfit plan -o` or Plan.save wrote it."""
    step: TimedStepOptions
    file: FileOptions
    curve: Json = False
    """Add the whole trade-off, which is solved for here."""
    verified: Annotated[Path | None, arg("FILE")] = None
    """What `memfit verify -o` wrote, to show what was measured."""
    json: Json = False
    """Print everything as JSON."""

    def run(self) -> int:
        from memfit.analysis import Report as ReportRecord
        from memfit.report import to_json, to_markdown

        check_files(self.file.by_option)
        plan = read_plan(self.plan)
        verification = None if self.verified is None else _verification(self.verified)
        given = resolve_step(self.step)
        with Progress("capturing the step, and laying the plan over it"):
            report = ReportRecord.of(
                plan, given.step, cost=self.step.cost, verification=verification, title=given.title
            )
        if self.curve:
            with Progress("solving for the trade-off"):
                report = report.with_curve()
        levers = find_levers(report, given.step, self.step.cost) if plan.predicted is None else ()
        write_files(self.file, report, levers)
        if self.json:
            show_json(to_json(report))
        elif not self.file.any:
            show_text(to_markdown(report, levers).rstrip())
        return 0


def _verification(path: Path) -> Verification:
    import msgspec

    from memfit.verify import Verification

    check_is_there(path, "--verified", "what `memfit verify -o` wrote")
    try:
        with reading(path):
            return msgspec.json.decode(path.read_bytes(), type=Verification)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no verification: {error}; give what `memfit verify -o` wrote") from error
