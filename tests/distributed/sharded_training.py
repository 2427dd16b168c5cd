"""What training loops do with a sharded model, beside the same with a plain one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.sharded import (
    Precision,
    ShardedGradScaler,
    clip_grad_norm_,
    finite_gradients,
    full_parameters,
    shard,
)
from tests.distributed.sharded_models import GPT

VOCABULARY = 67


def tokens(step: int, batch: int = 2, length: int = 8) -> torch.Tensor:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())


def built(seed: int = 0, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**options)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters of a sharded model, gathered, and its buffers."""
    with full_parameters(model):
        return {name: each.detach().clone() for name, each in [*model.named_parameters(), *model.named_buffers()]}


def clipped(norm_type: float) -> tuple[float, float, bool]:
    """The norms that memfit and a plain model find, and whether the clipped steps lead to the same parameters."""
    plain, sharded = DistributedDataParallel(built()), shard(built())
    norms = []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, tokens(0)).backward()
        if model is plain:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)))
        else:
            norms.append(float(clip_grad_norm_(model, 0.01, norm_type)))
        optimizer.step()
    found = whole(sharded)
    same = all(
        torch.allclose(found[name], each, rtol=1e-5, atol=1e-7) for name, each in plain.module.named_parameters()
    )
    return norms[0], norms[1], same


def overflow_on_one_rank() -> tuple[list[bool], bool, float]:
    """Whether gradients are finite before and after, whether the step was skipped, and the scale after it."""
    model = shard(built())
    before = whole(model)
    scaler = ShardedGradScaler(model, init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, tokens(0))).backward()
    finite = [finite_gradients(model)]
    if dist.get_rank() == 1:
        first = next(each for each in model.parameters() if each.grad is not None and each.to_local().numel())
        first.grad.to_local()[0] = float("inf")
    finite.append(finite_gradients(model))
    scaler.step(optimizer)
    scaler.update()
    after = whole(model)
    return finite, all(torch.equal(before[name], after[name]) for name in before), scaler.get_scale()


def started_from_rank_0(meta_elsewhere: bool) -> bool:
    """Whether every rank has rank 0's values, whatever it was built with."""
    wanted = built(0)
    wanted.register_buffer("scale", torch.full((3,), 7.0))
    if meta_elsewhere and dist.get_rank():
        with torch.device("meta"):
            model = built(0)
            model.register_buffer("scale", torch.empty(3))
    else:
        model = built(dist.get_rank())
        model.register_buffer("scale", torch.full((3,), 7.0 + dist.get_rank()))
    found = whole(shard(model, from_rank_0=True))
    expected = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def started_from_meta() -> tuple[bool, bool, bool]:
    """Values that `init` gives, values that reset_parameters gives, and whether such a model trains."""
    with torch.device("meta"):
        model = GPT()

    def fill(module: nn.Module) -> None:
        for number, parameter in enumerate(module.parameters(recurse=False)):
            parameter.fill_(number + 1.0)

    filled = whole(shard(model, init=fill))
    constant = all(bool((each == (2.0 if name.endswith("bias") else 1.0)).all()) for name, each in filled.items())
    with torch.device("meta"):
        model = GPT()
    torch.manual_seed(5)
    found = whole(shard(model))
    reset = bool(found["blocks.0.norm.weight"].eq(1).all()) and 0 < float(found["blocks.1.up.weight"].abs().max()) < 1
    loss = loss_of(model, tokens(0))
    loss.backward()
    return constant, reset, finite_gradients(model)


def buffers_in(dtype: torch.dtype) -> list[torch.dtype]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    shard(model, precision=Precision(buffer_dtype=dtype))
    return [buffer.dtype for buffer in model.buffers()]


def refusals() -> dict[str, str]:
    """What is said about models and options that cannot be sharded."""
    sharded = shard(GPT())
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "no module": ([1], {}),
        "wrapped": (DistributedDataParallel(GPT()), {}),
        "twice": (sharded, {}),
        "inside": (sharded.blocks[0], {}),
        "unknown unit": (GPT(), {"units": ["blocks.7"]}),
        "one path": (GPT(), {"units": "blocks.0"}),
        "list": (GPT(), {"units": ["blocks"]}),
        "ignored": (GPT(), {"ignored": ["nothing"]}),
        "foreign": (GPT(), {"ignored": [nn.Parameter(torch.zeros(1))]}),
        "order": (GPT(), {"schedule": memfit.sharded.Schedule(order=("head",))}),
        "part": (GPT(), {"units": {"blocks.0": memfit.sharded.UnitOptions(reshard_ranks=3)}}),
    }
    found = {}
    for name, (model, options) in given.items():
        before = list(model.parameters()) if isinstance(model, nn.Module) else []
        shapes = [each.shape for each in before]
        try:
            shard(model, **options)
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            assert [each.shape for each in before] == shapes
    try:
        copy.deepcopy(sharded)
    except RuntimeError as error:
        found["copied"] = str(error)
    return found


def different_plans() -> str:
    """What is said when ranks apply plans that differ in checkpointing only."""
    batch = tokens(0, 4, 32)
    options: dict[str, Any] = {
        "loss": lambda output, given: F.cross_entropy(output.flatten(0, 1), given.flatten()),
        "target": "cpu",
        "ranks": dist.get_world_size(),
        "progress": False,
    }
    least = memfit.plan(built(), batch, budget=1000, **options).minimum_budget_bytes
    assert least is not None
    model = built()
    shapes = [each.shape for each in model.parameters()]
    try:
        memfit.plan(built(), batch, budget=least + dist.get_rank() * 40_000, **options).apply(model)
    except ValueError as error:
        assert [each.shape for each in model.parameters()] == shapes
        return f"{type(error).__name__}: {error}"
    return ""


def planned(recompute: bool) -> tuple[list[float], list[float], int, bool]:
    """Losses with a plan and without, the number of checkpointed units, and whether the parameters are the same."""
    batch = tokens(0, 4, 32)
    options: dict[str, Any] = {
        "loss": lambda output, given: F.cross_entropy(output.flatten(0, 1), given.flatten()),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "target": "cpu",
        "ranks": dist.get_world_size(),
        "progress": False,
    }
    plan = memfit.plan(built(), batch, **options)
    if recompute:
        least = memfit.plan(built(), batch, budget=1000, **options).minimum_budget_bytes
        assert plan.predicted is not None and least is not None
        plan = memfit.plan(built(), batch, budget=(2 * least + plan.predicted.peak_bytes) // 3, **options)
    losses = []
    models = []
    for with_plan in (True, False):
        model = built()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if with_plan:
            plan.apply(model, optimizer)
        else:
            shard(model)
        losses.append([])
        for number in range(4):
            loss = loss_of(model, tokens(number, 4, 32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        models.append(whole(model))
    same = all(torch.equal(each, models[1][name]) for name, each in models[0].items())
    return losses[0], losses[1], len(plan.checkpoint), same
