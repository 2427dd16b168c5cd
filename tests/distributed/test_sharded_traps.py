from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import sharded_traps as traps
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("keep", [False, True])
def test_a_loss_kept_as_an_attribute_gives_an_error_or_right_gradients(two_ranks: Ranks, keep: bool) -> None:
    two_ranks.run(traps.loss_in_an_attribute, keep)


@pytest.mark.parametrize(("keep", "plain"), [(False, False), (True, False), (False, True)])
def test_a_step_between_forward_and_backward_is_an_error(two_ranks: Ranks, keep: bool, plain: bool) -> None:
    two_ranks.run(traps.step_between_forward_and_backward, keep, plain)


@pytest.mark.parametrize("how", ["sharded", "replicas", "plain"])
def test_a_step_between_the_backwards_of_two_graphs_is_an_error(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(traps.step_between_the_backwards_of_two_graphs, how)


def test_messages_of_the_user_on_the_same_group_do_not_meet_gathers(two_ranks: Ranks) -> None:
    two_ranks.run(traps.sends_of_the_user_are_left_alone)


def test_replicas_that_begin_with_different_values_are_refused_on_all_ranks(four_ranks: Ranks) -> None:
    for said in four_ranks.run(traps.replicas_that_begin_apart):
        assert "rank 1 and rank 3 are replicas, and begin with different values of '1.weight'" in said
        assert "from_rank_0=True" in said


def test_parameters_that_come_after_shard_are_refused(two_ranks: Ranks) -> None:
    for said in two_ranks.run(traps.parameters_that_come_after_shard):
        assert "parameter '1.weight' came into the model after shard" in said


def test_the_step_of_another_optimizer_can_be_compiled(two_ranks: Ranks) -> None:
    two_ranks.run(traps.compiled_step_beside_a_sharded_model)


def test_local_parts_are_pickled_and_copied_as_plain_tensors(two_ranks: Ranks) -> None:
    two_ranks.run(traps.local_parts_are_copied_as_plain_tensors)


def test_a_dtype_changed_after_shard_is_refused_at_the_next_forward(two_ranks: Ranks) -> None:
    for said in two_ranks.run(traps.other_dtype_after_shard):
        assert "is torch.float64 on cpu" in said
        assert "change dtype or device before shard" in said


def test_values_put_in_place_of_data_are_taken_over(two_ranks: Ranks) -> None:
    two_ranks.run(traps.data_is_replaced)


@pytest.mark.parametrize("what", ["full state", "save", "load", "full parameters"])
def test_values_put_in_place_of_data_are_seen_without_a_forward(two_ranks: Ranks, what: str, tmp_path: Path) -> None:
    two_ranks.run(traps.data_is_replaced_before, what, str(tmp_path))


def test_functional_call_is_refused(two_ranks: Ranks) -> None:
    two_ranks.run(traps.functional_call_is_refused)


def test_rank_0_without_values_is_refused_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(traps.meta_on_rank_0)
    assert first.startswith("RankMismatch") and second.startswith("RankMismatch")
    for said in (first, second):
        assert "from_rank_0 takes rank 0's values, and 'embedding.weight' is on the meta device there" in said


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_backward_with_a_graph_of_its_own_is_refused(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(traps.graph_of_a_backward_is_refused, how)


@pytest.mark.parametrize("two_forwards", [False, True])
def test_a_unit_that_runs_twice_with_other_experts_on_each_rank(two_ranks: Ranks, two_forwards: bool) -> None:
    two_ranks.run(traps.ranks_route_differently, two_forwards)


def test_a_dropped_forward_before_a_step_in_which_a_rank_leaves_a_unit_out(two_ranks: Ranks) -> None:
    two_ranks.run(traps.dropped_forward_then_unused_unit)


def test_an_optimizer_in_backward_steps_each_parameter_once(two_ranks: Ranks) -> None:
    two_ranks.run(traps.hooks_run_once)


def test_a_parameter_unfrozen_after_a_pass_that_was_not_sent(two_ranks: Ranks) -> None:
    two_ranks.run(traps.unfrozen_after_a_pass_that_was_not_sent)


@pytest.mark.parametrize("how", ["forward", "backward", "steps"])
def test_a_model_that_was_used_is_collected(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(traps.model_is_collected, how)


def test_a_unit_that_begins_in_place_is_freed_as_others_are(two_ranks: Ranks) -> None:
    in_place, not_in_place = (two_ranks.run(traps.gathered_in_backward, each) for each in (True, False))
    assert in_place == not_in_place
    assert max(in_place) <= 2


def test_a_backward_through_the_input_of_a_unit_leaves_the_unit_to_a_later_one(two_ranks: Ranks) -> None:
    two_ranks.run(traps.input_has_a_backward_of_its_own)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_after_a_failed_backward(two_ranks: Ranks, set_to_none: bool) -> None:
    two_ranks.run(traps.zero_grad_after_a_failed_backward, set_to_none)


@pytest.mark.parametrize("how", ["backward", "forward"])
def test_an_emergency_save_has_the_last_state(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    two_ranks.run(traps.emergency_save, how, str(tmp_path))


@pytest.mark.parametrize("how", ["step", "full parameters", "unit"])
def test_a_model_works_after_an_interrupted_forward(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(traps.interrupted_then_used, how)
