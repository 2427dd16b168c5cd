from __future__ import annotations

import pytest
from ranks import Ranks
from sharded_smoke import losses

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_a_sharded_model_trains_as_ddp_does(two_ranks: Ranks) -> None:
    assert two_ranks.run(losses, "sharded") == two_ranks.run(losses, "ddp")
