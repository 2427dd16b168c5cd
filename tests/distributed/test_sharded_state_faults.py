from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import sharded_state_faults as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

IN_TIME_S = cases.GROUP_TIMEOUT_S + 10


@pytest.fixture(scope="module")
def square() -> Iterator[Ranks]:
    """Four ranks which do not outlive the tests of this file."""
    ranks = Ranks(4, timedelta(seconds=cases.GROUP_TIMEOUT_S))
    yield ranks
    ranks.stop()


def test_an_error_of_one_rank_in_a_checkpoint_is_told_to_all_and_leaves_a_usable_model(
    square: Ranks, tmp_path: Path
) -> None:
    for saving, loading in square.run(cases.errors_of_one_rank_leave_a_usable_model, str(tmp_path / "save")):
        assert "Boom" in saving and "3" in saving
        assert "Boom" in loading and "2" in loading


@pytest.mark.parametrize(
    ("what", "rank", "how"),
    [
        ("all-reduce", 2, "kill"),
        ("dcp.save", 3, "kill"),
        ("dcp.load", 0, "kill"),
        ("whole state", 1, "kill"),
        ("whole state", 3, "stop"),
        pytest.param("whole state", 0, "trains instead", marks=pytest.mark.zoo),
        pytest.param("dcp.load", 2, "saves instead", marks=pytest.mark.zoo),
    ],
)
def test_a_rank_that_dies_stops_or_does_something_else_is_told_to_all_others(
    square: Ranks, tmp_path: Path, what: str, rank: int, how: str
) -> None:
    folder = str(tmp_path / "save")
    _run_to_the_end(square, rank if how == "stop" else None, what, rank, how, folder)
    for number in range(square.count):
        told = cases.told_by(folder, number)
        if number == rank and how == "kill":
            assert told is None
        elif number != rank:
            assert told is not None and told.kind != "none", f"rank {number} was not told: {told}"
            assert told.seconds < IN_TIME_S


def _run_to_the_end(ranks: Ranks, stopped: int | None, *args: Any) -> None:
    """Wait until all ranks have ended; one that stopped goes on when the others have."""
    try:
        ranks.begin(cases.fails, *args)
        for rank in sorted(range(ranks.count), key=lambda rank: rank == stopped):
            if rank == stopped:
                os.kill(ranks.pids[rank], signal.SIGCONT)
            assert ranks.answer(rank) is None
    finally:
        ranks.stop()
