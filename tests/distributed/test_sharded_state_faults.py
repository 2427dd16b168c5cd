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

IN_TIME_S = 2 * cases.TIMEOUT_S + 10
"""One timeout of memfit's and one of the process group, with time for a slow machine."""


@pytest.fixture(scope="module")
def square() -> Iterator[Ranks]:
    """Four ranks with a short timeout, which do not outlive the tests of this file."""
    ranks = Ranks(4, timedelta(seconds=cases.TIMEOUT_S))
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
        pytest.param("whole state", 1, "kill", marks=pytest.mark.zoo),
        ("whole state", 3, "stop"),
        ("whole state", 0, "trains instead"),
        pytest.param("dcp.load", 2, "saves instead", marks=pytest.mark.zoo),
    ],
)
def test_a_rank_that_dies_stops_or_does_something_else_is_told_to_all_others(
    square: Ranks, tmp_path: Path, what: str, rank: int, how: str
) -> None:
    found = _answers(square, rank if how == "stop" else None, what, rank, how, str(tmp_path / "save"))
    for number, told in enumerate(found):
        if number == rank and how == "kill":
            assert told is None
        elif number != rank:
            assert isinstance(told, cases.Told), told
            assert told.kind != "none", f"rank {number} went on"
            assert told.seconds < IN_TIME_S


def _answers(ranks: Ranks, stopped: int | None, *args: Any) -> list[Any]:
    """What ranks returned; one that stopped goes on when the others have answered."""
    try:
        ranks.begin(cases.fails, *args)
        order = sorted(range(ranks.count), key=lambda rank: rank == stopped)
        found: dict[int, Any] = {}
        for rank in order:
            if rank == stopped:
                os.kill(ranks.pids[rank], signal.SIGCONT)
            found[rank] = ranks.answer(rank)
        return [each[0] if isinstance(each := found[rank], tuple) else each for rank in range(ranks.count)]
    finally:
        ranks.stop()
