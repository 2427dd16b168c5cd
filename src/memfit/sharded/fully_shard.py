"""`memfit.shard`: make a model run fully sharded over the ranks of a mesh."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from memfit.errors import InputError, StateError
from memfit.sharded.comm import RankMismatch, ShardComm, check_agreement
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_param import FlatShard, Member
from memfit.sharded.fsdp2_options import (
    AnyPrecision,
    Offload,
    PrecisionByUnit,
    ShardPlacementFn,
    check_placements,
    resolve_ignored,
    resolve_offload,
    resolve_precision,
    resolve_unit_options,
    to_policy,
)
from memfit.sharded.gradients import Gradients
from memfit.sharded.inner_models import (
    check_found,
    check_groups,
    check_inner,
    describe_inner,
    inner_names,
    model_parallel_meshes,
    reshard_inner,
    take_in,
)
from memfit.sharded.materialize import Init, check_init, check_source, prepare_buffers, with_values
from memfit.sharded.mesh import device_of, make_comms, make_reshard_comm, resolve_mesh
from memfit.sharded.model_parallel import ModelParallelMeshes, check_distributed, describe
from memfit.sharded.module_hooks import ModuleHooks, use_runtime
from memfit.sharded.module_methods import attach_methods
from memfit.sharded.module_state import attach_state
from memfit.sharded.options import Precision, Reduction, Schedule, UnitOptions
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.streams import Streams
from memfit.sharded.subclass_params import SubclassShard, check_subclass, is_subclass
from memfit.sharded.unit import ShardedUnit
from memfit.sharded.wrap_policy import FoundUnit, Ignored, Units, find_units, join_small_units
from memfit.sharding import group_alike
from memfit.torch_private.autograd import post_accumulate_hooks, tensor_hooks

_RUNTIME = "_memfit_runtime"


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    units: Units | None = None,
    precision: AnyPrecision | PrecisionByUnit | None = None,
    schedule: Schedule | None = None,
    reduction: Reduction | None = None,
    keep: bool | None = None,
    ignored: Iterable[Ignored] = (),
    init: Init | None = None,
    from_rank_0: bool = False,
    offload: bool | OffloadPolicy | None = None,
    timeout: timedelta | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: AnyPrecision | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard a model's parameters, gradients and optimizer state over ranks; it stays the same plain module.

    `mesh` has one dimension, of ranks that shard, or two, of replicas and of ranks that shard within one; by default
    all ranks shard. Parameters that tensor or expert parallel made DTensors are on another part of the same mesh.
    `units` are gathered one at a time, by default the repeated blocks; a list of modules among them is one unit, and
    neighbours that are tiny are joined (`Schedule.bucket_cap_bytes`). What is in none belongs to the root.
    `precision` is for all units, or by unit. `keep` leaves every unit gathered between its forward and backward.
    `ignored` parameters and modules stay whole.
    `init` fills the parameters and buffers that one module holds, where they are on the meta device; its
    `reset_parameters` does by default. `from_rank_0` starts from rank 0's values. `offload` keeps shards, gradients and
    with them the optimizer's state on the host. `mp_policy`, `offload_policy`, `reshard_after_forward` and
    `ignored_params` are `precision`, `offload`, `keep` and `ignored` under the names of `fully_shard`.
    `shard_placement_fn` is `fully_shard`'s: it is checked, and changes nothing, as shards are flat
    (docs/design/sharded.md). Modules inside that were sharded before stay units of theirs.
    """
    schedule, reduction = schedule or Schedule(), reduction or Reduction()
    _check(model)
    inner = [module.__dict__[_RUNTIME] for module in model.modules() if _RUNTIME in module.__dict__]
    reshard_inner(inner)
    if inner and mesh is None:
        mesh = inner[0].mesh
    if inner and timeout is None:
        timeout = inner[0].links[0].timeout
    refusal: InputError | StateError | None = None
    found: list[FoundUnit] = []
    precisions: list[Precision] = []
    on_host, default = Offload(), UnitOptions()
    try:
        _check_parts(model, mesh)
        check_inner(model, inner, units, schedule)
        on_host = resolve_offload(offload, offload_policy)
        default = resolve_unit_options(keep, reshard_after_forward, mesh)
        before = [parameter for each in inner for parameter in each.model.parameters()]  # also what it left whole
        found = find_units(
            model,
            () if inner and units is None else units,
            default=default,
            ignored=[*resolve_ignored(model, ignored, ignored_params), *before],
        )
        check_found(found, inner)
        precisions = resolve_precision(precision, mp_policy, found)
        for member in (member for each in found for member in each.members):
            check_subclass(member.names[0], member.parameter, from_rank_0=from_rank_0)
        found, precisions = join_small_units(found, precisions, schedule.bucket_cap_bytes)
        check_placements(found, shard_placement_fn)
        _check_order(schedule, [path for each in found for path in each.paths], inner_names(model, inner))
        if not from_rank_0:
            check_init(model, init)
        elif dist.get_rank() == (0 if mesh is None else int(mesh.mesh.flatten()[0])):
            check_source(model)
    except (InputError, StateError) as error:  # perhaps of this rank only: the others must not wait for it
        refusal = error
    mesh = resolve_mesh(model, mesh)
    device = device_of(mesh)
    shards, replicas = make_comms(mesh, device, timeout)
    links = [link for link in (shards, replicas) if link is not None]
    meshes = ModelParallelMeshes(mesh, device, timeout)
    meshes.meet(model_parallel_meshes(model))
    try:
        check_groups(model, inner, links)
    except InputError as error:
        refusal = refusal or error
    settings = ["no error" if refusal is None else f"an error: {refusal}"]
    if refusal is None:
        settings += [f"offload={on_host.on}", f"from_rank_0={from_rank_0}", f"init={'given' if init else None}"]
        settings += _agreed_settings(model, found, precisions, schedule, reduction)
        settings += describe_inner(model, inner)
    _agree([*links, *meshes.links], settings)
    if refusal is not None:
        raise refusal
    streams = Streams(device)
    shard_device = torch.device("cpu") if on_host.on else device
    made: list[ShardedUnit] = []
    buffer_dtypes: dict[nn.Module, torch.dtype | None] = {}
    for each, own, inside in zip(found, precisions, _insides(found, [each.model for each in inner]), strict=True):
        buffer_dtypes.update(dict.fromkeys(inside, own.buffer_dtype))
        with with_values(each, inside, device, init, links if from_rank_0 else None) as value:
            flats = [
                SubclassShard(members[0], shards, shard_device, device, streams, mesh, value, to_policy(own))
                if is_subclass(members[0].parameter)
                else FlatShard(
                    members,
                    shards,
                    shard_device,
                    device,
                    streams,
                    mesh,
                    value,
                    [meshes.spec_of(member.parameter) for member in members],
                    dtype=own.shard_dtype,
                    pin_memory=on_host.pin_memory,
                )
                for members in group_alike(each.members, _kind)
            ]
        made.append(
            ShardedUnit(
                names=each.paths,
                modules=each.modules,
                flats=flats,
                gradients=[Gradients(flat, replicas, streams, own, reduction) for flat in flats],
                options=each.options,
                precision=own,
                streams=streams,
                reshard_comm=make_reshard_comm(mesh, each.options.reshard_ranks, device, timeout),
            )
        )
    if replicas is not None and not from_rank_0:
        refusal = _compare_replicas(made, replicas)
        try:
            _agree([shards, *meshes.links], ["no error" if refusal is None else f"an error: {refusal}"])
        except RankMismatch as error:
            raise refusal or error from None
        if refusal is not None:
            raise refusal
    outside = _modules_outside(model, inner)
    taken = take_in(model, inner, shards, replicas, streams, mesh, meshes)
    at = {module: number for number, module in enumerate(model.modules())}
    every = sorted([*made, *taken], key=lambda unit: at[unit.module])
    as_root = made[0].options
    as_inner = as_root if isinstance(units, Mapping) and "" in units else default
    runtime = ShardedRuntime(model, every, [*links, *meshes.links], device, schedule, mesh, (as_root, as_inner))
    if schedule.order is not None:
        by_name = {name: unit for unit in every for name in unit.names}
        runtime.order.expect([unit for unit, _ in itertools.groupby(by_name[name] for name in schedule.order)])
    for unit in made:
        for flat in unit.flats:
            flat.take_over()
        for module in unit.modules:
            ModuleHooks(runtime, unit, module).attach()
    for unit in taken:
        for module in unit.modules:
            use_runtime(module, runtime)
    for each in inner:
        del each.model.__dict__[_RUNTIME], each.model.__dict__["zero_grad"]
    prepare_buffers(outside, device, buffer_dtypes, links if from_rank_0 else None)
    attach_state(made)
    attach_methods(runtime)
    runtime.remember_places()
    model.__dict__[_RUNTIME] = runtime
    model.__dict__["zero_grad"] = _ZeroGrad(runtime)
    return model


class _ZeroGrad:
    """`model.zero_grad`, also after an exception in a backward, which leaves gathered parameters in the modules."""

    def __init__(self, runtime: ShardedRuntime) -> None:
        self._runtime = runtime

    def __call__(self, set_to_none: bool = True) -> None:
        self._runtime.settle()
        nn.Module.zero_grad(self._runtime.model, set_to_none)


def get_runtime(model: nn.Module) -> ShardedRuntime:
    """Return the runtime of a model that was sharded."""
    runtime = model.__dict__.get(_RUNTIME)
    if runtime is None:
        raise StateError(
            "this model is not sharded; call memfit.shard(model) first, and give the model it was called with"
        )
    runtime.settle()
    return runtime


def find_runtime(model: nn.Module) -> ShardedRuntime | None:
    """Return the runtime of a model, or of one inside it, as it is; None where nothing is sharded."""
    return next((module.__dict__[_RUNTIME] for module in model.modules() if _RUNTIME in module.__dict__), None)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"shard takes a model, an nn.Module, not a {type(model).__name__}")
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "there is no process group: start the script with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )


def _check_parts(model: nn.Module, mesh: DeviceMesh | None) -> None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"this model is wrapped in {type(model).__name__}; shard model.module instead")
    if _RUNTIME in model.__dict__:
        raise StateError("this model is sharded already; shard it once, with all its units, or inner modules first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FlatDTensor):  # of a module that was sharded before
            continue
        check_distributed(name, parameter, mesh)
        if tensor_hooks(parameter) or post_accumulate_hooks(parameter):
            raise InputError(
                f"parameter {name!r} has a hook, which its shards would not have; remove it, and call "
                "register_post_accumulate_grad_hook after shard"
            )


def _agree(links: Sequence[ShardComm], settings: Sequence[str]) -> None:
    """Compare settings along every dimension of the mesh, also after they differ in one: the others must learn it."""
    refused: RankMismatch | None = None
    for link in links:
        try:
            check_agreement(link, settings)
        except RankMismatch as error:
            refused = refused or error
            settings = [*settings, f"an error: {error}"]
    if refused is not None:
        raise refused


def _compare_replicas(made: Sequence[ShardedUnit], replicas: ShardComm) -> InputError | None:
    """Return an error where replicas begin with different values: they would stay apart, as gradients are the same."""
    members = [
        (slot.names[0], flat.local(number, flat.shard))
        for unit in made
        for flat in unit.flats
        if type(flat.shard) is torch.Tensor  # a subclass may have no bytes of its own
        for number, slot in enumerate(flat.layout.slots)
    ]
    if not members:
        return None
    checksums = torch.stack([own.view(torch.uint8).sum(dtype=torch.int64) for _, own in members]).tolist()
    told = replicas.tell(struct.pack(f"<{len(checksums)}q", *checksums), "comparison of the first values of replicas")
    for rank, each in enumerate(told):
        if each != told[0]:
            pairs = zip(members, struct.iter_unpack("<q", told[0]), struct.iter_unpack("<q", each), strict=True)
            name = next(name for (name, _), first, other in pairs if first != other)
            return InputError(
                f"rank {replicas.global_rank(0)} and rank {replicas.global_rank(rank)} are replicas, and begin with "
                f"different values of {name!r}; call torch.manual_seed with one number on all ranks before the model "
                "is built, or give from_rank_0=True"
            )
    return None


def _kind(member: Member) -> tuple[object, bool]:
    alone = is_subclass(member.parameter)  # each has a layout of its own
    return member.names if alone else member.parameter.dtype, member.parameter.requires_grad


def _modules_outside(model: nn.Module, inner: Sequence[ShardedRuntime]) -> list[nn.Module]:
    """Return the modules that are in no model which was sharded in a call of its own."""
    inside = {module for each in inner for module in each.model.modules()}
    return [module for module in model.modules() if module not in inside]


def _insides(found: Sequence[FoundUnit], inner: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return, for every unit, the modules that are in no unit inside it, and in no model sharded before."""
    units = {*inner, *(module for each in found for module in each.modules)}
    insides: list[list[nn.Module]] = []
    for each in found:
        inside = list(each.modules)
        for module in inside:
            inside += [child for child in module.children() if child not in units and child not in inside]
        insides.append(inside)
    return insides


def _check_order(schedule: Schedule, found: Sequence[str], before: Sequence[str]) -> None:
    unknown = [name for name in schedule.order or () if name not in found and name not in before]
    if unknown:
        known = ", ".join(map(repr, (*found, *before)))
        raise InputError(f"order names {unknown[0]!r}, which is no unit; the units are {known}")


def _agreed_settings(
    model: nn.Module,
    found: Sequence[FoundUnit],
    precisions: Sequence[Precision],
    schedule: Schedule,
    reduction: Reduction,
) -> list[str]:
    """List what must be the same on every rank, one a line."""
    hook = reduction.hook  # shown with its address, which no two ranks have in common
    named = "None" if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)
    settings = [
        f"{field.name}={named if field.name == 'hook' else getattr(options, field.name)} in {type(options).__name__}"
        for options in (precisions[0], schedule, reduction)
        for field in fields(options)
    ]
    for unit, precision in zip(found, precisions, strict=True):
        settings.append(f"unit {', '.join(map(repr, unit.paths))} with {unit.options}")
        if precision != precisions[0]:
            settings.append(f"unit {unit.name!r} with {precision}")
        for member in unit.members:
            parameter = member.parameter
            settings.append(
                f"{member.names[0]!r} of shape {tuple(parameter.shape)}, {parameter.dtype}, "
                f"{'trained' if parameter.requires_grad else 'frozen'}, in {unit.name or 'the root'!r}"
                f"{describe(parameter)}" + (f", a {type(parameter).__name__}" if is_subclass(parameter) else "")
            )
    settings += [
        f"buffer {name!r} of shape {tuple(buffer.shape)}, {buffer.dtype}" for name, buffer in model.named_buffers()
    ]
    return settings


# -- Passes whose gradients are not sent ------------------------------------------------------------------------------


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep unreduced gradients inside the block; the first backward after it reduces them all.

    It saves communication and takes the memory of whole gradients. Without it every pass adds to the gradients of the
    shards, which takes no more memory than one pass does. As with FSDP2 `p.grad`, the gradient of the shard, has
    nothing of these passes until then: `unreduced_gradients(model)` shows what is kept.
    """
    runtime = get_runtime(model)
    before, runtime.communicates = runtime.communicates, False
    try:
        yield
    finally:
        runtime.communicates = before


def unreduced_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the gradients that passes inside of `no_sync` left, by names: whole, and of this rank alone.

    They are not averaged over ranks, and in the dtype in which they are going to be summed. Nothing is sent.
    """
    return {
        gradients.flat.layout.slots[number].names[0]: found
        for unit in get_runtime(model).units
        for gradients in unit.gradients
        for number in range(len(gradients.flat.parameters))
        if (found := gradients.unreduced(number)) is not None
    }
