"""Calibration on real ranks: ops, collectives and engines are measured, and what is written predicts with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from memfit.cost import Collective
from memfit.hardware import load_device
from tests.distributed import calibrated_ranks as ranks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_two_ranks_measure_the_same_figures_of_ops_collectives_and_engines(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(ranks.calibrated)
    assert first == second, "plans of the ranks would differ"
    assert first.ranks == 2 and first.link is not None and len(first.link.collectives) == 4
    assert {each.kind for each in first.link.collectives} < {each.value for each in Collective}
    assert first.long_run is not None and first.long_run_half is not None and first.efficiency.half
    engines = {each.engine for each in first.engines}  # in 16 bits where steps took longer than their ops
    assert {"fsdp2", "sharded"} <= engines <= {"fsdp2", "fsdp2-half", "sharded", "sharded-half"}
    device = load_device(str(first.save(tmp_path / "two-ranks.toml")))
    for written, measured in zip(device.engines, first.engines, strict=True):
        assert dataclasses.astuple(written)[1:] == pytest.approx(dataclasses.astuple(measured)[1:], rel=1e-4)
        assert measured.offload_s_per_byte >= 0  # nothing where copies are not seen to cost more than the disk's own
        assert min(measured.slowdown, measured.collective_ms, measured.waiting, measured.second_run_ms) > 0
