"""What each rank does in the tests of plans on a hybrid mesh: replicas whose ranks shard."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memfit.plans import Plan
from memfit.sharded import Precision, Schedule, UnitOptions, shard
from memfit.verify import Verification
from tests.distributed.fsdp2_plans import FOUR, applied, bits, built, loss_of, same, train
from tests.distributed.verified_ranks import ready


def trains_to_the_bits_of_shard(name: str, document: str) -> None:
    """A plan on the sharded runtime, its mesh given or not, against `shard` on the same mesh without checkpointing."""
    case, plan = FOUR[name], Plan.from_json(document)
    assert plan.shard is not None
    mesh = init_device_mesh("cpu", (plan.shard.replicas, plan.shard.ranks), mesh_dim_names=("replicate", "shard"))
    plain = built(case)
    dtypes = (plan.shard.param_dtype, plan.shard.reduce_dtype)
    param, reduce = (None if each is None else getattr(torch, each) for each in dtypes)
    ahead = plan.shard.prefetch
    shard(
        plain,
        mesh=mesh,
        units={unit.module: UnitOptions(keep=not unit.reshard_after_forward) for unit in plan.shard.units},
        precision=Precision(param_dtype=param, reduce_dtype=reduce, cast_inputs="units"),
        schedule=Schedule(forward_prefetch=ahead, backward_prefetch=ahead),
    )
    plain_optimizer = case.build_optimizer(plain.parameters())
    losses = train(case, plain, plain_optimizer, loss_of)
    for given in (None, mesh):
        model = built(case)
        optimizer = case.build_optimizer(model.parameters())
        applied(plan, model, optimizer, engine="sharded", mesh=given)
        assert {each.device_mesh.shape for each in model.parameters()} == {(2, 2)}  # type: ignore[attr-defined]
        assert train(case, model, optimizer, plan.loss(loss_of)) == losses
        same(bits(model, optimizer), bits(plain, plain_optimizer))


def verified(name: str, document: str, engine: Any) -> Verification:
    step = ready(FOUR[name])
    return Plan.from_json(document).verify(step, 1, engine=engine, time_tolerance=None)


def fails_on_rank_3(document: str, engine: Any) -> tuple[str, str, float]:
    """The loss raises on a rank with which the first shares no group; a verification after it is one on new groups."""
    seen = 0

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if dist.get_rank() == 3 and seen == 6:
            raise ZeroDivisionError("a fault of the test")
        return loss_of(output, tokens)

    plan, step = Plan.from_json(document), ready(FOUR["hybrid"], loss=loss)
    assert isinstance(step.model, nn.Module)
    before, began = bits(step.model), time.monotonic()
    try:
        plan.verify(step, 1, engine=engine)
    except Exception as error:
        told = type(error).__name__, str(error), time.monotonic() - began
    else:
        told = "nothing", "", 0.0
    same(bits(step.model), before)
    return told
