"""Libraries' own loops on two ranks under a plan: the same losses; through accelerate also within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from tests.distributed import accelerate_fsdp2, library_callbacks

pytestmark = [pytest.mark.distributed, pytest.mark.zoo, pytest.mark.xdist_group("ranks")]


def test_accelerate_shards_by_the_plan(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(accelerate_fsdp2.compared, str(tmp_path))


def test_lightning_finds_one_batch_size_on_all_ranks_and_trains_as_without(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(library_callbacks.trained_by_lightning, str(tmp_path))


def test_a_trainer_on_ranks_trains_as_without(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(library_callbacks.trained_by_transformers, str(tmp_path))
