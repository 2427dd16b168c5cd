from __future__ import annotations

import pytest

from tests.distributed import sharded_behaviour_life as life
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("name", life.FAULTS)
def test_an_exception_leaves_a_usable_model(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(life.exception_leaves_a_usable_model, name)


def test_a_model_may_catch_what_its_unit_raises(two_ranks: Ranks) -> None:
    two_ranks.run(life.exception_that_the_model_catches)


def test_a_forward_that_fails_keeps_gradients_that_were_not_sent(two_ranks: Ranks) -> None:
    two_ranks.run(life.exception_keeps_gradients_that_were_not_sent)


def test_a_forward_without_a_backward_changes_nothing(two_ranks: Ranks) -> None:
    two_ranks.run(life.forward_without_backward)


def test_evaluation_equals_a_plain_model_and_frees_everything(two_ranks: Ranks) -> None:
    two_ranks.run(life.evaluation)


def test_a_forward_uses_the_weights_of_the_last_step(two_ranks: Ranks) -> None:
    two_ranks.run(life.step_between_forwards)


def test_user_hooks_see_whole_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(life.user_hooks)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple", "named tuple", "none"])
def test_tensors_are_found_inside_of_inputs_and_outputs(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(life.odd_inputs_and_outputs, kind)


@pytest.mark.parametrize("how", ["whole", "view"])
def test_a_unit_may_return_its_parameter(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(life.parameters_as_outputs, how)


def test_outputs_may_be_changed_in_place(two_ranks: Ranks) -> None:
    two_ranks.run(life.outputs_changed_in_place)


def test_a_graph_goes_with_its_last_tensor(two_ranks: Ranks) -> None:
    two_ranks.run(life.graphs_are_dropped)


def test_wrong_transitions_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(life.wrong_transitions)


def test_ranks_that_were_given_different_things_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(life.different_ranks_are_told)


def test_forwards_of_units_can_be_compiled(two_ranks: Ranks) -> None:
    two_ranks.run(life.compiled_units)


def test_a_whole_model_can_be_compiled_around_its_units(two_ranks: Ranks) -> None:
    two_ranks.run(life.compiled_model)


def test_parameters_may_be_frozen_and_thawed_between_steps(two_ranks: Ranks) -> None:
    two_ranks.run(life.frozen_and_thawed)


def test_ignored_parameters_stay_whole(two_ranks: Ranks) -> None:
    two_ranks.run(life.ignored_parameters)


def test_an_optimizer_may_be_built_before(two_ranks: Ranks) -> None:
    two_ranks.run(life.optimizer_built_before)
