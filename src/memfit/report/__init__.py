"""What people see: terminal tables and, from the same results, files."""

from memfit.report.terminal import memory_report, print_memory
from memfit.report.times import print_time, time_report

__all__ = ["memory_report", "print_memory", "print_time", "time_report"]
