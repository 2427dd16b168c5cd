"""Prints the zoo's table at the end of a run, and fails the run where plans are wrong by too much on the whole."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

MEDIAN_ERROR_PERCENT = 0.1
"""Of the predicted peaks of all plans."""


def pytest_sessionfinish(session: Any) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    rows = _rows(reporter) if reporter is not None else []
    if rows and statistics.median(map(_error_percent, rows)) > MEDIAN_ERROR_PERCENT:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    properties = _properties(terminalreporter)
    _captured(
        terminalreporter,
        [
            (report.nodeid.rpartition("[")[2].rstrip("]"), each["peak_bytes"], each["error_bytes"])
            for report, each in properties
            if "peak_bytes" in each
        ],
    )
    _verified(terminalreporter, _rows(terminalreporter))


def _properties(terminalreporter: Any) -> list[tuple[Any, dict[str, Any]]]:
    reports = [each for outcome in ("passed", "failed") for each in terminalreporter.stats.get(outcome, [])]
    return [(report, dict(report.user_properties)) for report in reports if hasattr(report, "user_properties")]


def _rows(terminalreporter: Any) -> list[dict[str, Any]]:
    return [row for _, each in _properties(terminalreporter) for row in each.get("verified", ())]


def _error_percent(row: dict[str, Any]) -> float:
    return 100 * abs(row["predicted_bytes"] - row["measured_bytes"]) / row["measured_bytes"]


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
    for row in sorted(rows, key=lambda row: (row["name"], row["part"])):
        error_bytes = row["predicted_bytes"] - row["measured_bytes"]
        over_bytes = row["measured_bytes"] - row["budget_bytes"]
        remarks = ["same bits" if row["equal"] else "GRADIENTS DIFFER"]
        remarks += [f"{over_bytes:,d} OVER BUDGET"] if over_bytes > 0 else []
        terminalreporter.write_line(
            f"{row['name']:20s} {row['part']:.2f} {row['units']:3d} units, "
            f"measured {row['measured_bytes']:12,d} bytes, predicted {error_bytes:+,d} ({_error_percent(row):.4f} %), "
            f"{', '.join(remarks)}"
        )
    errors = [_error_percent(row) for row in rows]
    terminalreporter.write_line(
        f"{len(rows)} plans: median error {statistics.median(errors):.4f} % (at most {MEDIAN_ERROR_PERCENT} %), "
        f"largest {max(errors):.4f} %"
    )
