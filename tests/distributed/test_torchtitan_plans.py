"""A plan from a capture of torchtitan's own code, on the model that this code has wrapped, on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memfit

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError, reason="make titan installs torchtitan")

from memfit.integrations import torchtitan
from memfit.memory import Timeline
from tests.distributed import titan_ranks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.zoo, pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_a_plan_keeps_the_bits_and_its_budget(two_ranks: Ranks, tmp_path: Path) -> None:
    config = titan_ranks.config()
    mesh = torchtitan.mesh(config, ranks=2)
    trace = memfit.trace(torchtitan.step(config), target="cpu", mesh=mesh)
    path = str(tmp_path / "trace.msgpack")
    memfit.save_trace(trace, path)
    free_bytes = Timeline.of(trace, 1).peak_bytes
    budget = free_bytes * 4 // 5  # the rest holds parameters, their state, and what no plan can give up
    plan = memfit.plan(trace, target="cpu", ranks=2, budget=budget, progress=False)
    assert plan.predicted is not None
    plain = two_ranks.run(titan_ranks.trained, None, path)
    planned = two_ranks.run(titan_ranks.trained, plan.to_json(), path)
    for without, under in zip(plain, planned, strict=True):
        assert under.losses == without.losses and len(set(under.losses)) == len(under.losses)
        assert all(map(torch.equal, under.shards, without.shards))
        assert under.peak_bytes <= budget < without.peak_bytes
        assert under.peak_bytes == plan.predicted.peak_bytes
        assert without.peak_bytes == free_bytes
