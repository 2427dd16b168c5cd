"""What people see: terminal tables, the page and, from the same results, files. Loaded when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.lazy_names import lazy_names

if TYPE_CHECKING:
    from memfit.report.comparison_display import comparison_report
    from memfit.report.curve_display import curve_report, describe_curve
    from memfit.report.device_search_display import device_search_report, display_usd
    from memfit.report.explain_display import explanation_report, levers_in_short
    from memfit.report.json_document import to_json
    from memfit.report.markdown import to_markdown
    from memfit.report.memory_display import memory_report, print_memory
    from memfit.report.mesh_search_display import mesh_search_report
    from memfit.report.page.search_page import write_search_page
    from memfit.report.page.writing import write_page
    from memfit.report.perfetto import write_perfetto
    from memfit.report.plan_display import plan_report
    from memfit.report.search_display import display_rate, search_report
    from memfit.report.snapshot import write_snapshot
    from memfit.report.time_display import print_time, time_report
    from memfit.report.torch_policy import to_torch_policy, write_torch_policy
    from memfit.report.tuning_display import tuning_report
    from memfit.report.verify_display import verification_report

__all__ = [
    "comparison_report",
    "curve_report",
    "describe_curve",
    "device_search_report",
    "display_rate",
    "display_usd",
    "explanation_report",
    "levers_in_short",
    "memory_report",
    "mesh_search_report",
    "plan_report",
    "print_memory",
    "print_time",
    "search_report",
    "time_report",
    "to_json",
    "to_markdown",
    "to_torch_policy",
    "tuning_report",
    "verification_report",
    "write_page",
    "write_perfetto",
    "write_search_page",
    "write_snapshot",
    "write_torch_policy",
]

__getattr__ = lazy_names(
    __name__,
    {
        "memfit.report.comparison_display": ("comparison_report",),
        "memfit.report.curve_display": ("curve_report", "describe_curve"),
        "memfit.report.device_search_display": ("device_search_report", "display_usd"),
        "memfit.report.explain_display": ("explanation_report", "levers_in_short"),
        "memfit.report.json_document": ("to_json",),
        "memfit.report.markdown": ("to_markdown",),
        "memfit.report.memory_display": ("memory_report", "print_memory"),
        "memfit.report.mesh_search_display": ("mesh_search_report",),
        "memfit.report.page.search_page": ("write_search_page",),
        "memfit.report.page.writing": ("write_page",),
        "memfit.report.perfetto": ("write_perfetto",),
        "memfit.report.plan_display": ("plan_report",),
        "memfit.report.search_display": ("display_rate", "search_report"),
        "memfit.report.snapshot": ("write_snapshot",),
        "memfit.report.time_display": ("print_time", "time_report"),
        "memfit.report.torch_policy": ("to_torch_policy", "write_torch_policy"),
        "memfit.report.tuning_display": ("tuning_report",),
        "memfit.report.verify_display": ("verification_report",),
    },
)
