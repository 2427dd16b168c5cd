"""A plan on PyTorch's FSDP2: `fully_shard` on the plan's units, and the way back to whole parameters.

Note [New parameters]: `fully_shard` puts a DTensor in the place of every parameter. The old parameters are kept, empty,
and get their values back when the plan is removed: whoever holds one then holds the model's parameter again. Until all
of the model is sharded and the policies are attached, they keep their values, so that what fails on the way leaves the
model and its optimizers as they were; meanwhile a rank holds the whole model and its shards.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memfit.capture import is_container
from memfit.engines.optimizer_shards import (
    OptimizerBefore,
    check_optimizer,
    shard_optimizer,
    unshard,
    unshard_optimizer,
)
from memfit.engines.optimizer_watch import OptimizerWatch
from memfit.errors import InputError, MemfitError, StateError
from memfit.plans import Plan, ShardPlan
from memfit.sharded import check_agreement, device_of, make_comms, resolve_mesh
from memfit.torch_private.fully_shard import forget_original, gradient_hooks, undo_fully_shard
from memfit.torch_private.modules import parameter_table

_OWN_PREFETCH = 1
"""Units that FSDP2 gathers ahead by itself: the next all-gather of a backward, and in a forward what its streams let
overlap. Plans for FSDP2 predict just that."""


def shard_with_fsdp2(
    plan: Plan,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh | None,
    refusal: MemfitError | None = None,
) -> Fsdp2Sharding:
    """Shard a model with `fully_shard` as planned, and the optimizers' state with it.

    Ranks compare what they were given before anything is changed; a rank that refuses, or has refused
    (`refusal`), says so to the others. The caller ends it with `commit`, or with `rollback`.
    """
    assert plan.shard is not None
    mesh = resolve_mesh(model, mesh, replicas=plan.shard.replicas)
    try:
        _check(plan, model, optimizers, mesh)
    except MemfitError as error:
        refusal = refusal or error
    try:
        _compare_ranks(plan, optimizers, mesh, refusal)
    except MemfitError:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    sharding = Fsdp2Sharding(model)
    try:
        _fully_shard(plan, model, mesh)
        sharding.shard_optimizers(optimizers)
    except BaseException:
        sharding.rollback()
        raise
    return sharding


class Fsdp2Sharding:
    """A model that `fully_shard` holds because of a plan: the parameters and optimizers that it had before.

    Modules and optimizers are held weakly; the model's own attributes lead here.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._slots: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]] = []
        for module in model.modules():
            found = ((name, each) for name, each in parameter_table(module).items() if each is not None)
            self._slots += [(weakref.ref(module), name, each) for name, each in found]
        self._before: list[OptimizerBefore] = []
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._optimizers: OptimizerWatch | None = None

    def shard_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the optimizers step the shards, each with its own state and settings."""
        sharded: dict[torch.Tensor, nn.Parameter] = {}
        for module, name, original in self._found():
            here = parameter_table(module)[name]
            assert isinstance(here, DTensor)
            sharded[original] = here
        for optimizer in optimizers:
            before = shard_optimizer(optimizer, sharded)
            if before is not None:
                self._before.append(before)

    def commit(self) -> None:
        """Free the whole parameters, and watch for optimizers that are made later."""
        self._stepped.update(before.optimizer for before in self._before)
        self._before = []
        for _, _, original in self._slots:
            original.data = original.data.new_empty(0)
        stepped = weakref.ref(self._stepped)

        def note(optimizer: torch.optim.Optimizer) -> None:
            here = stepped()
            if here is not None:
                here.add(optimizer)

        self._optimizers = OptimizerWatch(note, self)

    def rollback(self) -> None:
        """Restore model and optimizers to what they were; nothing is sent, because no value is gone yet."""
        for before in self._before:
            before.restore()
        self._undo_modules()
        for module, name, original in self._found():
            parameter_table(module)[name] = original

    def restore_parameters(self) -> None:
        """Gather every parameter, and put the old ones in their place with the values of now; on every rank.

        Gradients come along, and so does the state of the optimizers that were given or have stepped since.
        """
        if not dist.is_initialized():
            raise StateError(
                "the process group is gone, and the parameters are sharded over its ranks: call plan.remove(model) on "
                "every rank before torch.distributed.destroy_process_group()"
            )
        for reference in self._modules:
            module = reference()
            if isinstance(module, FSDPModule):
                module.reshard()  # the root's are whole after a forward without a backward
        whole: dict[torch.Tensor, nn.Parameter] = {}
        with torch.no_grad():
            for module, name, original in self._found():
                here = parameter_table(module).get(name)
                if not isinstance(here, DTensor):
                    continue  # replaced by the user
                if here not in whole:
                    original.data = unshard(here)
                    original.requires_grad_(here.requires_grad)
                    original.grad = None if here.grad is None else unshard(here.grad)
                    whole[here] = original
                parameter_table(module)[name] = whole[here]
            for optimizer in self._in_order(whole):
                unshard_optimizer(optimizer, whole)
        self._undo_modules()
        if self._optimizers is not None:
            self._optimizers.remove()

    def _in_order(self, whole: dict[torch.Tensor, nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return the optimizers of these parameters, in an order that is the same on every rank."""
        places = {parameter: place for place, parameter in enumerate(whole)}
        found: list[tuple[list[int], torch.optim.Optimizer]] = []
        for optimizer in self._stepped:
            stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
            own = [places[parameter] for parameter in stepped if parameter in places]
            if own:
                found.append((own, optimizer))
        return [optimizer for _, optimizer in sorted(found, key=lambda each: each[0])]

    def _undo_modules(self) -> None:
        for reference in self._modules:
            module = reference()
            if module is not None:
                undo_fully_shard(module)
        for _, _, original in self._slots:
            forget_original(original)

    def _found(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for reference, name, original in self._slots:
            module = reference()
            if module is not None:
                yield module, name, original


def _compare_ranks(
    plan: Plan, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh, refusal: Exception | None
) -> None:
    """Raise on every rank where one has another plan, another state of its optimizers, or refuses."""
    content = hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    settings = [f"a plan for {plan.fingerprint[:12]} with content {content} on engine fsdp2"]
    for optimizer in optimizers:
        settings.append(f"{type(optimizer).__name__} with the state of {len(optimizer.state)} parameters")
    if refusal is not None:
        settings.append(f"a refusal ({refusal})".replace("\n", " "))
    for comm in make_comms(mesh, device_of(mesh), None):
        if comm is not None:
            check_agreement(comm, settings)


# -- What fully_shard is given, and what it would refuse midway -------------------------------------------------------


def _fully_shard(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Call `fully_shard` on the units, inner ones first and the model itself last."""
    shard = plan.shard
    assert shard is not None
    policy, offload = _precision(plan, shard), OffloadPolicy()
    if shard.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for unit in sorted(shard.units, key=lambda each: each.module.count(".") + bool(each.module), reverse=True):
        module = model.get_submodule(unit.module)
        reshards = unit.reshard_after_forward
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, offload_policy=offload)
    _set_prefetch([cast(FSDPModule, model.get_submodule(unit.module)) for unit in shard.units], shard.prefetch)


def _precision(plan: Plan, shard: ShardPlan) -> MixedPrecisionPolicy:
    """Return the plan's dtypes; under autocast inputs stay as they are, because the ops cast them."""
    return MixedPrecisionPolicy(
        param_dtype=None if shard.param_dtype is None else getattr(torch, shard.param_dtype),
        reduce_dtype=None if shard.reduce_dtype is None else getattr(torch, shard.reduce_dtype),
        cast_forward_inputs=plan.trace.autocast is None,
    )


def _set_prefetch(units: Sequence[FSDPModule], count: int) -> None:
    """Gather as many units ahead as planned, where that is not what FSDP2 does by itself.

    `units` are in the order of the plan, the root first. A unit that is to prefetch itself prefetches nothing: it is
    unsharded by then.
    """
    if count == _OWN_PREFETCH:
        return
    for place, unit in enumerate(units):
        following = units[place + 1 : place + 1 + count]
        before = units[max(1, place - count) : place] if place else units[max(1, len(units) - count) :]
        if count and following:
            unit.set_modules_to_forward_prefetch(cast(Any, list(following)))
        unit.set_modules_to_backward_prefetch(cast(Any, list(reversed(before)) if count and before else [unit]))


def _check(plan: Plan, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh) -> None:
    """Refuse what `fully_shard` or the optimizers could not go on with; nothing has been changed yet."""
    assert plan.shard is not None
    if is_container(model):
        raise InputError(
            "fully_shard takes a model that is called, and this is a container of several; write engine='sharded', or "
            "call fully_shard on each of them and apply the plan afterwards"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise InputError("FSDP2 wants names for a mesh of two dimensions: init_device_mesh(..., mesh_dim_names=(...))")
    modules = dict(model.named_modules(remove_duplicate=False))
    for unit in plan.shard.units:
        module = modules.get(unit.module)
        if module is None:
            raise InputError(f"the plan shards {unit.module!r}, which is not in the model; plan the step again")
        if is_container(module):
            raise InputError(
                f"unit {unit.module!r} is a {type(module).__name__}, which is never called: fully_shard needs modules "
                "that are; plan with ShardOptions(units=...) of those in it"
            )
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        _check_parameter(name, parameter, plan.shard)
    _check_tied(model, [unit.module for unit in plan.shard.units])
    for optimizer in optimizers:
        check_optimizer(optimizer, names)


def _check_parameter(name: str, parameter: nn.Parameter, shard: ShardPlan) -> None:
    wanted = None if shard.shard_dtype is None else getattr(torch, shard.shard_dtype)
    if wanted is not None and parameter.is_floating_point() and parameter.dtype != wanted:
        raise InputError(
            f"the plan keeps shards in {shard.shard_dtype}, and {name!r} is {parameter.dtype}; call "
            f"model.to(torch.{shard.shard_dtype}) before apply"
        )
    if parameter.ndim == 0:
        raise InputError(f"FSDP2 shards rows, and parameter {name!r} is one number; make it a tensor of shape (1,)")
    if not parameter.is_contiguous():
        raise InputError(
            f"parameter {name!r} is not contiguous, which FSDP2 refuses; write {name}.data = {name}.data.contiguous()"
        )
    if parameter.grad is not None:
        raise InputError(
            f"parameter {name!r} has a gradient, which is this rank's own and not reduced: call "
            "optimizer.zero_grad(set_to_none=True) before apply"
        )
    if gradient_hooks(parameter):
        raise InputError(
            f"parameter {name!r} has hooks, and fully_shard puts another parameter in its place: register them after "
            "apply, or write engine='sharded'"
        )


def _check_tied(model: nn.Module, units: Sequence[str]) -> None:
    """Refuse a parameter that modules of two units hold: FSDP2 would shard it twice, and raise in the first forward."""
    homes: dict[nn.Parameter, tuple[str, str]] = {}
    modules = {model.get_submodule(path): path for path in units}

    def visit(module: nn.Module, path: str, home: str) -> None:
        home = modules.get(module, home)
        for name, parameter in parameter_table(module).items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            other, known = homes.setdefault(parameter, (full, home))
            if known != home:
                raise InputError(
                    f"parameter {full!r} is also {other!r}, and the plan shards them in two units "
                    f"({home or 'the model itself'} and {known or 'the model itself'}), which FSDP2 cannot: write "
                    "engine='sharded', or plan with ShardOptions(units=...) that hold both"
                )
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, home)

    visit(model, "", "")
