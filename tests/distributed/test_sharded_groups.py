from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.sharded_groups import CASES, CHECKS, compare_case

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("name", CASES)
def test_modules_that_are_one_unit_train_as_their_peers_do_bit_by_bit(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(compare_case, name)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_modules_that_are_one_unit(two_ranks: Ranks, check: Callable[[], None]) -> None:
    two_ranks.run(check)
