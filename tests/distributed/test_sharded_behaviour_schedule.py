from __future__ import annotations

import pytest

from tests.distributed import sharded_behaviour_schedule as schedule
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_so_many_units_are_gathered_ahead(two_ranks: Ranks, depth: int, at: str) -> None:
    two_ranks.run(schedule.prefetch_depth, depth, at)


@pytest.mark.parametrize("at", ["before", "after"])
def test_the_next_backward_is_gathered_before_or_after_this_one(two_ranks: Ranks, at: str) -> None:
    two_ranks.run(schedule.backward_prefetch_begins, at)


@pytest.mark.parametrize("units", [0.5, 1.0, 2.5])
def test_bytes_in_flight_are_bounded(two_ranks: Ranks, units: float) -> None:
    two_ranks.run(schedule.bytes_in_flight, units)


def test_all_ranks_may_change_the_order_together(two_ranks: Ranks) -> None:
    two_ranks.run(schedule.changing_order)


def test_an_order_that_is_given_is_used(two_ranks: Ranks) -> None:
    two_ranks.run(schedule.given_order)


def test_different_orders_name_rank_unit_and_position(two_ranks: Ranks) -> None:
    two_ranks.run(schedule.different_orders_are_told)


@pytest.mark.parametrize("name", schedule.GATHERS)
def test_units_are_gathered_no_more_than_needed(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(schedule.gathers_of_one_step, name)


def test_a_unit_that_was_resharded_to_two_ranks_gathers_from_those(four_ranks: Ranks) -> None:
    four_ranks.run(schedule.resharded_gathers)
