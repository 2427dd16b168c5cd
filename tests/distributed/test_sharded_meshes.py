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


def test_a_rank_that_dies_beside_tensor_parallel_ends_all_others_in_time(four_ranks: Ranks) -> None:
    timeout_s = 5.0
    four_ranks.begin(cases.a_rank_dies, timeout_s)
    found = four_ranks.answers()
    four_ranks.stop()
    assert found[3] is None
    for rank in range(3):
        text, seconds = found[rank][0]
        assert seconds < 2 * timeout_s + 10, (rank, text)
    assert found[1][0][0].startswith("CollectiveError: rank 1:") and "rank 3" in found[1][0][0]
