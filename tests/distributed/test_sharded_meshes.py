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
        cases.parameters_know_both_dimensions,
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
        inner.inner_refusals,
        inner.dimensions_to_shard,
    ],
    ids=lambda case: case.__name__,
)
def test_inner_models(case: object, two_ranks: Ranks) -> None:
    two_ranks.run(case)
