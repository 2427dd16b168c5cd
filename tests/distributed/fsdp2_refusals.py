"""What each rank does in the tests of plans that FSDP2 cannot run: the refusal, and what is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memfit.engines import local
from memfit.errors import InputError, MemfitError
from memfit.plans import Plan
from tests.distributed import fsdp2_plans as plans

_CASE = plans.PLANS["checkpointed"]


class Setting:
    """A model with an optimizer that has taken a step, and what both are."""

    def __init__(self, document: str) -> None:
        self.plan = Plan.from_json(document)
        self.model = plans.built(_CASE)
        self.optimizer: torch.optim.Optimizer = _CASE.build_optimizer(self.model.parameters())
        self.engine: Any = "fsdp2"
        self.mesh: Any = None

    def refused(self, error: type[BaseException] = InputError) -> str:
        """The refusal of `apply`, after which everything is as it was and trains on."""
        plans.train(_CASE, self.model, self.optimizer, plans.loss_of, steps=1)
        before = self._content()
        try:
            self.plan.apply(self.model, self.optimizer, engine=self.engine, mesh=self.mesh)
        except error as refusal:
            said = str(refusal)
        else:
            raise AssertionError("apply did not refuse")
        after = self._content()
        assert before[0] == after[0]
        plans.same(before[1], after[1])
        plans.train(_CASE, self.model, self.optimizer, plans.loss_of, steps=1)
        return said

    def _content(self) -> tuple[Any, dict[str, torch.Tensor]]:
        groups = [[id(each) for each in group["params"]] for group in self.optimizer.param_groups]
        modules = plans._surroundings(self.model)
        return (groups, modules, [id(each) for each in self.model.parameters()]), plans.bits(self.model, self.optimizer)


def _other_engine(setting: Setting) -> None:
    setting.engine = "deepspeed"


def _engine_of_one_rank(setting: Setting) -> None:
    setting.engine = "local"


def _already_sharded(setting: Setting) -> None:
    fully_shard(setting.model)
    setting.optimizer = _CASE.build_optimizer(setting.model.parameters())


def _gradients(setting: Setting) -> None:
    setting.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def _hooks(setting: Setting) -> None:
    next(setting.model.parameters()).register_post_accumulate_grad_hook(lambda _: None)


def _not_contiguous(setting: Setting) -> None:
    weight = setting.model.get_submodule("blocks.0.up").weight
    weight.data = weight.data.t().contiguous().t()


def _other_state(setting: Setting) -> None:
    state = setting.optimizer.state
    setting.optimizer.register_step_post_hook(
        lambda optimizer, *_: [each.update(row=torch.zeros(3)) for each in state.values()] and None
    )


def _tied_across_units(setting: Setting) -> None:
    setting.plan = msgspec.structs.replace(
        setting.plan,
        shard=msgspec.structs.replace(
            setting.plan.shard,
            units=(*setting.plan.shard.units, msgspec.structs.replace(setting.plan.shard.units[1], module="head")),
        ),
    )


def _unnamed_mesh(setting: Setting) -> None:
    setting.mesh = init_device_mesh("cpu", (1, dist.get_world_size()))


def _other_ranks(setting: Setting) -> None:
    setting.plan = msgspec.structs.replace(setting.plan, shard=msgspec.structs.replace(setting.plan.shard, ranks=8))


REFUSED: dict[str, tuple[Callable[[Setting], None], str]] = {
    "unknown engine": (_other_engine, "there is no engine 'deepspeed'; write one of 'local', 'fsdp2', 'sharded'"),
    "engine of one rank": (_engine_of_one_rank, "engine 'local' runs on one device, and this plan shards"),
    "other number of ranks": (_other_ranks, "over 8 ranks, and here are 2"),
    "sharded already": (_already_sharded, "engine 'fsdp2' shards the model, and this one is in fully_shard already"),
    "gradients": (_gradients, "has a gradient, which is this rank's own and not reduced"),
    "hooks on parameters": (_hooks, "has hooks, and fully_shard puts another parameter in its place"),
    "not contiguous": (_not_contiguous, "is not contiguous, which FSDP2 refuses"),
    "state of other shapes": (_other_state, "AdamW keeps 'row' of parameter"),
    "tied across units": (_tied_across_units, "and the plan shards them in two units"),
    "mesh without names": (_unnamed_mesh, "FSDP2 wants names for a mesh of two dimensions"),
}


def refused(name: str, document: str) -> str:
    setting = Setting(document)
    REFUSED[name][0](setting)
    return setting.refused()


class Closed(nn.LayerNorm):
    """Lets nobody set its parameters, which `fully_shard` finds out when it has sharded some others."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError("this weight cannot be set")
        super().__setattr__(name, value)


def fails_midway(document: str) -> str:
    """`fully_shard` raises in its third unit, and in a second try the attachment of policies: all is as it was."""
    setting = Setting(document)
    block = setting.model.get_submodule("blocks.2")
    block.norm.__class__ = Closed
    said = setting.refused(AttributeError)
    block.norm.__class__ = nn.LayerNorm
    attach = local.attach

    def broken(module: nn.Module, handler: Any) -> None:
        if module is block:
            raise MemfitError("cannot attach")
        attach(module, handler)

    local.attach = broken  # type: ignore[assignment]
    try:
        assert setting.refused(MemfitError) == "cannot attach"
    finally:
        local.attach = attach
    plans.applied(setting.plan, setting.model, setting.optimizer, engine="fsdp2")
    plans.train(_CASE, setting.model, setting.optimizer, setting.plan.loss(plans.loss_of))
    return said


def one_rank_refuses(document: str) -> str:
    """A gradient on the last rank alone: it says so, and the others name it instead of waiting for it."""
    setting = Setting(document)
    if dist.get_rank() == dist.get_world_size() - 1:
        first = next(setting.model.parameters())
        first.grad = torch.zeros_like(first)
    try:
        setting.plan.apply(setting.model, setting.optimizer, engine="fsdp2")
    except MemfitError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("apply did not refuse")


def other_plans(documents: list[str]) -> str:
    """Every rank has a plan of its own."""
    setting = Setting(documents[dist.get_rank()])
    return setting.refused(MemfitError)


def other_engines(document: str) -> str:
    """Every rank chooses an engine of its own."""
    setting = Setting(document)
    setting.engine = ("fsdp2", "sharded")[dist.get_rank()]
    return setting.refused(MemfitError)
