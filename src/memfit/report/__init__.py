"""What people see: terminal tables, the page and, from the same results, files."""

from memfit.report.json_document import json_of
from memfit.report.markdown import markdown_of
from memfit.report.page.writing import write_page
from memfit.report.perfetto import write_perfetto
from memfit.report.snapshot import write_snapshot
from memfit.report.terminal import memory_report, print_memory
from memfit.report.times import print_time, time_report

__all__ = [
    "json_of",
    "markdown_of",
    "memory_report",
    "print_memory",
    "print_time",
    "time_report",
    "write_page",
    "write_perfetto",
    "write_snapshot",
]
