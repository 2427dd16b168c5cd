"""The files that show a report, each written by its option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.cli.options import FileOptions
from memfit.cli.output import Work, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.report.facts import Report
    from memfit.report.levers import Lever


def write_files(files: FileOptions, report: Report, levers: Sequence[Lever] = ()) -> None:
    """Write what was asked for, and say so; levers are shown on the page."""
    from memfit.report.markdown import markdown_of
    from memfit.report.page import write_page
    from memfit.report.perfetto import write_perfetto
    from memfit.report.snapshot import write_snapshot

    if files.html is not None:
        with Work("drawing the page"):
            write_page(report, files.html, levers=levers)
        say(f"wrote {files.html}, open it in a browser")
    if files.perfetto is not None:
        write_perfetto(report, files.perfetto)
        say(f"wrote {files.perfetto}, open it at ui.perfetto.dev")
    if files.snapshot is not None:
        write_snapshot(report, files.snapshot)
        say(f"wrote {files.snapshot}, open it at pytorch.org/memory_viz")
    if files.markdown is not None:
        files.markdown.write_text(markdown_of(report), encoding="utf-8")
        say(f"wrote {files.markdown}")
