"""The saved set of a joint graph: found by the program, taken by torch's partitioner, and right."""

from __future__ import annotations

import itertools

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn

from memfit.compiled.op_times import OpTimes
from memfit.compiled.partitioning import Splitter
from memfit.compiled.program import Outside, SavedSetProblem
from memfit.hardware import Target
from tests.compiled.joint_graphs import joint_graph_of, run_with

NOTHING = Outside(resident_bytes=0, between_bytes=0, held_bytes=0, optimizer_bytes=0)


def chain(layers: int, size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(layers)))


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def test_the_program_finds_the_fastest_of_all_saved_sets() -> None:
    problem = SavedSetProblem(joint_graph_of(chain(3), torch.randn(256, 32)), NOTHING)
    free = [value for value in problem.values if not problem.graph.is_fixed[value]]
    assert 4 <= len(free) <= 10
    everything = [
        problem.judge(saved, "all") for count in range(len(free) + 1) for saved in itertools.combinations(free, count)
    ]
    lowest, highest = min(each.peak_bytes for each in everything), max(each.peak_bytes for each in everything)
    for budget in range(lowest, highest + 1, max(1, (highest - lowest) // 7)):
        best = min(each.ms for each in everything if each.peak_bytes <= budget)
        found = problem.solve(budget, ())
        assert found.peak_bytes <= budget
        assert found.ms == pytest.approx(best, rel=1e-3)


def test_more_memory_never_makes_the_estimated_step_slower() -> None:
    problem = SavedSetProblem(
        joint_graph_of(nn.Sequential(Attention(16), Attention(16), Attention(16)), torch.randn(4, 32, 16)), NOTHING
    )
    highest = problem.judge(problem.values, "all")
    times = []
    for part in (0.6, 0.8, 1.0):
        found = problem.solve(int(highest.peak_bytes * part), ())
        assert found.peak_bytes <= highest.peak_bytes * part
        times.append(found.ms)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("model", [chain(4), nn.Sequential(Attention(32), Attention(32), Attention(32))])
def test_torch_saves_what_was_chosen_and_gradients_have_the_same_bits(model: nn.Module) -> None:
    batch = torch.randn(4, 64, 32)
    times = OpTimes(Target.parse("cpu").device)
    plain = Splitter(NOTHING, 2**40, times)
    expected = run_with(plain, model, batch)
    assert plain.choice == plain.own_choice
    assert plain.problem is not None
    lowest = plain.problem.solve(0, plain.others).peak_bytes
    tight = Splitter(NOTHING, (lowest + plain.own_choice.peak_bytes) // 2, times)
    gradients = run_with(tight, model, batch)
    assert tight.choice is not None
    assert tight.choice.peak_bytes <= tight.budget_bytes < plain.own_choice.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    default = run_with(min_cut_rematerialization_partition, model, batch)
    assert all(torch.equal(a, b) for a, b in zip(gradients, default, strict=True))
