"""Prints the zoo's table at the end of a run."""

from __future__ import annotations

import statistics
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [each for outcome in ("passed", "failed") for each in terminalreporter.stats.get(outcome, [])]
    properties = [(report, dict(report.user_properties)) for report in reports if hasattr(report, "user_properties")]
    _captured(
        terminalreporter,
        [
            (report.nodeid.rpartition("[")[2].rstrip("]"), each["peak_bytes"], each["error_bytes"])
            for report, each in properties
            if "peak_bytes" in each
        ],
    )
    _verified(terminalreporter, [row for _, each in properties for row in each.get("verified", ())])


def _captured(terminalreporter: Any, rows: list[tuple[str, int, int]]) -> None:
    if not rows:
        return
    terminalreporter.section("zoo: captured against measured peak")
    for name, peak_bytes, error_bytes in sorted(rows):
        percent = 100 * error_bytes / peak_bytes
        terminalreporter.write_line(
            f"{name:24s} measured {peak_bytes:12,d} bytes, captured {error_bytes:+,d} ({percent:+.4f} %)"
        )
    errors = [100 * abs(error_bytes) / peak_bytes for _, peak_bytes, error_bytes in rows]
    terminalreporter.write_line(
        f"{len(rows)} steps: median error {statistics.median(errors):.2f} %, largest {max(errors):.2f} %"
    )


def _verified(terminalreporter: Any, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    terminalreporter.section("zoo: plans on the real models, predicted against measured peak")
    errors = []
    for row in sorted(rows, key=lambda row: (row["name"], row["part"])):
        error_bytes = row["predicted_bytes"] - row["measured_bytes"]
        errors.append(100 * abs(error_bytes) / row["measured_bytes"])
        over_bytes = row["measured_bytes"] - row["budget_bytes"]
        remarks = ["same bits" if row["equal"] else "GRADIENTS DIFFER"]
        remarks += [f"{over_bytes:,d} OVER BUDGET"] if over_bytes > 0 else []
        terminalreporter.write_line(
            f"{row['name']:20s} {row['part']:.2f} {row['units']:3d} units, "
            f"measured {row['measured_bytes']:12,d} bytes, predicted {error_bytes:+,d} ({errors[-1]:.4f} %), "
            f"{', '.join(remarks)}"
        )
    terminalreporter.write_line(
        f"{len(rows)} plans: median error {statistics.median(errors):.4f} %, largest {max(errors):.4f} %"
    )
