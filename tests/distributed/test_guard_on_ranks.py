"""The guard on two ranks of which one fails, under a real limit of its process; see guarded_ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.distributed import guarded_faults
from tests.distributed.ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's"),
]
RANKS = 2
TIMEOUT_S = 60
Outcomes = dict[str, list[dict[str, Any]]]
REPLANNED = [
    "fsdp2: memory in forward",
    "fsdp2: memory in backward",
    "sharded: memory in forward",
    "sharded: memory in backward",
    "fully_shard: memory in backward",
    "ddp: memory in backward",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Run all cases. Large tensors are mapped by themselves, so that the limit counts them."""
    script = Path(__file__).with_name("guarded_ranks.py")
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(Path(folder, "store"))],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            found, said = ranks[0].communicate(timeout=500)
        finally:
            for each in ranks:
                each.kill()
        assert ranks[0].returncode == 0, said + ranks[1].communicate()[1]
    return json.loads(found)


@pytest.mark.parametrize("case", REPLANNED)
def test_a_step_that_one_rank_has_no_memory_for_is_planned_tighter_and_run_again_on_all(
    outcomes: Outcomes, case: str
) -> None:
    found = outcomes[case]
    for rank in found:
        assert rank["error"] is None and rank["attempts"] > 1
        assert rank["peaks"][1] < rank["peaks"][0]
        assert rank["differs at the end"] == [], "ten steps later it must be the run that never failed"
        assert rank["ranks"] == RANKS and set(rank["failed ranks"]) == {1}
    assert not found[1]["armed"], "the limit was never set"
    assert found[0]["plan"] == found[1]["plan"]


def test_rank_0_alone_says_which_rank_it_was_and_what_it_held(outcomes: Outcomes) -> None:
    first, second = outcomes["fsdp2: memory in backward"]
    assert second["warnings"] == [] and len(first["warnings"]) == first["attempts"] - 1
    for part in (
        "out of memory on rank 1: an allocation of ",
        " failed in backward",
        "what filled the memory, about ",
        "optimizer state",
        "the process may map (RLIMIT_AS)",
        "the guard's copies, to take the step back",
        "what the plan expected there",
        "on rank 1 and was taken back on every rank",
        "and run again on every rank",
    ):
        assert part in first["warnings"][0]


def test_an_optimizer_without_room_on_one_rank_makes_fewer_temporaries_on_all(outcomes: Outcomes) -> None:
    for rank in outcomes["fsdp2: memory in optimizer"]:
        assert rank["error"] is None and rank["attempts"] == 2 and rank["foreach"] is False
        assert rank["differs at the end"] == []


def test_when_no_plan_is_left_every_rank_gets_the_explanation_and_is_as_before_the_step(outcomes: Outcomes) -> None:
    for rank in outcomes["fsdp2: memory in no way out"]:
        assert rank["error"].startswith("OutOfMemory: out of memory on rank 1: an allocation of ")
        assert "it ran with the lowest peak that any plan of this step has" in rank["error"]
        assert rank["restored"] and rank["differs after the failure"] == []
        assert rank["differs at the end"] == [] and rank["ranks"] == RANKS


def test_a_rank_that_dies_is_told_at_once(outcomes: Outcomes) -> None:
    (found,) = outcomes["ddp: SIGKILL in backward"]
    assert found["error"].startswith("RankError: rank 1 no longer answers")
    assert found["seconds"] < TIMEOUT_S / 2


# -- With errors instead of limits, in the process groups that other tests share --------------------------------------


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("sharded", marks=pytest.mark.zoo)])
def test_a_fault_on_one_rank_of_a_mesh_is_repeated_on_all_four(four_ranks: Ranks, engine: str) -> None:
    found = four_ranks.run(guarded_faults.repeats, engine, 2, replicas=True)
    for rank in found:
        assert rank["same"] and rank["lower"] and rank["faults"] == [2] and rank["replicas"] == 2
        assert rank["plan"] == found[0]["plan"]


@pytest.mark.parametrize("engine", ["fsdp2", "sharded"])
def test_another_error_of_one_rank_is_raised_on_all_and_they_can_go_on(two_ranks: Ranks, engine: str) -> None:
    first, second = two_ranks.run(guarded_faults.raises, engine)
    assert first["error"] == "RankError: the step failed on rank 1: ValueError: a bad batch"
    assert second["error"] == "ValueError: a bad batch"
    assert first["losses"] == second["losses"] == guarded_faults.STEPS - guarded_faults.FAILS_AT


def test_a_step_that_fails_with_larger_inputs_is_planned_for_them_on_every_rank(two_ranks: Ranks) -> None:
    found = two_ranks.run(guarded_faults.repeats_larger_inputs, "fsdp2")
    for rank in found:
        assert (2 * guarded_faults.ROWS, guarded_faults.WIDTH) in rank["inputs"]
        assert any("in place of" in each for each in rank["said"])
        assert rank["drifts"] == [("inputs", 1)]


def test_a_rank_that_fails_after_the_optimizer_is_taken_back_with_copies_only(two_ranks: Ranks) -> None:
    for rank in two_ranks.run(guarded_faults.fails_after_the_optimizer, copies=False):
        assert rank["restored"] is False and "out of memory on rank 1" in rank["error"]
        assert "copies=True" in rank["error"]
    for rank in two_ranks.run(guarded_faults.fails_after_the_optimizer, copies=True):
        assert rank["error"] is None and rank["same"]


def test_watching_ranks_are_told_which_one_ran_out_of_memory(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(guarded_faults.watches_only)
    assert first["error"].startswith("RankError: rank 1 ran out of memory: Tried to allocate 2.00 MiB")
    assert second["error"].startswith("OutOfMemory: out of memory on rank 1: an allocation of 2.00 MiB failed")


def test_the_step_of_a_model_that_is_sharded_by_now_is_refused_with_what_to_give(two_ranks: Ranks) -> None:
    for text in two_ranks.run(guarded_faults.refuses_the_divided_model):
        assert "divided between ranks" in text and "memfit.Step(factory" in text
