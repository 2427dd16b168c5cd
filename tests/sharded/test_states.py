from __future__ import annotations

from itertools import pairwise

import pytest

from memfit.errors import StateError
from memfit.sharded.unit import State, check_transition


def test_a_step_goes_through_all_states_and_ends_idle() -> None:
    step = [State.IDLE, State.FORWARD, State.IDLE, State.PRE_BACKWARD, State.BACKWARD, State.POST_BACKWARD, State.IDLE]
    for before, after in pairwise(step):
        check_transition("unit 'a'", before, after)


@pytest.mark.parametrize("state", State)
def test_every_state_leads_back_to_idle_but_none_to_itself(state: State) -> None:
    assert state is State.IDLE or state.leads_to(State.IDLE)
    assert not state.leads_to(state)


@pytest.mark.parametrize("state", [State.FORWARD, State.PRE_BACKWARD, State.BACKWARD, State.POST_BACKWARD])
def test_full_parameters_are_for_between_steps(state: State) -> None:
    with pytest.raises(StateError, match=rf"unit 'a' is {state.value} and cannot become summoned.*after the backward"):
        check_transition("unit 'a'", state, State.SUMMONED)
    with pytest.raises(StateError, match=rf"unit 'a' is summoned and cannot become {state.value}.*full_parameters"):
        check_transition("unit 'a'", State.SUMMONED, state)


def test_a_module_that_calls_itself_is_named() -> None:
    with pytest.raises(StateError, match=r"unit 'a' is forward and cannot become forward; a module that calls itself"):
        check_transition("unit 'a'", State.FORWARD, State.FORWARD)
