"""What each rank does in the tests of plans on FSDP2: trained under a plan, and with the same units without one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import memfit
from memfit.plans import Plan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.distributed.fsdp2_cases import HIDDEN, TOKENS, WIDTH, Transformer
from tests.distributed.fsdp2_ranks import _levels, _resident_bytes
from tests.distributed.measured_steps import WARMUP, profiled, steps_of

BLOCKS = tuple(f"blocks.{number}" for number in range(len(HIDDEN)))
_SHAPE = (4, 64)


class Dropped(Transformer):
    """With dropout, whose second run must draw the same numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        return self.head(x)


class Rows(Transformer):
    """Begins with a linear layer, which autocast runs in bfloat16 in either case; an embedding keeps the weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(TOKENS, WIDTH, bias=False)  # type: ignore[assignment]
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.one_hot(x, TOKENS).float())


class Positioned(Transformer):
    """With positions of one row, of which FSDP2 gives the second rank nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, *_SHAPE[1:], WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step and how it is planned. Where `follows` is false, ops run that the plan does not know, which it says."""

    model: Callable[[], nn.Module] = Transformer
    follows: bool = True
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
    "autocast": Planned(model=Rows, autocast=torch.bfloat16),
    "autocast, embedding in bfloat16": Planned(autocast=torch.bfloat16),
    "bfloat16 parameters": Planned(shard={"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
    "accumulation": Planned(accumulation_steps=2),
    "foreach": Planned(optimizer={"foreach": True}),
    "one row": Planned(model=Positioned),
}

_BFLOAT16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
FOUR = {
    "hybrid": Planned(shard={"replicas": 2}, accumulation_steps=2),
    "hybrid, bfloat16": Planned(shard={"replicas": 2, **_BFLOAT16}),
    "not resharded": Planned(shard={"reshard_after_forward": False}),
    "to 2 ranks": Planned(shard={"reshard_after_forward": 2}),
    "to 2 ranks, bfloat16, prefetch of 2": Planned(shard={"reshard_after_forward": 2, "prefetch": 2, **_BFLOAT16}),
}
"""Settings that take four ranks, or are different there."""


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def built(case: Planned) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def fully_sharded(model: nn.Module, plan: Plan) -> nn.Module:
    """Shard the units of a plan by hand, as its user would."""
    assert plan.shard is not None
    shard = plan.shard
    sizes = (shard.replicas, shard.ranks) if shard.replicas > 1 else (shard.ranks,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    dtypes = (plan.shard.param_dtype, plan.shard.reduce_dtype)
    param, reduce = (None if each is None else getattr(torch, each) for each in dtypes)
    policy = MixedPrecisionPolicy(param, reduce, cast_forward_inputs=plan.trace.autocast is None)
    for unit in plan.shard.units:
        if unit.module:
            block = model.get_submodule(unit.module)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=unit.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
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
    case, plan = {**PLANS, **FOUR}[name], Plan.from_json(document)
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
            warnings.simplefilter("error" if case.follows else "ignore", memfit.errors.PlanDrift)
            assert train(case, model, optimizer, plan.loss(loss_of)) == losses
        same(bits(model, optimizer), bits(plain, plain_optimizer))
        plan.remove(model)


def measured(name: str, document: str) -> list[dict[str, Any]]:
    """What steps under a plan allocate, and what this rank holds between them, the batch included."""
    case, plan = {**PLANS, **FOUR}[name], Plan.from_json(document)
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
    for _ in range(WARMUP):
        ready.execute(model, optimizer, "cpu")
    held = _resident_bytes(model, optimizer) + tokens.nbytes
    profiler = profiled({"a plan": lambda: ready.execute(model, optimizer, "cpu")})
    plan.remove(model)
    return [{"held_bytes": held, **_levels(events)} for _, events in steps_of(profiler)]


# -- Back to whole parameters -----------------------------------------------------------------------------------------


def whole_again(document: str) -> None:
    """Apply and remove without a step: every bit, object, hook and class is as before; with steps, the trained ones."""
    case, plan = PLANS["checkpointed"], Plan.from_json(document)
    model = built(case)
    optimizer = case.build_optimizer(model.parameters())
    before = _surroundings(model)
    objects, values = dict(model.named_parameters()), bits(model)
    for _ in range(2):
        applied(plan, model, optimizer, engine="fsdp2")
        assert all(isinstance(each, DTensor) for each in model.parameters())
        assert not any(each.numel() for each in objects.values()), "the whole parameters are still in memory"
        plan.remove(model)
        assert _surroundings(model) == before
        assert all(objects[name] is each for name, each in model.named_parameters())
        assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in objects.values()]
        same(bits(model), values)
    applied(plan, model, optimizer, engine="fsdp2")
    train(case, model, optimizer, plan.loss(loss_of))
    sharded = {name: each.full_tensor().detach().clone() for name, each in model.named_parameters()}  # type: ignore
    moments = {name: optimizer.state[each]["exp_avg"].full_tensor().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        model(torch.zeros(_SHAPE, dtype=torch.int64))  # leaves the root unsharded
    plan.remove(model)
    same(bits(model), sharded)
    same({name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters()}, moments)
    assert _surroundings(model) == before
    train(case, model, optimizer, loss_of)


def goes_on_from_state_and_back(document: str) -> None:
    """State from steps before is sharded: the bits of `fully_shard` with the same state; then whole training goes on.

    Two groups with settings of their own, and a scheduler that holds the groups.
    """
    case, plan = PLANS["checkpointed"], Plan.from_json(document)
    model, plain = built(case), built(case)
    optimizer, plain_optimizer = _grouped(model), _grouped(plain)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.5)
    for each, its in ((model, optimizer), (plain, plain_optimizer)):
        train(case, each, its, loss_of, steps=2)  # ranks differ from here on, as their batches do
    fully_sharded(plain, plan)
    old = {name: plain_optimizer.state[each] for name, each in built_like(plain_optimizer)}
    plain_optimizer = _with_state(plain, old)
    applied(plan, model, optimizer, engine="fsdp2")
    assert [len(group["params"]) for group in optimizer.param_groups] == _group_sizes(model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    losses = train(case, plain, plain_optimizer, loss_of)
    assert train(case, model, optimizer, plan.loss(loss_of)) == losses
    same(bits(model, optimizer), bits(plain, plain_optimizer))
    scheduler.step()
    plan.remove(model)
    assert all(type(value) is torch.Tensor for state in optimizer.state.values() for value in state.values())
    assert {len(state) for state in optimizer.state.values()} == {3}
    train(case, model, optimizer, loss_of)


def optimizer_made_after_is_made_whole_too(document: str) -> None:
    case, plan = PLANS["checkpointed"], Plan.from_json(document)
    model = built(case)
    applied(plan, model, engine="fsdp2")
    optimizer = case.build_optimizer(model.parameters())
    train(case, model, optimizer, plan.loss(loss_of))
    plan.remove(model)
    assert all(map(_is, optimizer.param_groups[0]["params"], model.parameters()))
    before = bits(model)
    train(case, model, optimizer, loss_of, steps=1)
    assert not any(torch.equal(before[name], each) for name, each in bits(model).items())


def stays_sharded_where_the_user_sharded_it(document: str) -> None:
    """As planned: no warning, the policies run, the same bits; `remove` leaves the shards. Otherwise: what differs."""
    case, plan = PLANS["checkpointed"], Plan.from_json(document)
    plain, model = fully_sharded(built(case), plan), fully_sharded(built(case), plan)
    optimizers = [case.build_optimizer(each.parameters()) for each in (plain, model)]
    applied(plan, model, optimizers[1])
    losses = train(case, plain, optimizers[0], loss_of)
    assert train(case, model, optimizers[1], plan.loss(loss_of)) == losses
    same(bits(model, optimizers[1]), bits(plain, optimizers[0]))
    plan.remove(model)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    train(case, model, optimizers[1], loss_of)
    other = built(case)
    fully_shard(other.get_submodule("blocks.1"))
    fully_shard(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.apply(other)
    assert "blocks.0 is whole here and a unit in the plan" in str(caught[0].message)
    assert plan.shard is not None
    ahead = msgspec.structs.replace(plan, shard=msgspec.structs.replace(plan.shard, prefetch=2))
    other = fully_sharded(built(case), plan)
    with pytest.warns(UserWarning, match="it gathers 1 unit ahead here and 2 in the plan"):
        ahead.apply(other)
    ahead.remove(other)
    blocks: Any = [each for name, each in other.named_modules() if name.startswith("blocks.") and name.count(".") == 1]
    blocks[0].set_modules_to_forward_prefetch(blocks[1:3])
    applied(ahead, other, case.build_optimizer(other.parameters()))


def _surroundings(model: nn.Module) -> list[Any]:
    """Everything of the modules that is no parameter: classes, attributes, hooks."""
    return [
        (type(module), [(key, list(value) if "hooks" in key else None) for key, value in module.__dict__.items()])
        for module in model.modules()
    ]


def _is(first: object, second: object) -> bool:
    return first is second


def _grouped(model: nn.Module) -> torch.optim.AdamW:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    groups: list[Any] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def _group_sizes(model: nn.Module) -> list[int]:
    return [len(group["params"]) for group in _grouped(model).param_groups]


def built_like(optimizer: torch.optim.Optimizer) -> list[tuple[int, Any]]:
    """The parameters of an optimizer by number."""
    return list(enumerate(each for group in optimizer.param_groups for each in group["params"]))


def _with_state(model: nn.Module, old: dict[int, dict[str, Any]]) -> torch.optim.AdamW:
    """A new optimizer of a sharded model with rows of whole state: what a user would write by hand."""
    optimizer = _grouped(model)
    for number, parameter in built_like(optimizer):
        rows = -(-parameter.shape[0] // dist.get_world_size())
        own = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        state = {"step": old[number]["step"].clone()}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)
            state[name].to_local().copy_(old[number][name][own])
        optimizer.state[parameter] = state
    return optimizer
