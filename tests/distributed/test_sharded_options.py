from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed import sharded_options as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize(
    "case",
    [
        cases.policies_of_fsdp2,
        cases.precision_by_unit,
        cases.shards_in_another_dtype,
        cases.options_of_fsdp2,
        cases.ignored_modules,
        cases.gradients_inside_no_sync,
        cases.whole_gradients_and_rank_0,
        cases.collectives_of_the_user,
        cases.sums_are_hooked,
        cases.compiled_before,
        cases.optimizer_made_before_clears,
        cases.gathers_that_fail,
    ],
    ids=lambda case: case.__name__,
)
def test_options_that_users_of_fsdp_have(case: Callable[[], None], two_ranks: Ranks) -> None:
    two_ranks.run(case)


def test_hooks_on_sums_over_replicas(four_ranks: Ranks) -> None:
    four_ranks.run(cases.sums_over_replicas_are_hooked)
