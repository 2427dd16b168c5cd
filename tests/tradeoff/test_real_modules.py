"""The rules on steps that were captured: what may be given up, what must stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import memfit
from memfit.capture import NO_INDEX, Op, Step, Trace
from memfit.tradeoff import Frontier, Policy, Unit, build_frontiers, find_units
from tests.tradeoff.literal_rules import Literal
from tests.zoo import zoo_models


def captured(model: nn.Module, *batch: Any) -> Trace:
    return memfit.trace(Step(model, tuple(batch), optimizer=torch.optim.SGD), target="cpu")


def frontier_and_unit(trace: Trace, name: str) -> tuple[Frontier, Unit]:
    unit = next(each for each in find_units(trace) if each.name == name)
    op_ms = np.array([0.0 if op.view else 1.0 for op in trace.ops])
    return build_frontiers(trace, op_ms, points=10**6).of(unit), unit


def ops_of(trace: Trace, unit: Unit, offsets: tuple[int, ...]) -> list[Op]:
    return [trace.ops[unit.begin + offset] for offset in offsets]


def ran(trace: Trace, unit: Unit, policy: Policy) -> set[str]:
    return {op.name.split(".")[1] for op in ops_of(trace, unit, policy.recomputed)}


def test_policies_of_real_units_follow_the_rules() -> None:
    checked = 0
    for name in ("llama", "vit", "mlp"):
        trace = memfit.trace(zoo_models.STEPS[name](), target="cpu")
        op_ms = np.array([0.0 if op.view else 0.25 for op in trace.ops])
        found = build_frontiers(trace, op_ms)
        for unit in found.units:
            if unit.end - unit.begin > 80:
                continue
            literal = Literal(trace, unit, op_ms.tolist())
            for policy in found.of(unit).policies:
                assert literal.peak(policy) == policy.recompute_peak_bytes
                checked += policy.stop >= 0
    assert checked > 30


class Block(nn.Module):
    """The shapes of a feed-forward block, inside a model that uses its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)).sum()


def test_what_is_after_the_last_packed_tensor_does_not_run_again() -> None:
    trace = captured(Block(), torch.ones(4, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    last = frontier.policies[-1]
    assert last.discarded_bytes == frontier.discardable_bytes == 2 * 4 * 32 * 4
    assert sorted(ran(trace, unit, last) - {"t"}) == ["addmm", "gelu"]
    assert last.recompute_ms == 2.0, "the second product is not needed again"


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.SiLU())
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)).sum()


def test_running_statistics_are_never_updated_twice() -> None:
    trace = captured(Normalised(), torch.ones(2, 3, 8, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    assert len(frontier.policies) > 1
    for policy in frontier.policies:
        assert not ran(trace, unit, policy) & {"native_batch_norm", "add_"}


def test_batch_norm_that_only_reads_its_statistics_may_run_again() -> None:
    model = Normalised()
    model.inner[1].eval()
    trace = captured(model, torch.ones(2, 3, 8, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    assert any("native_batch_norm" in ran(trace, unit, policy) for policy in frontier.policies)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().sum()


def test_random_ops_run_again_all_or_none() -> None:
    trace = captured(Drops(), torch.ones(4, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    random = {op - unit.begin for op in range(unit.begin, unit.end) if trace.ops[op].random}
    assert len(random) == 2
    seen = set()
    for policy in frontier.policies[1:]:
        reached = {op for op in random if op <= policy.stop}
        assert reached & set(policy.recomputed) in (set(), reached)
        seen.add(bool(reached & set(policy.recomputed)))
    assert seen == {True, False}


class Remembers(nn.Module):
    """Keeps an activation for itself, as a cache of keys and values does."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.keep, self.kept = keep, []
        if keep:
            self.inner[1].register_forward_hook(lambda _, __, output: self.kept.append(output.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().sum()


def test_what_somebody_else_holds_is_not_discardable() -> None:
    free, _ = frontier_and_unit(captured(Remembers(keep=False), torch.ones(4, 8)), "inner")
    held, _ = frontier_and_unit(captured(Remembers(keep=True), torch.ones(4, 8)), "inner")
    assert free.discardable_bytes - held.discardable_bytes == 4 * 32 * 4


class Scaled(torch.autograd.Function):
    """Several ops, one node; saves what its second op makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        first = x.exp()
        second = first + 1.0
        third = second * 2.0
        ctx.save_for_backward(second)
        return third

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (second,) = ctx.saved_tensors
        return gradient * (second - 1.0) * 2.0


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Applied())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


class Applied(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x)


def test_a_custom_function_packs_at_its_end() -> None:
    """The second run stops after the function's last op, not before the first, with which autograd counts it."""
    trace = captured(Custom(), torch.ones(4, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    last = frontier.policies[-1]
    assert last.discarded_bytes > 0
    assert ran(trace, unit, last) >= {"exp", "add", "mul"}


class Overwritten(nn.Module):
    """The caller overwrites what the unit returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(x)
        return (first.relu_() + second).sum()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = x + self.weight
        return shifted, (shifted - 1.0).sigmoid().tanh()


def test_a_result_that_is_overwritten_later_is_made_again() -> None:
    """Saved, it would have the later value when the unit runs again."""
    trace = captured(Overwritten(), torch.ones(4, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    assert len(frontier.policies) > 1
    for policy in frontier.policies[1:]:
        assert trace.ops[unit.begin].name == "aten.add.Tensor"
        assert 0 in policy.recomputed


class WritesInput(nn.Module):
    """Writes to its own input, after having read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), ReadsAndWrites()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)).sum()


class ReadsAndWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x + self.weight
        x.mul_(2.0)
        return shifted.sigmoid().tanh().sigmoid().tanh() + x


def test_what_read_an_input_before_it_was_overwritten_does_not_run_again() -> None:
    trace = captured(WritesInput(), torch.ones(4, 8))
    frontier, unit = frontier_and_unit(trace, "inner")
    names = [trace.ops[op].name for op in range(unit.begin, unit.end)]
    assert names[:2] == ["aten.add.Tensor", "aten.mul_.Tensor"]
    assert len(frontier.policies) > 1
    for policy in frontier.policies:
        assert not {0, 1} & set(policy.recomputed)


def test_doing_nothing_keeps_what_autograd_keeps() -> None:
    trace = captured(Block(), torch.ones(4, 8))
    for unit in find_units(trace):
        frontier, _ = frontier_and_unit(trace, unit.name)
        nothing = frontier.policies[0]
        assert (nothing.discarded_bytes, nothing.recompute_ms, nothing.stop) == (0, 0.0, NO_INDEX)
        assert nothing.recomputed == () and nothing.recompute_peak_bytes == 0
        assert nothing.cached_bytes == frontier.discardable_bytes
