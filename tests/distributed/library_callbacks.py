"""The callbacks of transformers and Lightning on two Gloo ranks with DistributedDataParallel."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from lightning.pytorch.strategies import DDPStrategy

import memfit
from memfit.integrations import lightning, transformers
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.distributed.library_wrappers import as_torchrun
from tests.integrations import training_loops
from tests.integrations.library_training import Module, losses_of, make_lightning, make_trainer

STEPS = 6


def budget_on_ranks(planned: memfit.Step, part: float) -> int:
    options = SolveOptions(shard=ShardOptions(parallel="ddp"))
    least = memfit.plan(planned, target="cpu", ranks=2, budget="1B", options=options, progress=False)
    assert least.minimum_budget_bytes is not None
    return least.minimum_budget_bytes + int((least.baseline.peak_bytes - least.minimum_budget_bytes) * part)


def trained_by_lightning(folder: str) -> None:
    """The finder sets the same size on both ranks, and the callback plans it for DDP: the same losses."""
    torch.set_num_threads(1)
    batch = next(iter(Module(6).train_dataloader()))
    budget = budget_on_ranks(lightning.step(Module(), batch), 0.9)

    def train(callbacks: list[Any], batch_size: int) -> Module:
        module = Module(batch_size)
        arguments: dict[str, Any] = {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")}
        torch.manual_seed(2)
        make_lightning(callbacks, max_steps=STEPS, **arguments).fit(module)
        return module

    with as_torchrun(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finder = lightning.BatchSizeFinder(budget=budget, max_val=64)
        train([finder], 2)
        planned = lightning.MemfitCallback(budget=budget)
        found = train([planned], 6)
        plain = train([], 6)
    sizes = [None, None]
    dist.all_gather_object(sizes, finder.optimal_batch_size)
    assert finder.search is not None and finder.search.exact
    assert sizes == [finder.optimal_batch_size] * 2 and 2 < finder.search.largest.value < 6, sizes  # type: ignore[union-attr]
    assert planned.plan is not None and planned.plan.ddp is not None and planned.plan.checkpoint
    assert torch.equal(torch.stack(found.losses), torch.stack(plain.losses))


def trained_by_transformers(folder: str) -> None:
    """`Trainer` under DDP with the callback: the same losses."""
    torch.set_num_threads(1)
    with as_torchrun(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AcceleratorState._reset_state(reset_partial_state=True)
        arguments: dict[str, Any] = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
        budget = budget_on_ranks(transformers.step(make_trainer(training_loops.build(), [], **arguments)), 0.5)
        callback = transformers.MemfitCallback(budget=budget)
        losses = []
        for callbacks in ([], [callback]):
            trainer = make_trainer(training_loops.build(), callbacks, **arguments)
            trainer.train()
            losses.append(losses_of(trainer))
        AcceleratorState._reset_state(reset_partial_state=True)
    assert callback.plan is not None and callback.plan.ddp is not None and callback.plan.checkpoint
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
