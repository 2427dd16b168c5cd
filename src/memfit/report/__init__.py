"""What people see: terminal tables, the page and, from the same results, files."""

from memfit.report.json_document import to_json
from memfit.report.markdown import to_markdown
from memfit.report.memory_display import memory_report, print_memory
from memfit.report.page.writing import write_page
from memfit.report.perfetto import write_perfetto
from memfit.report.snapshot import write_snapshot
from memfit.report.time_display import print_time, time_report

__all__ = [
    "memory_report",
    "print_memory",
    "print_time",
    "time_report",
    "to_json",
    "to_markdown",
    "write_page",
    "write_perfetto",
    "write_snapshot",
]
