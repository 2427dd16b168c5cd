"""What each rank does in the tests of `verify` on several ranks."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import memfit
from memfit.plans import Plan
from memfit.verify import Verification
from tests.distributed.fsdp2_cases import TOKENS, Transformer
from tests.distributed.fsdp2_plans import _SHAPE, PLANS, Planned, bits, built, fully_sharded, loss_of, same


def ready(case: Planned, **changes: Any) -> memfit.Step:
    """The step of a case on a real model and this rank's own batch."""
    model = built(case)
    tokens = torch.randint(0, TOKENS, _SHAPE, generator=torch.Generator().manual_seed(dist.get_rank()))
    step = dataclasses.replace(
        case.step(), model=model, batch=tokens, optimizer=case.build_optimizer(model.parameters())
    )
    return dataclasses.replace(step, **changes)


def verified(name: str, document: str, engine: Any) -> tuple[Verification, str]:
    """Verify on this rank; nothing that the rank holds may have changed."""
    step = ready(PLANS[name])
    assert isinstance(step.model, nn.Module) and isinstance(step.optimizer, torch.optim.Optimizer)
    step.execute(step.model, step.optimizer, "cpu")  # with optimizer state, which is sharded too
    objects, before, numbers = list(step.model.parameters()), bits(step.model, step.optimizer), torch.get_rng_state()
    found = Plan.from_json(document).verify(step, 1, engine=engine, time_tolerance=None)
    assert all(one is other for one, other in zip(objects, step.model.parameters(), strict=True))
    same(bits(step.model, step.optimizer), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    return found, str(found)


def fails_on_rank_1(document: str, engine: Any, calls: int) -> tuple[str, str, float]:
    """The loss raises on rank 1 when it is called for so many times: the error, its text, and how long it took."""
    seen = 0

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if dist.get_rank() == 1 and seen == calls:
            raise ZeroDivisionError("a fault of the test")
        return loss_of(output, tokens)

    step = ready(PLANS["checkpointed"], loss=loss)
    assert isinstance(step.model, nn.Module)
    before, numbers = bits(step.model), torch.get_rng_state()
    began = time.monotonic()
    try:
        Plan.from_json(document).verify(step, 1, engine=engine)
    except Exception as error:
        told = type(error).__name__, str(error), time.monotonic() - began
    else:
        told = "nothing", "", 0.0
    same(bits(step.model), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    ones = torch.ones(1)
    dist.all_reduce(ones)  # the group that the ranks had goes on
    assert ones.item() == dist.get_world_size()
    return told


def refused(document: str, what: str) -> tuple[str, str]:
    """The error of a step that ranks cannot verify, or that one of them gives in another way."""
    step = ready(PLANS["checkpointed"])
    model, optimizer = step.model, step.optimizer
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    plan, given = Plan.from_json(document), step
    if what == "eval on rank 1":
        model.train(dist.get_rank() == 0)
    elif what == "function":
        given = lambda: step.execute(model, optimizer, "cpu")  # noqa: E731
    elif what == "three ranks":
        assert plan.shard is not None
        plan = msgspec.structs.replace(plan, shard=msgspec.structs.replace(plan.shard, ranks=3))
    elif what == "sharded":
        fully_sharded(model, plan)
    try:
        plan.verify(given, 1)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


class Counting(Transformer):
    """A block of rank 1 counts its calls, also those that recompute, and scales its result by the number of them.

    The scaling itself is never recomputed: nothing is saved after it. So the second step differs under a plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called = 0
        first, *_, last = self.blocks[1].children()
        first.register_forward_hook(self._count)
        last.register_forward_hook(self._scale)

    def _count(self, *_: Any) -> None:
        self.called += dist.is_initialized() and dist.get_rank() == 1

    def _scale(self, _: nn.Module, __: Any, result: torch.Tensor) -> torch.Tensor:
        return result * float(max(self.called, 1))


COUNTING = Planned(model=Counting)


def differs_on_rank_1(document: str, engine: Any) -> Verification:
    return Plan.from_json(document).verify(ready(COUNTING), 1, engine=engine, time_tolerance=None)


def step() -> memfit.Step:
    """The step of the command line."""
    return ready(PLANS["checkpointed"])


def failing() -> memfit.Step:
    """A step whose loss raises on rank 1 when it is called again."""
    seen = 0

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if dist.get_rank() == 1 and seen == 3:
            raise ZeroDivisionError("a fault of the test")
        return loss_of(output, tokens)

    return ready(PLANS["checkpointed"], loss=loss)
