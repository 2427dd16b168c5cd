"""The options of `fully_shard`, under its names and with its meaning, beside memfit's own.

`memfit.shard(model, mp_policy=..., offload_policy=..., reshard_after_forward=..., ignored_params=...)` can stand where
`fully_shard(model, ...)` stood. Where both names of one thing are given, they must say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from memfit.errors import InputError
from memfit.sharded.options import Precision, UnitOptions
from memfit.sharded.wrap_policy import FoundUnit, Ignored

AnyPrecision = Precision | MixedPrecisionPolicy
PrecisionByUnit = Mapping[str | type[nn.Module], AnyPrecision]
"""Precision of units by their path or the class of their module; the empty path is for all that are not named."""

ShardPlacementFn = Callable[[nn.Parameter], Any]
"""Gives `Shard(dim)` for a parameter, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Whether shards are kept on the host, and there in pinned memory where the device can copy from it faster."""

    on: bool = False
    pin_memory: bool = True


def to_precision(given: AnyPrecision, name: str = "precision") -> Precision:
    """Return memfit's own form of a mixed precision policy."""
    if isinstance(given, Precision):
        return given
    if not isinstance(given, MixedPrecisionPolicy):
        raise InputError(
            f"{name} is a {type(given).__name__}; give a memfit.sharded.Precision or a "
            "torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    return Precision(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype or given.param_dtype,  # without one FSDP2 sums in the dtype of compute
        output_dtype=given.output_dtype,
        cast_inputs="units" if given.cast_forward_inputs else "none",
        cast_outputs="units",
    )


def to_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return what extension points of parameters are told of a precision."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        output_dtype=precision.output_dtype,
        cast_forward_inputs=precision.cast_inputs != "none",
    )


def resolve_precision(
    precision: AnyPrecision | PrecisionByUnit | None, mp_policy: AnyPrecision | None, found: Sequence[FoundUnit]
) -> list[Precision]:
    """Return the precision of every unit that was found."""
    if mp_policy is not None:
        wanted = to_precision(mp_policy, "mp_policy")
        if precision is not None and (isinstance(precision, Mapping) or to_precision(precision) != wanted):
            raise InputError(f"precision is {precision}, and mp_policy {mp_policy}; give one of them")
        precision = wanted
    if not isinstance(precision, Mapping):
        return [Precision() if precision is None else to_precision(precision)] * len(found)
    by_unit = {key: to_precision(each, f"precision of {key!r}") for key, each in precision.items()}
    for key in by_unit:
        if key and not any(_names(key, each) for each in found):
            shown = repr(key) if isinstance(key, str) else key.__name__
            raise InputError(
                f"precision names {shown}, which is no unit; make it one with units=, since parameters that are "
                f"gathered together have one precision. The units are {', '.join(repr(each.name) for each in found)}"
            )
    rest = by_unit.get("", Precision())
    return [
        next((by_unit[key] for key in sorted(by_unit, key=_is_class) if key and _names(key, each)), rest)
        for each in found
    ]


def _is_class(key: str | type[nn.Module]) -> bool:
    return isinstance(key, type)


def _names(key: str | type[nn.Module], found: FoundUnit) -> bool:
    return key in found.paths if isinstance(key, str) else all(isinstance(module, key) for module in found.modules)


def resolve_unit_options(
    keep: bool | None, reshard_after_forward: bool | int | None, mesh: DeviceMesh | None
) -> UnitOptions:
    """Return what units do after their forward where nothing else is said of them.

    As with FSDP2 a number is that of the ranks which keep a part each: 1 keeps everything, all ranks nothing.
    """
    if reshard_after_forward is None:
        return UnitOptions(keep=bool(keep))
    if not isinstance(reshard_after_forward, int):
        raise InputError(f"reshard_after_forward is {reshard_after_forward!r}; give True, False or a number of ranks")
    ranks = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    if isinstance(reshard_after_forward, bool):
        options = UnitOptions(keep=not reshard_after_forward)
    elif reshard_after_forward < 1 or ranks % reshard_after_forward:
        raise InputError(f"reshard_after_forward is {reshard_after_forward}; give a divisor of the {ranks} ranks")
    elif reshard_after_forward in (1, ranks):
        options = UnitOptions(keep=reshard_after_forward == 1)
    else:
        options = UnitOptions(reshard_ranks=reshard_after_forward)
    if keep is not None and keep != options.keep:
        raise InputError(f"keep is {keep}, and reshard_after_forward {reshard_after_forward}; give one of them")
    return options


def resolve_offload(offload: bool | OffloadPolicy | None, offload_policy: OffloadPolicy | None) -> Offload:
    """Return where shards are kept."""
    given = [_to_offload(each, name) for each, name in ((offload, "offload"), (offload_policy, "offload_policy"))]
    found = [each for each in given if each is not None]
    if len(found) == 2 and found[0].on != found[1].on:
        raise InputError(f"offload is {offload}, and offload_policy {offload_policy}; give one of them")
    return found[-1] if found else Offload()


def _to_offload(given: bool | OffloadPolicy | None, name: str) -> Offload | None:
    if given is None:
        return None
    if isinstance(given, bool):
        return Offload(on=given)
    if isinstance(given, CPUOffloadPolicy):
        return Offload(on=True, pin_memory=given.pin_memory)
    if type(given) is OffloadPolicy:
        return Offload()
    raise InputError(f"{name} is {given!r}; give True, False, or a CPUOffloadPolicy of torch.distributed.fsdp")


def resolve_ignored(
    model: nn.Module, ignored: Iterable[Ignored], ignored_params: Iterable[nn.Parameter] | None
) -> list[Ignored]:
    """Return all that stays whole on every rank; each name only adds to the other.

    As with FSDP2 one set of `ignored_params` may be given to the calls for several parts of a model.
    """
    own = set(model.parameters())
    return [*ignored, *(each for each in ignored_params or () if not isinstance(each, nn.Parameter) or each in own)]


def check_placements(found: Iterable[FoundUnit], choose: ShardPlacementFn | None) -> None:
    """Refuse answers of `shard_placement_fn` that name no dimension of the parameter, or something else.

    FSDP2 gives ranks rows, or with this function columns, say. Here a rank has a range of flattened elements, whatever
    was asked for: the step, the optimizer's result, whole values and what `torch.distributed.checkpoint` saves are the
    same for any of them (docs/design/sharded.md).
    """
    if choose is None:
        return
    for member in (member for unit in found for member in unit.members):
        answer, name = choose(member.parameter), member.names[0]
        if answer is None:
            continue
        if type(answer) is not Shard:
            raise InputError(
                f"shard_placement_fn gives {answer!r} for {name!r}; give Shard(dim) or None. A parameter that is to "
                "be on another mesh than that of this call must be a DTensor there before, as expert parallel makes it"
            )
        if not -member.parameter.dim() <= answer.dim < member.parameter.dim():
            raise InputError(
                f"shard_placement_fn gives {answer!r} for {name!r}, which has {member.parameter.dim()} dimensions"
            )
