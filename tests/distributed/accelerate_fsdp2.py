"""FSDP2 through accelerate on two Gloo ranks, twenty steps, with a plan applied before and after `prepare`."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import nn

import memfit
from memfit.integrations import accelerate as integration
from memfit.plans import Plan
from tests.distributed.library_wrappers import as_torchrun
from tests.distributed.measured_steps import bounds_of, measured
from tests.integrations import training_loops

STEPS, MEASURED = 20, 6
_BATCHES = 2
"""On the device at once: accelerate's loader fetches one ahead."""


def plan_between(part: float) -> Plan:
    """A plan for two ranks between the smallest budget that can be met (0) and the one that needs nothing (1)."""
    step = memfit.Step(training_loops.build(), next(iter(training_loops.loader())), resident_batches=2)
    options = {"target": "cpu", "ranks": 2, "engine": "fsdp2", "progress": False}
    least = memfit.plan(step, budget="1B", **options)
    assert least.minimum_budget_bytes is not None
    low, high = least.minimum_budget_bytes, least.baseline.peak_bytes
    return memfit.plan(step, budget=low + int((high - low) * part), **options)


def accelerator_with(plugin: Any) -> Accelerator:
    """An Accelerator on CPUs with FSDP2: accelerate takes up the plugin on GPUs only; its code runs on CPUs too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def train(plan: Plan, applied: Literal["never", "before", "after"]) -> tuple[list[float], int]:
    """The loop of accelerate's documentation; the losses of this rank, and the highest step of those measured."""
    model: nn.Module = training_loops.build()
    optimizer: Any = training_loops.make_optimizer(model.parameters())
    if applied == "before":  # fully_shard gives modules other classes: the plugin must name none
        accelerator = accelerator_with(FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False))
        plan.apply(model, optimizer, engine="fsdp2")
    else:
        accelerator = accelerator_with(integration.fsdp_plugin(plan, model))
    model, optimizer, loader = accelerator.prepare(model, optimizer, training_loops.loader())
    if applied == "after":
        plan.apply(model, optimizer)
    losses: list[float] = []
    batches = (batch for _ in range(STEPS) for batch in loader)
    torch.manual_seed(dist.get_rank())

    def step() -> None:
        loss = model(**next(batches)).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS - MEASURED):
        step()
    batch_bytes = sum(each.nbytes for each in next(iter(training_loops.loader())).values())
    there = _resident_bytes(model, optimizer) + _BATCHES * batch_bytes
    (_, high) = bounds_of(measured({"step": step}, MEASURED)["step"])
    if applied != "never":
        plan.remove(model)
    return losses, there + high


def _resident_bytes(model: nn.Module, optimizer: Any) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    state = optimizer.optimizer.state.values()
    tensors += [each for values in state for each in values.values() if isinstance(each, torch.Tensor)]
    local = [getattr(each, "_local_tensor", each).untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in local}.values())


def compared(folder: str) -> dict[str, int]:
    """Train without a plan and with it in either order; losses are the same and steps stay within the budget."""
    torch.set_num_threads(1)
    with as_torchrun(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_between(0.3)
        assert plan.checkpoint
        plain, plain_peak = train(plan, "never")
        after, after_peak = train(plan, "after")
        before, before_peak = train(plan, "before")
        AcceleratorState._reset_state(reset_partial_state=True)
    peaks = {"without a plan": plain_peak, "after prepare": after_peak, "before prepare": before_peak}
    assert len(plain) == STEPS
    assert plain == after == before
    assert plain_peak > plan.budget_bytes, peaks
    assert max(after_peak, before_peak) <= plan.budget_bytes, (peaks, plan.budget_bytes)
    return {**peaks, "budget": plan.budget_bytes}
