"""What people see: terminal tables and, from the same results, files."""

from memfit.report.terminal import memory_report, print_memory

__all__ = ["memory_report", "print_memory"]
