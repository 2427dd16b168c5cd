from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfit.sharded.checkpoint import load, saves
from memfit.sharded.optimizer_state import plain_optimizer_state
from tests.distributed import sharded_checkpoint as cases
from tests.distributed.ranks import Ranks
from tests.distributed.sharded_state import adamw, state_equal

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


def test_a_save_resumes_on_2_4_and_3_ranks_and_in_one_plain_process(
    two_ranks: Ranks, four_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saves")
    saved = two_ranks.run(cases.save_trained, folder)[0]
    extra: object = {"step": 2, "rates": (0.1, float("inf"))}
    for ranks in (four_ranks, three_ranks):
        answers = ranks.run(cases.resume, folder)
        for before, _, told, read in answers:
            assert state_equal(before, saved)
            assert told == extra
            assert read < 1.6 * _data_bytes(Path(folder)) / ranks.count + 64 * 1024  # the manifest is read by all
        saved, extra = answers[0][1], {"step": 3}
    plain = cases.other_gpt()
    optimizer = adamw(plain)
    loaded = load(folder, plain, optimizer)
    assert (loaded.ranks, loaded.rng, loaded.extra) == (3, False, extra)
    expected = plain_optimizer_state(saved["optimizer"])
    found = optimizer.state_dict()
    assert all(torch.equal(each, saved["model"][name]) for name, each in plain.state_dict().items())
    assert found["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        assert state.keys() == found["state"][number].keys()
        assert all(torch.equal(found["state"][number][key], value) for key, value in state.items())
    assert len(saves(folder)) == 2


def test_a_resumed_run_with_dropout_equals_one_that_was_not_interrupted(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.resumes_bitwise, str(tmp_path))


def test_other_optimizers_resume(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.other_optimizers_resume, str(tmp_path))


def test_buffers_and_ignored_parameters_that_differ_between_ranks_are_kept(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases.keeps_what_ranks_have_of_their_own, str(tmp_path))


def test_state_goes_through_torch_distributed_checkpoint_to_fsdp2_and_plain_models_and_back(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    full = two_ranks.run(cases.dcp_round_trips, str(tmp_path))[0]
    before, after = cases.plain_through_dcp(str(tmp_path / "memfit"), str(tmp_path / "plain"))
    assert state_equal(before, full)
    for found in four_ranks.run(cases.from_plain_dcp, str(tmp_path / "plain")):
        assert state_equal(found, after)


def test_damage_is_told_on_all_ranks_with_file_and_piece(two_ranks: Ranks, tmp_path: Path) -> None:
    told = two_ranks.run(cases.damage_is_told_on_all_ranks, str(tmp_path))
    assert all("rank-1.bin is damaged: the piece of model." in each for each in told)


def test_a_rank_that_fails_in_a_save_leaves_the_save_before(two_ranks: Ranks, tmp_path: Path) -> None:
    told = two_ranks.run(cases.save_then_one_rank_fails, str(tmp_path), "raise")
    assert told[0].startswith("RankError: the writing of a save failed on rank 1: InputError: a save in")
    assert told[1].startswith("InputError: a save in") and "No space left" in told[1]
    assert two_ranks.run(cases.load_extra, str(tmp_path)) == [1, 1]


def test_a_rank_that_dies_in_a_save_leaves_the_save_before(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.begin(cases.save_then_one_rank_fails, str(tmp_path), "die")
    told = two_ranks.answers()
    two_ranks.stop()
    assert told[0][0].startswith("CollectiveError: rank 0: ") and "rank 1 closed its connection" in told[0][0]
    assert told[1] is None
    assert two_ranks.run(cases.load_extra, str(tmp_path)) == [1, 1]


def _data_bytes(folder: Path) -> int:
    latest = folder / (folder / "latest").read_text().strip()
    return sum(each.stat().st_size for each in latest.glob("*.bin"))
