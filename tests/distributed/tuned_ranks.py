"""What each rank does in the tests of `tune` on several ranks."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.plans import Plan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.verify import Tuning, tune
from tests.distributed.fsdp2_plans import PLANS, bits, loss_of, same
from tests.distributed.verified_ranks import ready


def tuned(name: str, engine: Any, budget: int) -> Tuning:
    """Tune on this rank; nothing that the rank holds may have changed, and the plan runs."""
    step = ready(PLANS[name])
    assert isinstance(step.model, nn.Module) and isinstance(step.optimizer, torch.optim.Optimizer)
    step.execute(step.model, step.optimizer, "cpu")  # with optimizer state, which is sharded too
    objects, before, numbers = list(step.model.parameters()), bits(step.model, step.optimizer), torch.get_rng_state()
    options = SolveOptions(decide="exact", shard=ShardOptions(engine=engine))
    found = tune(step, target="cpu", ranks=2, budget=budget, options=options, rounds=2, steps=1, progress=False)
    assert all(one is other for one, other in zip(objects, step.model.parameters(), strict=True))
    same(bits(step.model, step.optimizer), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    return found


def checks(document: str) -> tuple[bool, int]:
    """Whether a plan holds on this rank, and the largest measured peak."""
    found = Plan.from_json(document).verify(ready(PLANS["checkpointed"]), 1, time_tolerance=None)
    return found.ok, found.peak.measured_bytes


def fails_on_rank_1(at: str, budget: int) -> tuple[str, str, float]:
    """The factory or, in a turn, the loss raises on rank 1: the error, its text, and how long it took."""
    step = ready(PLANS["checkpointed"])
    model = step.model

    def factory() -> Any:
        if at == "building" and dist.get_rank() == 1:
            raise ZeroDivisionError("a fault of the test")
        return model

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if at == "a turn" and dist.get_rank() == 1 and not output.is_meta:
            raise ZeroDivisionError("a fault of the test")
        return loss_of(output, tokens)

    step = dataclasses.replace(step, model=factory, optimizer=torch.optim.AdamW, loss=loss)
    began = time.monotonic()
    try:
        tune(step, target="cpu", ranks=2, budget=budget, options=SolveOptions(decide="exact"), progress=False)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def out_of_memory_on_rank_1(budget: int) -> Tuning:
    """The loss raises on rank 1 what an allocation that fails raises, in the first turn."""
    failed = False

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal failed
        if dist.get_rank() == 1 and not failed and not output.is_meta:
            failed = True
            raise MemoryError("as of an allocation that fails")
        return loss_of(output, tokens)

    step = ready(PLANS["checkpointed"], loss=loss)
    options = SolveOptions(decide="exact")
    return tune(step, target="cpu", ranks=2, budget=budget, options=options, rounds=1, steps=1, progress=False)


def in_too_little_memory(budget: int) -> str:
    """Nothing fits: the status on this rank."""
    found = tune(ready(PLANS["checkpointed"]), target="cpu", ranks=2, budget=budget, progress=False)
    return found.plan.status
