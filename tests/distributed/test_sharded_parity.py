from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.sharded_parity_cases import FOUR_RANKS, TWO_RANKS, compare_case, compare_hugging_face

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_as_their_peers_do_bit_by_bit(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(compare_case, "two", name)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_train_as_their_peers_do_up_to_rounding(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(compare_case, "four", name)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the zoo extra")
def test_two_ranks_train_the_t5_of_transformers_bit_by_bit(two_ranks: Ranks) -> None:
    two_ranks.run(compare_hugging_face)
