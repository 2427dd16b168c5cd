"""What each rank does in the tests of plans on tensor, sequence, context and expert parallel models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from memfit.errors import PlanDrift
from memfit.plans import Plan
from tests.distributed import context_parallel_ranks, expert_parallel_ranks, tensor_parallel_ranks
from tests.distributed.measured_steps import WARMUP, levels, profiled, steps_of

_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


def _long(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """More activations than parameters, so that it is worth while to recompute them."""
    return make((8, 2 * context_parallel_ranks.TOKENS, context_parallel_ranks.WIDTH))


def _many(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make((16 * expert_parallel_ranks.TOKENS, expert_parallel_ranks.WIDTH))


CASES = dict(tensor_parallel_ranks.CASES)
CASES["context parallel"] = replace(context_parallel_ranks._case({"cp": 2}, layers=4), batch=_long)
CASES["context parallel, all-to-all"] = replace(
    context_parallel_ranks._case({"cp": 2}, rotation="alltoall", layers=4), batch=_long
)
CASES["expert parallel"] = replace(expert_parallel_ranks._case({"ep": 2}, layers=4), batch=_many)


@dataclass(frozen=True)
class Trained:
    """What some steps on one rank came to; `collectives` are the functional ones of all measured steps."""

    levels: list[dict[str, Any]]
    collectives: int
    tensors: list[torch.Tensor]


def trained(name: str, documents: list[str] | None) -> Trained:
    """Train a case on numbers that all ranks share, with a plan or without; return its memory, and what it learnt."""
    case = CASES[name]
    mesh = init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes))
    torch.manual_seed(0)
    model = case.build(mesh)
    step = case.step(model, torch.randn)
    optimizer = step.build_optimizer(model)
    assert optimizer is not None
    if documents is not None:
        plan = Plan.from_json(documents[mesh.get_rank()])
        assert plan.checkpoint
        plan.apply(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanDrift)  # every unit must run as planned
        for _ in range(WARMUP):
            step.execute(model, optimizer, "cpu")
        profiler = profiled({"case": lambda: step.execute(model, optimizer, "cpu")})
    collectives = _collectives(profiler)
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    tensors = [getattr(each, "_local_tensor", each).detach().clone() for each in (*model.parameters(), *states)]
    return Trained(levels([events for _, events in steps_of(profiler)]), collectives, tensors)


def _collectives(profiler: torch.profiler.profile) -> int:
    """Count functional collectives; under a mode, one is called by the step and, inside of that, by the mode."""
    count = 0
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    stack = [(event, frozenset[str]()) for event in tree]
    while stack:
        event, around = stack.pop()
        if event.name.startswith("_c10d_functional::") and event.name not in {*_WAITS, *around}:
            count += 1
        stack += [(child, around | {event.name}) for child in event.children]
    return count


def refused_plain(name: str, document: str) -> str:
    """Return why a plan for a wrapped model is refused on one that is plain."""
    model = tensor_parallel_ranks.Model()
    before = dict(model.__dict__)
    try:
        Plan.from_json(document).apply(model)
    except Exception as error:
        assert model.__dict__ == before
        return f"{type(error).__name__}: {error}"
    return "not refused"


def applied(
    name: str, documents: list[str], plain_on: int | None = None, engines: tuple[Any, Any] = (None, None)
) -> str:
    """Return why this rank's plan is refused beside those of the others; nothing where it is applied.

    One rank may have a model that is not parallel, or ask for another engine; with "plain" no model is parallel.
    """
    case = CASES["tensor parallel" if name == "plain" else name]
    mesh = init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes))
    model = case.build(mesh)
    if name == "plain" or mesh.get_rank() == plain_on:
        model = tensor_parallel_ranks.Model()
    plan = Plan.from_json(documents[mesh.get_rank()])
    try:
        plan.apply(model, engine=engines[mesh.get_rank()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    plan.remove(model)
    return ""
