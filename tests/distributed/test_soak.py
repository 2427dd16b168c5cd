"""A slice of `benchmarks/soak.py`: faults, and restarts at changing numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.soak import soak

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_a_run_with_faults_and_restarts_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    report = soak("exact", 32, 163, 6, tmp_path, ranks=(1, 2, 3))
    assert report.equal and report.changed
    assert report.faults.total() == 4 and len(report.lives) == 3
    assert report.loads["memfit"] and report.loads["dcp"]
