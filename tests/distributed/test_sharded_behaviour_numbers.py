from __future__ import annotations

import pytest
import torch

from tests.distributed import sharded_behaviour_numbers as numbers
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("where", ["units", "root", "none"])
def test_inputs_are_cast_where_wanted(two_ranks: Ranks, where: str) -> None:
    two_ranks.run(numbers.inputs_are_cast, where)


def test_outputs_of_the_root_are_cast(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.outputs_are_cast)


def test_eval_can_be_in_full_precision(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.full_precision_in_eval)


def test_gradients_can_stay_in_low_precision(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.low_precision_gradients_are_kept)


def test_gradients_are_divided_by_what_was_given(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.divisors_are_used)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_can_be_sent_in_a_small_dtype(two_ranks: Ranks, dtype: torch.dtype) -> None:
    two_ranks.run(numbers.compressed_gradients, dtype)


def test_float16_does_not_overflow_in_the_sum(four_ranks: Ranks) -> None:
    four_ranks.run(numbers.float16_does_not_overflow)


def test_a_hook_can_sum_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.hooks_sum_gradients)


def test_gradients_that_are_zeroed_are_added_to(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.gradients_that_are_zeroed)


def test_optimizers_can_run_in_backward(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.optimizer_in_backward)


def test_sparse_gradients_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.sparse_gradients_are_refused)


def test_inputs_get_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(numbers.gradients_of_inputs)
