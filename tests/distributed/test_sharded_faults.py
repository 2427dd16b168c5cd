from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_faults as cases
from ranks import Ranks
from sharded_state import state_equal

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

PHASES = {
    "forward": r"gather of (unit 'blocks\.\d'|the root unit) in forward",
    "gather": r"gather of unit 'blocks\.\d' in backward",
    "backward": r"gather of unit 'blocks\.\d' in backward|reduction of unit 'blocks\.\d'",
    "reduce": r"reduction of unit 'blocks\.\d'|gather of unit 'blocks\.\d' in backward",
    "optimizer": r"gather of the root unit in forward",
}
IN_TIME_S = cases.TIMEOUT_S + 2


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks that do not outlive the tests of this file: most of them end in pieces."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def undisturbed(pair: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What every rank has after a run without faults, and a folder with its save."""
    folder = tmp_path_factory.mktemp("saves")
    return pair.run(cases.train, str(folder)), folder


@pytest.fixture
def folder(undisturbed: tuple[list[Any], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed[1], tmp_path / "saves"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", [*PHASES, "save 0", "save 20", "save -1"])
def test_a_killed_rank_is_named_in_time_and_a_restart_goes_on_bit_by_bit(
    pair: Ranks, undisturbed: tuple[list[Any], Path], folder: Path, phase: str, rank: int
) -> None:
    found = _failures(pair, str(folder), rank, phase)
    assert found[rank] is None
    failure = found[1 - rank]
    _check(failure, rank, PHASES.get(phase, "save"))
    _check_equal(pair.run(cases.train, str(folder)), undisturbed[0])


def test_the_rank_where_it_began_is_named_by_all_others(tmp_path: Path) -> None:
    ranks = Ranks(3)
    try:
        found = _failures(ranks, str(tmp_path), 2, "backward")
        assert found[2] is None
        for failure in found[:2]:
            _check(failure, 2, PHASES["backward"])
        ranks.begin(cases.train, str(tmp_path), 1, "forward", "stop")
        found = [ranks.answer(0), ranks.answer(2)]
        for (failure,) in found:
            _check(failure, 1, PHASES["forward"])
            assert failure.seconds > 0.8 * cases.TIMEOUT_S
        os.kill(ranks.pids[1], signal.SIGCONT)
        assert isinstance(ranks.answer(1)[0], cases.Failure)
    finally:
        ranks.stop()


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_stopped_rank_is_named_with_unit_and_collective(pair: Ranks, folder: Path, phase: str) -> None:
    pair.begin(cases.train, str(folder), 1, phase, "stop")
    (failure,) = pair.answer(0)
    _check(failure, 1, PHASES[phase])
    assert f"rank 1 did not answer within {cases.TIMEOUT_S:g} s" in failure.text
    os.kill(pair.pids[1], signal.SIGCONT)
    (failure,) = pair.answer(1)
    _check(failure, 0, "gather|reduction")
    assert "What it said last: rank 0: " in failure.text
    pair.stop()


def test_an_error_of_the_user_on_all_ranks_leaves_a_usable_model(pair: Ranks) -> None:
    phases = (
        "forward",
        "user hook",
        "loss",
        "backward",
        "parameter hook",
        "before optimizer",
        "interrupted forward",
        "interrupted backward",
    )
    assert pair.run(cases.user_errors, phases) == [[], []]


def test_an_error_that_the_model_itself_catches_leaves_a_usable_model(pair: Ranks) -> None:
    pair.run(cases.caught_inside_of_the_model)


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "parameter hook"])
def test_a_rank_that_skips_a_step_after_an_error_never_meets_the_others(pair: Ranks, phase: str) -> None:
    pair.begin(cases.one_rank_raises, phase)
    found = pair.answers()
    pair.stop()
    for rank, (failure,) in enumerate(found):
        print(failure)
        _check(failure, 1 - rank, "gather|reduction|all-reduce")
    if phase == "forward":
        assert "rank 1 left the forward of the root unit with Boom: boom" in found[0][0].text


def test_different_models_units_and_options_are_told_before_anything_is_sent(pair: Ranks) -> None:
    told = pair.run(cases.mismatches)
    for each in told:
        print(*each.items(), sep="\n")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("turned", "rank 1 runs unit 'blocks.1' at position 1 of its forward, where it ran unit 'blocks.0' before"),
        ("left out", "rank 1 runs nothing more at position 2 of its forward, where it ran unit 'blocks.1' before"),
        ("twice", "rank 1 runs unit 'blocks.1' at position 3 of its forward, where it ran nothing more before"),
        ("frozen", "rank 1 has 'blocks.0.weight' frozen now, and asks whether all ranks have"),
        ("saves", ""),
    ],
)
def test_a_rank_that_does_something_else_in_a_later_step_is_named(pair: Ranks, how: str, said: str) -> None:
    pair.begin(cases.leaves_the_order, how)
    found = pair.answers()
    pair.stop()
    for (failure,) in found:
        print(failure)
        assert isinstance(failure, cases.Failure)
        assert said in failure.text
        assert failure.seconds < IN_TIME_S


def _failures(ranks: Ranks, *args: Any) -> list[Any]:
    ranks.begin(cases.train, *args)
    found = ranks.answers()
    ranks.stop()
    return [each[0] if isinstance(each, tuple) else each for each in found]


def _check_equal(found: list[Any], expected: list[Any]) -> None:
    """Parameters, optimizer state and random states, bit by bit."""
    for here, there in zip(found, expected, strict=True):
        assert state_equal(here["state"], there["state"])
        assert here["random"].equal(there["random"])


def _check(failure: Any, rank: int, collective: str) -> None:
    assert isinstance(failure, cases.Failure), failure
    assert failure.kind == "CollectiveError"
    assert f"rank {rank} " in failure.text and re.search(collective, failure.text)
    assert "Start all ranks again" in failure.text
    assert failure.seconds < IN_TIME_S
    assert "an earlier collective failed" in failure.next_text and failure.next_seconds < 1
