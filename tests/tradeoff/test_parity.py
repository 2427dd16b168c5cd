"""memfit's statistics are those of PyTorch's SACEstimator; each difference is a fault of it that has its own test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools import sac_estimator as peer

from memfit.compat import MSPS, SACGreedyOrderMeta, SACStats, greedy_order, tradeoff_curve
from tests.tradeoff.parity_models import MODELS, ask_memfit, ask_peer, theirs

FIELDS = ("func_names", "memory", "view_like_ops", "saved_autograd_ops", "inplace_ops")


def ours_of(stats: Any) -> SACStats:
    """The prototype's statistics as memfit's."""
    return SACStats(**{name: getattr(stats, name) for name in SACStats.__dataclass_fields__})


def without_attention(stats: Any) -> list[int]:
    """The prototype's random ops less attention, which has no dropout in these models."""
    return [op for op in stats.rand_ops if "attention" not in stats.func_names[op]]


def same_greedy(left: Any, right: SACGreedyOrderMeta) -> None:
    assert left.recomputed_ops == right.recomputed_ops
    assert left.stored_ops == right.stored_ops
    assert left.inplace_op_groups == right.inplace_op_groups
    assert left.random_ops_group == right.random_ops_group
    in_order = sorted(left.msps_meta, key=lambda each: (-each.msps, each.op_idx))  # theirs has ties in any order
    assert [tuple(each) for each in in_order] == [tuple(each) for each in right.msps_meta]


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_prototype(name: str) -> None:
    expected = theirs(ask_peer(*MODELS[name]), "sac_mod_stats")
    found = ask_memfit(*MODELS[name]).sac_mod_stats
    assert found.keys() == expected.keys()
    for path, stats in found.items():
        for field in FIELDS:
            assert getattr(stats, field) == getattr(expected[path], field), (path, field)
        assert stats.rand_ops == without_attention(expected[path])
        work = [op for op in range(len(stats.runtimes)) if op not in stats.view_like_ops]
        assert [stats.runtimes[op] for op in work] == pytest.approx([expected[path].runtimes[op] for op in work])


@pytest.mark.parametrize("name", ["perceptron", "convolutional", "gpt2"])
def test_random_ops_are_replayable_where_the_prototype_says_so(name: str) -> None:
    expected = theirs(ask_peer(*MODELS[name]), "sac_mod_stats")
    for path, stats in ask_memfit(*MODELS[name]).sac_mod_stats.items():
        assert stats.force_store_random == expected[path].force_store_random == False  # noqa: E712


@pytest.mark.parametrize("name", ["convolutional", "llama"])
def test_greedy_order_is_that_of_the_prototype(name: str) -> None:
    """On the prototype's own statistics; its random group is left out for what attention without dropout does."""
    estimator = ask_peer(*MODELS[name])
    compared = 0
    for stats in theirs(estimator, "sac_mod_stats").values():
        stats = replace(stats, rand_ops=without_attention(stats), force_store_random=False)
        same_greedy(peer.SACEstimator()._get_greedy_order_meta(stats), greedy_order(ours_of(stats)))
        compared += 1
    assert compared >= 3


# -- faults of the prototype ------------------------------------------------------------------------------------------


def test_fault_attention_without_dropout_counts_as_random() -> None:
    build, batch = MODELS["llama"]
    stats = theirs(ask_peer(build, batch), "sac_mod_stats")["layers.0"]
    assert [stats.func_names[op] for op in stats.rand_ops] == ["_scaled_dot_product_flash_attention_for_cpu"]
    assert ask_memfit(build, batch).sac_mod_stats["layers.0"].rand_ops == []


def test_fault_storages_are_known_by_addresses_that_are_used_again() -> None:
    """So `saved_autograd_ops` has ops of which autograd saves nothing, others in every run."""
    estimator = peer.SACEstimator()
    estimator._pack_hook(torch.empty(8))
    others = (torch.empty(8).untyped_storage() for _ in range(1000))
    assert any(hash(storage) in estimator._saved_tensor_ids for storage in others)


def test_fault_inputs_given_by_keyword_are_not_seen() -> None:
    """So the random ops of a module that is called with keywords are stored for no reason."""
    build, batch = MODELS["llama"]
    assert theirs(ask_peer(build, batch), "sac_mod_stats")["layers.0.self_attn"].force_store_random
    assert not ask_memfit(build, batch).sac_mod_stats["layers.0.self_attn"].force_store_random


def test_fault_ops_in_two_groups_are_counted_twice() -> None:
    """Dropout's `bernoulli_` is random and in place: the prototype lists it with both of its groups."""
    build, batch = MODELS["perceptron"]
    stats = ask_memfit(build, batch).sac_mod_stats["body"]
    (random,) = stats.rand_ops
    assert stats.func_names[random] == "bernoulli_"
    theirs_ = peer.SACEstimator()._get_greedy_order_meta(stats)
    assert sum("bernoulli_" in each.func_names for each in theirs_.msps_meta) == 2
    ours = greedy_order(stats)
    assert sum("bernoulli_" in each.func_names for each in ours.msps_meta) == 1
    assert sum(each.runtime for each in ours.msps_meta) <= sum(stats.runtimes)
    assert sum(each.runtime for each in theirs_.msps_meta) > sum(
        runtime for op, runtime in enumerate(stats.runtimes) if op not in stats.view_like_ops
    )


def test_fault_an_even_number_of_random_ops_is_not_stored() -> None:
    """`force & len(...) > 0` is `(force & len(...)) > 0`, which is false for two."""
    stats = SACStats(
        func_names=["empty", "bernoulli_", "normal_", "mm"],
        runtimes=[0.0, 1.0, 1.0, 1.0],
        memory=[8, 8, 8, 8],
        view_like_ops=[],
        rand_ops=[1, 2],
        saved_autograd_ops=[],
        inplace_ops=[(1, 0), (2, 0)],
        force_store_random=True,
    )
    assert 0 not in peer.SACEstimator()._get_greedy_order_meta(stats).stored_ops
    ours = greedy_order(stats)
    assert ours.stored_ops == {0}
    assert [each.op_idx for each in ours.msps_meta] == [3]


def test_fault_writing_to_a_view_of_an_input_counts_as_replayable() -> None:
    """The head of the group is then the view; run again, the input would be written to twice."""
    stats = SACStats(
        func_names=["view", "add_", "mm"],
        runtimes=[0.0, 1.0, 1.0],
        memory=[0, 8, 8],
        view_like_ops=[0],
        rand_ops=[],
        saved_autograd_ops=[],
        inplace_ops=[(1, 0)],
        force_store_random=False,
    )
    assert 0 in {each.op_idx for each in peer.SACEstimator()._get_greedy_order_meta(stats).msps_meta}
    ours = greedy_order(stats)
    assert ours.stored_ops == {0}
    assert ours.recomputed_ops == set()
    assert [each.op_idx for each in ours.msps_meta] == [2]


class Twice(nn.Module):
    """Calls one module twice, on different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(x[:1])


def test_fault_calls_of_one_module_collapse() -> None:
    def batch() -> torch.Tensor:
        return torch.ones(4, 8)

    assert sorted(theirs(ask_peer(Twice, batch), "sac_mod_stats")) == ["", "inner"]
    stats = ask_memfit(Twice, batch).sac_mod_stats
    assert list(stats) == ["", "inner", "inner#1"]
    assert sum(stats["inner"].memory) == 4 * sum(stats["inner#1"].memory) > 0


class Nothing(nn.Module):
    """A container that runs no op of its own or of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Identity())
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(x))


def test_fault_a_module_without_ops_crashes() -> None:
    def batch() -> torch.Tensor:
        return torch.ones(4, 8)

    with pytest.raises(ValueError, match="not enough values to unpack"):
        ask_peer(Nothing, batch)
    assert list(ask_memfit(Nothing, batch).sac_mod_stats) == [""]


class Cloned(nn.Module):
    """Writes to a clone; clones are not among the ops that the prototype counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.clone().add_(1.0))


def test_fault_writing_to_the_result_of_a_skipped_op_crashes() -> None:
    def batch() -> torch.Tensor:
        return torch.ones(4, 8)

    with pytest.raises(ValueError, match="remapping of inplace ops failed"):
        ask_peer(Cloned, batch)
    stats = ask_memfit(Cloned, batch).sac_mod_stats[""]
    assert stats.func_names[0] == "add_"
    assert stats.inplace_ops == [(0, 0)]
    assert greedy_order(stats).stored_ops == {0}


def test_no_memory_and_no_time_make_a_flat_curve() -> None:
    """Where the prototype divides by zero."""
    stats = SACStats(["t", "view"], [0.0, 0.0], [0, 0], [0, 1], [], [], [], False)
    greedy = greedy_order(stats)
    assert greedy.msps_meta == []
    curve = tradeoff_curve(stats, greedy)
    assert curve.sac_memory == 0 and curve.slopes == [0.0]
    one = SACStats(["mm"], [1.0], [0], [], [], [], [], False)
    assert greedy_order(one).msps_meta == [MSPS({"mm"}, 0, 0, 1.0, 0.0)]
    assert tradeoff_curve(one, greedy_order(one)).n_segments == 1
