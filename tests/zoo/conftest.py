"""Prints the zoo's table at the end of a run."""

from __future__ import annotations

import statistics
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(report.user_properties)
            if "peak_bytes" in properties:
                name = report.nodeid.rpartition("[")[2].rstrip("]")
                rows.append((name, properties["peak_bytes"], properties["error_bytes"]))
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
