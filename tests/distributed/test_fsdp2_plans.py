"""Plans on PyTorch's FSDP2, on real ranks: the bits and the memory of training under them."""

from __future__ import annotations

import functools

import pytest

from memfit.plans import Plan
from tests.distributed import fsdp2_plans as plans
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@functools.cache
def planned(name: str, ranks: int = 2) -> Plan:
    return plans.PLANS[name].plan(ranks)


@pytest.mark.parametrize("name", plans.PLANS)
def test_a_plan_on_fsdp2_trains_to_the_bits_of_fsdp2(two_ranks: Ranks, name: str) -> None:
    plan = planned(name)
    assert {entry.unit for entry in plan.checkpoint} >= set(plans.PLANS[name].force)
    two_ranks.run(plans.trains_to_the_same_bits, name, plan.to_json())
