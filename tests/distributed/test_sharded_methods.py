from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed import sharded_methods as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize(
    "case",
    [
        cases.parameters_are_gathered_on_demand,
        cases.settings_of_fsdp2,
        cases.methods_of_fsdp2_are_all_there,
        cases.gathers_follow_the_settings,
        cases.other_methods_than_forward,
    ],
    ids=lambda case: case.__name__,
)
def test_modules_have_the_methods_of_fsdp2(case: Callable[[], None], two_ranks: Ranks) -> None:
    two_ranks.run(case)
