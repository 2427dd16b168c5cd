"""Plans survive the wrappers of data parallel training, applied before or after them."""

from __future__ import annotations

import pytest

from tests.distributed import wrapped_plans as plans
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("wrap", plans.WRAPPERS)
def test_a_plan_before_and_after_wrapping_gives_the_same_bits_with_less_memory(two_ranks: Ranks, wrap: str) -> None:
    two_ranks.run(plans.compared, wrap)


def test_units_are_found_through_wrappers_of_their_own(two_ranks: Ranks) -> None:
    two_ranks.run(plans.wrapped_inside)


def test_a_subclass_of_a_wrapper_stands_for_it(two_ranks: Ranks) -> None:
    wraps = (plans.DistributedDataParallel, plans.OwnReplicas)
    two_ranks.run(plans.applied_to_subclass, [plans.planned_replicas(wrap).to_json() for wrap in wraps])
