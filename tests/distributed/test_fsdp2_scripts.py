from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from memfit.sharded import shard
from tests.distributed import fsdp2_scripts as scripts
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

_BY = {"memfit": shard, "FSDP2": fully_shard}


def test_a_checkpoint_of_four_ranks_is_gone_on_from_by_two(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    for who, by in _BY.items():
        four_ranks.run(scripts.checkpoint_with_dcp, by, str(tmp_path / who), resume=False)
    for who in _BY:
        found = {
            by: two_ranks.run(scripts.checkpoint_with_dcp, _BY[by], str(tmp_path / who), resume=True) for by in _BY
        }
        _assert_same(found["memfit"], found["FSDP2"])


def test_a_scaler_beside_accumulation(two_ranks: Ranks) -> None:
    _assert_same(*(two_ranks.run(scripts.scaler_with_accumulation, by) for by in _BY.values()))


def test_replicas_that_shard_within(four_ranks: Ranks) -> None:
    _assert_same(*(four_ranks.run(scripts.hybrid, by) for by in _BY.values()))


def test_tensor_parallel_beside_sharding(four_ranks: Ranks, tmp_path: Path) -> None:
    _assert_same(*(four_ranks.run(scripts.tensor_parallel, by, str(tmp_path / who)) for who, by in _BY.items()))


def test_adapters_beside_frozen_integers(two_ranks: Ranks) -> None:
    _assert_same(*(two_ranks.run(scripts.lora, by) for by in _BY.values()))


def _assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Every rank reports the same, parameters to the last bit; norms are summed in another order."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"parameters"}:
            same = one[name] == other[name]
            assert same or one[name] == pytest.approx(other[name], rel=1e-5, nan_ok=True), name
        assert one["parameters"].keys() == other["parameters"].keys()
        different = [
            name for name, value in one["parameters"].items() if not torch.equal(value, other["parameters"][name])
        ]
        assert not different, different
