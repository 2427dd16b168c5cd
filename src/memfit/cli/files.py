"""The files that show a report, each written by its option."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memfit.cli.options import FileOptions
from memfit.cli.output import say
from memfit.cli.problems import for_file
from memfit.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.analysis.facts import Report
    from memfit.analysis.levers import Lever


def write_files(files: FileOptions, report: Report, levers: Sequence[Lever] = ()) -> None:
    """Write what was asked for, and say so; levers are shown on the page and in the Markdown."""
    from memfit.report.markdown import to_markdown
    from memfit.report.page import write_page
    from memfit.report.perfetto import write_perfetto
    from memfit.report.snapshot import write_snapshot

    if files.html is not None:
        with Progress("drawing the page"), for_file("--html"):
            write_page(report, files.html, levers=levers)
        say(f"wrote {files.html}, open it in a browser")
    if files.perfetto is not None:
        with for_file("--perfetto"):
            write_perfetto(report, files.perfetto)
        say(f"wrote {files.perfetto}, open it at ui.perfetto.dev")
    if files.snapshot is not None:
        with for_file("--snapshot"):
            write_snapshot(report, files.snapshot)
        say(f"wrote {files.snapshot}, open it at pytorch.org/memory_viz")
    if files.markdown is not None:
        write_text("--markdown", files.markdown, to_markdown(report, levers))


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file of an option, and say so."""
    from memfit.files import write_whole

    with for_file(option):
        write_whole(path, text.encode(), path.name)
    say(f"wrote {path}")
