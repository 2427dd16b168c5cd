"""Plans on models that PyTorch's own wrappers run on every rank, applied before and after wrapping."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.engines.attachment import attached
from memfit.errors import InputError
from memfit.plans import Plan
from memfit.plans.wrappers import named_modules
from memfit.solve import SolveOptions
from tests.distributed.sharded_memory import _rise

WIDTH, LAYERS, ROWS = 32, 3, 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def built() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(output: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return output.square().mean()


def sharded_units(model: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def sharded_inside_units(model: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer.up)
        fully_shard(layer.down)
    fully_shard(model)
    return model


def fsdp1(model: nn.Module, *, original: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=original, device_id=torch.device("cpu")
    )


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard of the whole": lambda model: fully_shard(model),
    "fully_shard of each layer": sharded_units,
    "fully_shard inside of layers": sharded_inside_units,
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: fsdp1(model, original=False),
    "FSDP1 with original parameters": lambda model: fsdp1(model, original=True),
}


def train(wrap: str, plan: Plan | None, *, after: bool) -> tuple[list[torch.Tensor], int, list[str], bool]:
    """Gradients of some steps, the rise of memory in one, what was warned of, and whether the units have the plan."""
    model: nn.Module = built()
    said: list[str] = []
    if plan is not None and not after:
        plan.apply(model)
    wrapped = WRAPPERS[wrap](model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if plan is not None and after:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan.apply(wrapped, optimizer)
        said = [str(each.message) for each in caught]
    found: list[torch.Tensor] = []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))

    def step() -> None:
        loss_of(wrapped(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        loss_of(wrapped(x)).backward()
        grads = [each.grad for each in wrapped.parameters()]
        found += [getattr(each, "_local_tensor", each).clone() for each in grads if each is not None]
        optimizer.step()
        optimizer.zero_grad()
    rise = _rise(step)
    units = dict(named_modules(wrapped))
    planned = plan is not None and all(attached(units[entry.module]) is not None for entry in plan.checkpoint)
    if plan is not None:
        plan.remove(wrapped)
    return found, rise, said, planned


def planned_layers() -> Plan:
    step = memfit.Step(built(), torch.randn(ROWS, WIDTH), loss=loss_of, optimizer=torch.optim.SGD)
    options = SolveOptions(force=tuple(f"layers.{number}" for number in range(LAYERS)))
    least = memfit.plan(step, target="cpu", budget="1KiB", options=options, progress=False).minimum_budget_bytes
    return memfit.plan(step, target="cpu", budget=least, options=options, progress=False)


def compared(wrap: str) -> None:
    """A plan before and after wrapping: the bits of the wrapped model without it, and less memory."""
    plan = planned_layers()
    plain, plain_rise, _, _ = train(wrap, None, after=False)
    assert plain
    for after in (False, True):
        grads, rise, said, planned = train(wrap, plan, after=after)
        assert planned
        assert len(grads) == len(plain) and all(map(torch.equal, grads, plain)), f"other gradients, {after=}"
        held = (LAYERS - 1) * ROWS * 8 * WIDTH * 4  # what the GELUs of other layers keep while one is in its backward
        assert rise < plain_rise - held, f"{rise} against {plain_rise}, {after=}"
        assert len(said) == after
        if after:
            assert "checkpoint policies are carried out, and nothing else" in said[0]


class OwnReplicas(DistributedDataParallel):
    """As libraries derive theirs."""


def planned_replicas(wrap: Callable[[nn.Module], nn.Module]) -> Plan:
    """A plan of a step on two ranks whose model is in a wrapper."""
    x = torch.randn(ROWS, WIDTH)
    step = memfit.Step(lambda mesh: wrap(built()), x, loss=loss_of, optimizer=torch.optim.SGD)
    return memfit.plan(step, target="cpu", mesh={"dp": 2}, progress=False)


def applied_to_subclass(documents: list[str]) -> None:
    """Plans of DDP and of a subclass go on models in the other one; a model in none is refused."""
    for document, wrap in zip(documents, (OwnReplicas, DistributedDataParallel), strict=True):
        plan, model = Plan.from_json(document), wrap(built())
        optimizer = torch.optim.SGD(model.parameters())
        plan.apply(model, optimizer)
        loss_of(model(torch.randn(ROWS, WIDTH))).backward()
        optimizer.step()
        plan.remove(model)
        with pytest.raises(InputError, match=r"wrapped on a mesh .* in DistributedDataParallel, and this one is not"):
            plan.apply(built())


def wrapped_inside() -> None:
    """Units are found through wrappers of their own, and a unit's name may be that of a wrapper's attribute."""
    plan = planned_layers()
    model: Any = built()
    for number in range(LAYERS):
        model.layers[number] = checkpoint_wrapper(model.layers[number], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    plan.apply(model)
    assert all(attached(each._checkpoint_wrapped_module) is not None for each in model.layers)
    plan.remove(model)
