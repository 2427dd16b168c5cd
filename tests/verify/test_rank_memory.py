"""Events of the allocator replayed by address, as ranks need it."""

from __future__ import annotations

from memfit.capture import AllocatorEvent
from memfit.verify.rank_memory import lowest_rise

MARK = AllocatorEvent(bytes=1, address=0, ops=())


def event(n_bytes: int, address: int, *ops: str) -> AllocatorEvent:
    return AllocatorEvent(bytes=n_bytes, address=address, ops=ops)


def test_a_free_that_was_not_seen_ends_where_the_address_is_used_again() -> None:
    events = [MARK, event(100, 1), event(60, 2), event(80, 1), event(-80, 1), event(-60, 2)]
    assert lowest_rise(events, [0]) == 160, "not 240"


def test_frees_of_what_the_step_before_left_count() -> None:
    events = [event(50, 1), MARK, event(-50, 1), event(70, 2), event(-70, 2)]
    assert lowest_rise(events, [1]) == 20


def test_what_was_freed_unseen_before_the_step_is_not_subtracted() -> None:
    events = [event(50, 1), MARK, event(70, 1), event(-70, 1)]
    assert lowest_rise(events, [1]) == 70


def test_copies_of_the_transport_do_not_count_and_the_lowest_step_is_taken() -> None:
    step = [MARK, event(900, 3, "c10d::allreduce_"), event(-900, 3), event(70, 2), event(-70, 2)]
    unseen = [MARK, event(40, 4), event(70, 2), event(-70, 2)]
    assert lowest_rise([*unseen, *step], [0, len(unseen)]) == 70
