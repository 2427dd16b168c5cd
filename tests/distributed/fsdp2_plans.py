"""What each rank does in the tests of plans on FSDP2: trained under a plan, and with the same units without one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import memfit
from memfit.plans import Plan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.distributed.fsdp2_cases import HIDDEN, TOKENS, Transformer
from tests.distributed.fsdp2_ranks import _levels, _resident_bytes, _steps

BLOCKS = tuple(f"blocks.{number}" for number in range(len(HIDDEN)))
_SHAPE = (4, 64)
_STEP = "measured step of a plan"


class Dropped(Transformer):
    """With dropout, whose second run must draw the same numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step and how it is planned."""

    model: Callable[[], nn.Module] = Transformer
    autocast: torch.dtype | None = None
    force: tuple[str, ...] = BLOCKS
    forbid: tuple[str, ...] = ()
    shard: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: {"foreach": False})
    accumulation_steps: int = 1

    def build_optimizer(self, parameters: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters, lr=1e-2, **self.optimizer)

    def step(self) -> memfit.Step:
        return memfit.Step(
            self.model,
            memfit.spec(_SHAPE, torch.int64),
            loss=loss_of,
            optimizer=self.build_optimizer,
            autocast=self.autocast,
            accumulation_steps=self.accumulation_steps,
        )

    def plan(self, ranks: int) -> Plan:
        """The plan with the lowest peak that checkpoints what it must."""
        options = SolveOptions(force=self.force, forbid=self.forbid, shard=ShardOptions(**self.shard))
        asked: Any = {"target": "cpu", "ranks": ranks, "options": options, "progress": False}
        if not self.force:
            return memfit.plan(self.step(), budget="1GiB", **asked)
        least = memfit.plan(self.step(), budget="1KiB", **asked).minimum_budget_bytes
        return memfit.plan(self.step(), budget=least, **asked)


PLANS = {
    "checkpointed": Planned(),
    "dropout": Planned(model=Dropped),
    "kept": Planned(force=("blocks.1",), forbid=("<loss>", "blocks.0", "blocks.2"), shard={"keep_last": True}),
    "nothing checkpointed": Planned(force=()),
    "autocast": Planned(autocast=torch.bfloat16),
    "bfloat16 parameters": Planned(shard={"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
    "accumulation": Planned(accumulation_steps=2),
    "foreach": Planned(optimizer={"foreach": True}),
}


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def built(case: Planned) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def fully_sharded(model: nn.Module, plan: Plan) -> nn.Module:
    """Shard the units of a plan by hand, as its user would."""
    assert plan.shard is not None
    dtypes = (plan.shard.param_dtype, plan.shard.reduce_dtype)
    param, reduce = (None if each is None else getattr(torch, each) for each in dtypes)
    policy = MixedPrecisionPolicy(param, reduce, cast_forward_inputs=plan.trace.autocast is None)
    for unit in plan.shard.units:
        if unit.module:
            block = model.get_submodule(unit.module)
            fully_shard(block, mp_policy=policy, reshard_after_forward=unit.reshard_after_forward)
    fully_shard(model, mp_policy=policy)
    return model


def applied(plan: Plan, *given: Any, **options: Any) -> None:
    """Apply a plan, which must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.apply(*given, **options)


def train(case: Planned, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, steps: int = 3) -> list[float]:
    """Some steps on this rank's own batches."""
    numbers = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(steps):
        for _ in range(case.accumulation_steps):
            tokens = torch.randint(0, TOKENS, _SHAPE, generator=numbers)
            with torch.autocast("cpu", case.autocast) if case.autocast is not None else contextlib.nullcontext():
                each = loss(model(tokens), tokens) / case.accumulation_steps
            each.backward()
            found.append(each.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """This rank's part of parameters and optimizer state, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = _local(parameter)
        for kind, value in (optimizer.state[parameter] if optimizer is not None else {}).items():
            found[f"{kind} of {name}"] = _local(value)
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    others = [name for name in first if not torch.equal(first[name], second[name])]
    assert not others, others


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trains_to_the_same_bits(name: str, document: str) -> None:
    """A plan on FSDP2, its optimizer made before, against `fully_shard` on the same units without checkpointing."""
    case, plan = PLANS[name], Plan.from_json(document)
    plain = fully_sharded(built(case), plan)
    plain_optimizer = case.build_optimizer(plain.parameters())
    losses = train(case, plain, plain_optimizer, loss_of)
    for made_before in (True, False):
        model = built(case)
        optimizer = case.build_optimizer(model.parameters())
        if made_before:
            applied(plan, model, optimizer, engine="fsdp2")
        else:
            applied(plan, model, engine="fsdp2")
            optimizer = case.build_optimizer(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error", memfit.errors.PlanDrift)
            assert train(case, model, optimizer, plan.loss(loss_of)) == losses
        same(bits(model, optimizer), bits(plain, plain_optimizer))
        plan.remove(model)


def measured(name: str, document: str) -> list[dict[str, Any]]:
    """What steps under a plan allocate, and what this rank holds between them, the batch included."""
    case, plan = PLANS[name], Plan.from_json(document)
    model = built(case)
    optimizer = case.build_optimizer(model.parameters())
    applied(plan, model, optimizer, engine="fsdp2")
    tokens = torch.zeros(_SHAPE, dtype=torch.int64)
    step = case.step()
    loss = plan.loss(loss_of)
    ready = memfit.Step(
        model,
        tokens,
        loss=loss,
        optimizer=optimizer,
        autocast=step.autocast,
        accumulation_steps=case.accumulation_steps,
    )
    for _ in range(3):
        ready.execute(model, optimizer, "cpu")
    held = _resident_bytes(model, optimizer) + tokens.nbytes * case.accumulation_steps
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        for _ in range(3):
            with torch.profiler.record_function(_STEP):
                ready.execute(model, optimizer, "cpu")
    plan.remove(model)
    return [{"held_bytes": held, **_levels(events)} for _, events in _steps(profiler)]
