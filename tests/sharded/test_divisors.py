from __future__ import annotations

import pytest
import torch

from memfit.sharded.gradients import divisors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_divided_by_the_ranks_in_all(ranks: int, dtype: torch.dtype) -> None:
    before, after = divisors(ranks, dtype, None)
    assert before * after == ranks


def test_a_power_of_two_is_divided_by_at_once_since_that_is_exact() -> None:
    assert divisors(8, torch.float32, None) == (8.0, 1.0)
    assert divisors(6, torch.float32, None) == (1.0, 6.0)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 1024])
def test_float16_is_divided_on_both_sides_of_the_sum(ranks: int) -> None:
    before, after = divisors(ranks, torch.float16, None)
    assert 1 <= before / after <= 2


def test_a_divisor_that_is_given_is_used() -> None:
    assert divisors(4, torch.float32, 10.0) == (1.0, 10.0)
