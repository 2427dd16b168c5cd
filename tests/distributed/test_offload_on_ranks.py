"""Plans that offload, on FSDP2 and on memfit's own runtime: units inside them are those of one device."""

from __future__ import annotations

import pytest

from tests.distributed import fsdp2_plans as plans
from tests.distributed import offloading_ranks as on_rank
from tests.distributed.ranks import Ranks
from tests.engines.offloading import offload_units

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("engine", ["fsdp2", "sharded"])
def test_ranks_that_offload_train_to_the_same_bits(two_ranks: Ranks, engine: str) -> None:
    case = plans.PLANS["nothing checkpointed"]
    made = offload_units(case.step(), plans.BLOCKS, plain=case.plan(2))
    for exact, written_bytes, left_bytes in two_ranks.run(on_rank.trains, made.plan.to_json(), engine):
        assert exact
        assert written_bytes >= sum(made.bytes.values()) > 0
        assert not left_bytes
