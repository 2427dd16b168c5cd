from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import sharded_faults as cases
from tests.distributed.ranks import Ranks
from tests.distributed.sharded_state import state_equal

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

_BACKWARD = r"(gather|reduction of the gradients) of unit 'blocks\.\d' in backward"
PHASES = {
    "forward": r"gather of unit 'blocks\.\d' in forward",
    "gather": _BACKWARD,
    "backward": _BACKWARD,
    "reduce": _BACKWARD,
    "optimizer": r"gather of the root unit in forward",
}
"""Where ranks die or stop, and what the others are at then."""

IN_TIME_S = cases.TIMEOUT_S + 10
"""With time for a slow machine, and far below the timeout of the process group."""


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
@pytest.mark.parametrize("phase", [*PHASES, "save 20", "save -1"])
def test_a_killed_rank_is_named_in_time_and_a_restart_goes_on_bit_by_bit(
    pair: Ranks, undisturbed: tuple[list[Any], Path], folder: Path, phase: str, rank: int
) -> None:
    found = _failures(pair, cases.train, str(folder), rank, phase)
    assert found[rank] is None
    failure = found[1 - rank]
    _check(failure, rank, PHASES.get(phase, "save"))
    _check_equal(pair.run(cases.train, str(folder)), undisturbed[0])


def test_the_rank_where_it_began_is_named_by_all_others(tmp_path: Path) -> None:
    ranks = Ranks(3)
    found = _failures(ranks, cases.train, str(tmp_path), 2, "backward")
    assert found[2] is None
    for failure in found[:2]:
        _check(failure, 2, PHASES["backward"])
    stopped, *others = _with_a_stopped_rank(ranks, str(tmp_path), "forward")
    assert isinstance(stopped, cases.Failure)
    for failure in others:
        _check(failure, 1, PHASES["forward"])


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_a_stopped_rank_is_named_with_unit_and_collective(pair: Ranks, folder: Path, phase: str) -> None:
    stopped, other = _with_a_stopped_rank(pair, str(folder), phase)
    _check(other, 1, PHASES[phase])
    assert f"rank 1 did not answer within {cases.TIMEOUT_S:g} s" in other.text
    assert "What it said last: rank 0: " in stopped.text  # when it goes on


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


@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
def test_a_rank_that_skips_a_step_after_an_error_never_meets_the_others(pair: Ranks, phase: str) -> None:
    found = _failures(pair, cases.one_rank_raises, phase)
    for rank, failure in enumerate(found):
        _check(failure, 1 - rank, "gather|reduction|all-reduce")
    if phase == "forward":
        assert "rank 1 left the forward of the root unit with Boom: boom" in found[0].text


def test_different_models_units_and_options_are_told_before_anything_is_sent(pair: Ranks) -> None:
    expected = {
        "shape": "rank 0 has 'embedding.weight' of shape (31, 8), torch.float32, trained, in 'the root', rank 1 has "
        "'embedding.weight' of shape (31, 16)",
        "layers": "rank 0 has unit 'blocks.2' with UnitOptions(keep=False, reshard_ranks=None, backward_gather=True), "
        "rank 1 has no such thing",
        "dtype": "rank 1 has 'embedding.weight' of shape (31, 8), torch.bfloat16",
        "frozen": "rank 1 has 'head.weight' of shape (31, 8), torch.float32, frozen",
        "units": "rank 0 has unit 'blocks.1' with",
        "unit options": "rank 1 has unit 'blocks.1' with UnitOptions(keep=True",
        "no such unit": "unit 'blocks.7' is no module of this model",
        "precision": "rank 0 has param_dtype=None in Precision, rank 1 has param_dtype=torch.bfloat16 in Precision",
        "schedule": "rank 0 has forward_prefetch=1 in Schedule, rank 1 has forward_prefetch=2 in Schedule",
        "reduction": "rank 0 has hook=None in Reduction, rank 1 has hook=_hook in Reduction",
        "offload": "rank 0 has offload=False, rank 1 has offload=True",
        "from_rank_0": "rank 0 has from_rank_0=False, rank 1 has from_rank_0=True",
        "buffers": "rank 0 has buffer 'running_mean' of shape (3,), torch.float32, rank 1 has no such thing",
        "frozen later": "rank 0 has 'head.weight' frozen, rank 1 has 'head.weight' trained",
        "first order": "rank 0 runs unit 'blocks.0' at position 1; rank 1 runs unit 'blocks.1' at position 1",
        "order of replicas": "rank 0 runs unit 'blocks.0' at position 1; rank 1 runs unit 'blocks.1' at position 1",
    }
    told = pair.run(cases.mismatches)
    for rank, each in enumerate(told):
        assert each.keys() == expected.keys()
        for name, said in each.items():
            kind = "OrderError" if "order" in name else "RankMismatch"
            assert said.startswith(kind) and expected[name] in said, (rank, name, said)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("turned", "rank 1 runs unit 'blocks.1' at position 1 of its forward, where it ran unit 'blocks.0' before"),
        ("left out", "rank 1 ends at position 2 of its forward, where it ran unit 'blocks.1' before"),
        ("frozen", "rank 1 has 'blocks.0.weight' frozen now, and asks whether all ranks have"),
        ("saves", "failed, rank"),
    ],
)
def test_a_rank_that_does_something_else_in_a_later_step_is_named(pair: Ranks, how: str, said: str) -> None:
    for failure in _failures(pair, cases.leaves_the_order, how):
        assert isinstance(failure, cases.Failure)
        assert said in failure.text
        assert failure.seconds < IN_TIME_S


def test_gradients_of_different_units_are_never_summed(pair: Ranks) -> None:
    for rank, failure in enumerate(_failures(pair, cases.replicas_train_different_units)):
        _check(failure, 1 - rank, rf"all-reduce of the gradients of unit 'blocks.{rank}' in backward")


def _failures(ranks: Ranks, function: Any, *args: Any) -> list[Any]:
    """What ranks returned that cannot go on after it; None of one that died."""
    try:
        ranks.begin(function, *args)
        return [each[0] if isinstance(each, tuple) else each for each in ranks.answers()]
    finally:
        ranks.stop()


def _with_a_stopped_rank(ranks: Ranks, folder: str, phase: str) -> list[Any]:
    """What rank 1 returned, which stopped and went on when the others had given up, and then what these did."""
    try:
        ranks.begin(cases.train, folder, 1, phase, "stop")
        others = [ranks.answer(rank) for rank in range(ranks.count) if rank != 1]
        os.kill(ranks.pids[1], signal.SIGCONT)
        return [each[0] if isinstance(each, tuple) else each for each in (ranks.answer(1), *others)]
    finally:
        ranks.stop()


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
    assert "an earlier collective failed" in failure.next_text and failure.next_seconds < cases.TIMEOUT_S
