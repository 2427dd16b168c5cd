"""A forward that reads what memfit cannot put back is found out before its gradients are used."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from memfit.capture import Step
from memfit.capture.random_numbers import set_state, state_of
from memfit.engines.recompute import difference, sample
from memfit.errors import StateError
from memfit.solve import SolveOptions
from tests.engines import drawing
from tests.engines.drawing import scale
from tests.engines.engine_cases import plan_for

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
Draw = Callable[[], float]


class Augmentation:
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __call__(self) -> float:
        return self.rng.random()


class Slotted:
    """Holds a generator where none is looked for."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __call__(self) -> float:
        return self.rng.random()


class Block(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(16, 64), nn.Linear(64, 16), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x) * self.draw()))


class Blocks(nn.Module):
    def __init__(self, draw: Callable[[], Draw]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(draw()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


FORCED = SolveOptions(force=("blocks.0", "blocks.1"))


@pytest.mark.parametrize("draw", [lambda: lambda: scale(), Augmentation, lambda: Augmentation().__call__])
def test_generators_of_other_files_and_of_plain_objects_are_put_back(draw: Callable[[], Draw]) -> None:
    plan = plan_for(Step(Blocks(draw), X), options=FORCED)
    assert plan.checkpoint
    found = []
    for planned in (False, True):
        model = Blocks(draw)
        before = state_of(drawing.RNG)
        if planned:
            plan.apply(model)
        for _ in range(2):
            model(X).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        set_state(drawing.RNG, before)
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def from_iterator(values: Callable[[], Iterator[float]]) -> Callable[[], Draw]:
    return lambda: values().__next__


@pytest.mark.parametrize("draw", [Slotted, from_iterator(lambda: itertools.count(0.5, 0.1))])
def test_what_cannot_be_put_back_is_an_error_in_its_first_backward(draw: Callable[[], Draw]) -> None:
    plan = plan_for(Step(Blocks(draw), X), options=FORCED)
    model = Blocks(draw)
    plan.apply(model)
    with pytest.raises(StateError, match=r"unit 'blocks.1' computes something else .*forbid=\('blocks.1',\)"):
        model(X).backward()


def test_it_is_found_where_the_first_runs_agree_by_chance() -> None:
    draw = from_iterator(lambda: itertools.chain([0.5] * 6, itertools.cycle([0.5, 0.9])))
    plan = plan_for(Step(Blocks(draw), X), options=FORCED)
    model = Blocks(draw)
    plan.apply(model)
    for _ in range(3):
        model(X).backward()
    with pytest.raises(StateError, match="computes something else"):
        model(X).backward()


def test_units_that_run_other_ops_than_planned_are_compared_too() -> None:
    plan = plan_for(Step(Blocks(lambda: lambda: 0.5), X), options=FORCED)
    model = Blocks(from_iterator(lambda: itertools.count(0.5, 0.1)))
    plan.apply(model)
    with torch.autocast("cpu"), pytest.warns(UserWarning, match="planned"):
        model(X)  # held as it is, because it is not known before its end that it differs
    with torch.autocast("cpu"):
        loss = model(X)
    with pytest.raises(StateError, match="computes something else"):
        loss.backward()


def test_samples_are_the_same_for_all_layouts_and_see_scales_masks_and_orders() -> None:
    tensor = torch.randn(40, 24, 8, generator=torch.Generator().manual_seed(0))
    known = sample(tensor)
    assert known is not None and len(known) == 64
    assert sample(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == known
    rounded = tensor * (1 + 1e-6)
    kept = torch.from_numpy(np.random.default_rng(0).random(24) < 0.5)
    for other, differs in (
        (rounded, False),
        (tensor * 1.01, True),
        (tensor.flip(0), True),
        (tensor.flip(1), True),
        (tensor * kept[:, None], True),
    ):
        again = sample(other)
        assert again is not None
        assert (difference(known, again, tensor.dtype) is not None) == differs
    assert difference([float("nan"), float("inf")], [float("nan"), float("inf")], torch.float32) is None
    assert difference([1.0], [float("nan")], torch.float32) == pytest.approx((1.0, float("nan")), nan_ok=True)
    assert difference([1.0], [0.0], torch.bool) == (1.0, 0.0)
    assert sample(torch.empty(0, 3)) is None and sample(torch.tensor(2.0)) == [2.0]
    assert sample(torch.empty(2, device="meta")) is None and sample(torch.tensor([1j])) is None


def _add_to_input(model: nn.Module, x: torch.Tensor) -> None:
    x.add_(1.0)


def _add_to_parameter(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.0.a.bias").mul_(1.0 + 1e-5)  # within rounding, which an optimizer step may be too


@pytest.mark.parametrize("write", [_add_to_input, _add_to_parameter])
@pytest.mark.parametrize("run", [0, 2])
def test_what_a_unit_read_and_was_written_to_before_backward_is_an_error(
    write: Callable[[nn.Module, torch.Tensor], None], run: int
) -> None:
    model = Blocks(lambda: lambda: 2.0)
    plan_for(Step(model, X), options=FORCED).apply(model)
    for _ in range(run):
        model(X).backward()
    x = X * 2
    loss = model(x)
    write(model, x)
    with pytest.raises(StateError, match=r"written to between its forward|computes something else"):
        loss.backward()


class Normed(nn.Module):
    """Reads a buffer that each forward changes, and has statistics that it only writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.BatchNorm1d(16), nn.Tanh(), nn.Tanh()
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore::memfit.errors.PlanDrift")
def test_a_further_forward_that_writes_to_buffers_is_an_error_where_they_are_read() -> None:
    model = Normed()
    plan_for(Step(model, X), options=SolveOptions(force=("blocks.0",))).apply(model)
    for _ in range(2):
        model(X).backward()
    loss = model(X)
    model.blocks[0][1](X)  # statistics, which are not read
    loss.backward()
    model(X).backward()
    loss = model(X)
    model(X * 2)
    with pytest.raises(StateError, match="a further forward in train mode"):
        loss.backward()
