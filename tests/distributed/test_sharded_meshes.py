from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import sharded_inner_models as inner
from tests.distributed import sharded_meshes as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize(
    "case",
    [
        cases.parity_with_fsdp2,
        cases.parity_in_three_dimensions,
        cases.expert_parallel,
        cases.experts_without_work,
        cases.parameters_know_both_dimensions,
        cases.odd_models,
        cases.clipping,
        cases.starts,
        cases.reduce_scatters_before_an_all_reduce,
        cases.refusals,
    ],
    ids=lambda case: case.__name__,
)
def test_meshes(case: object, four_ranks: Ranks) -> None:
    four_ranks.run(case)


def test_checkpoints(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(cases.checkpoints, str(tmp_path))


@pytest.mark.parametrize(
    "case",
    [
        inner.recipe_of_fsdp2,
        inner.what_the_recipe_leaves,
        inner.options_of_each_call,
        inner.state_on_groups_of_its_own,
        inner.inner_refusals,
        inner.dimensions_to_shard,
    ],
    ids=lambda case: case.__name__,
)
def test_inner_models(case: object, two_ranks: Ranks) -> None:
    two_ranks.run(case)


@pytest.mark.parametrize("how", ["dies", "takes another order", pytest.param("stops", marks=pytest.mark.zoo)])
def test_a_rank_that_fails_beside_tensor_parallel_is_told_in_time(how: str, four_ranks: Ranks) -> None:
    timeout_s = 5.0
    four_ranks.begin(cases.the_last_rank_fails, how, timeout_s)
    told, seconds = four_ranks.answer(1)[0]  # to the rank that shards the same block
    # one that waits in a collective of tensor parallel has the timeout of that group, which is torch's
    others = [] if how == "stops" else [four_ranks.answer(rank) for rank in (0, 2)]
    last = None if how == "stops" else four_ranks.answer(3)
    four_ranks.stop()
    assert (last is None) == (how != "takes another order")
    for text, after in ((told, seconds), *(each[0] for each in others)):
        assert after < 2 * timeout_s + 10, text
    if how == "takes another order":
        assert told.startswith("OrderError: ") and "rank 3 runs unit 'blocks.1' at position 1" in told, told
    else:
        assert told.startswith("CollectiveError: rank 1:") and "rank 3" in told, told
