"""Plans on models that accelerate or Lightning have wrapped: checkpoint policies only, and the same bits as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import library_wrappers
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if "FSDP2" in way else pytest.mark.zoo) for way in library_wrappers.WAYS],
)
def test_a_plan_on_a_model_that_a_library_wrapped(two_ranks: Ranks, way: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate" if way.startswith("accelerate") else "lightning")
    two_ranks.run(library_wrappers.compared, way, str(tmp_path))
