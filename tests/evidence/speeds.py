"""Compares predicted with published kernel times, prints one table and writes the speeds' part of docs/evidence.md.

python tests/evidence/speeds.py [--write]
"""

from __future__ import annotations

import sys

from kernel_times import Errors, by_group, read_rows


def kernel_table() -> list[str]:
    """A row for each group: rows, median and 90th percentile of the errors, fitted and left out."""
    lines = [
        "| kernels | GPU | fitted to | median | 90 % | left out | median | 90 % | predicted / measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, gpu), rows in by_group(read_rows()).items():
        fitted = Errors.of([row for row in rows if row.fitted])
        left_out = Errors.of([row for row in rows if not row.fitted])
        cells = [kind, gpu, *_cells(fitted), *_cells(left_out), f"{left_out.ratio:.2f}" if left_out else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", "-", "-"]
    return [f"{errors.count:,}", f"{errors.median:.1%}", f"{errors.ninetieth:.1%}"]


def main() -> None:
    """Print the table."""
    print("\n".join(kernel_table()))


if __name__ == "__main__":
    sys.exit(main())
