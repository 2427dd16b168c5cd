"""What each rank does in the tests of `tune` on several ranks."""

from __future__ import annotations

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


def fails_on_rank_1(budget: int) -> tuple[str, str, float]:
    """The loss raises on rank 1 in the third turn or so: the error, its text, and how long it took."""
    seen = 0

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if dist.get_rank() == 1 and seen > 4 and not output.is_meta:
            raise ZeroDivisionError("a fault of the test")
        return loss_of(output, tokens)

    began = time.monotonic()
    try:
        options = SolveOptions(decide="exact")
        tune(
            ready(PLANS["checkpointed"], loss=loss),
            target="cpu",
            ranks=2,
            budget=budget,
            options=options,
            rounds=3,
            steps=3,
            progress=False,
        )
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def in_too_little_memory(budget: int) -> str:
    """Nothing fits: the status on this rank."""
    found = tune(ready(PLANS["checkpointed"]), target="cpu", ranks=2, budget=budget, progress=False)
    return found.plan.status
