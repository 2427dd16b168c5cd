"""The values that a model starts from: its own, rank 0's, or new ones for what is on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memfit.errors import InputError
from memfit.sharded.comm import ShardComm
from memfit.sharded.flat_param import Member
from memfit.sharded.wrap_policy import FoundUnit
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.modules import buffer_table, parameter_table

Init = Callable[[nn.Module], object]
"""Gives the parameters and buffers that a module itself holds their values, as `reset_parameters` does."""


@contextmanager
def with_values(
    found: FoundUnit,
    inside: Sequence[nn.Module],
    device: torch.device,
    init: Init | None,
    links: Sequence[ShardComm] | None,
) -> Iterator[Callable[[Member], torch.Tensor]]:
    """Yield a function to a unit's whole parameter values; what is on meta is materialized and freed again.

    `inside` are the modules of the unit that are in no unit inside it. With `links`, rank 0's values are used.
    """
    if links is not None:
        yield lambda member: _from_rank_0(member.parameter.detach(), device, links)
        return
    made: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for member in found.members:
            if member.parameter.is_meta:
                made[member.parameter] = nn.Parameter(torch.empty_like(member.parameter, device=device))
                for place in member.places:
                    place.put(made[member.parameter])
        holding = {place.module for member in found.members if member.parameter in made for place in member.places}
        for module in inside:
            holding |= {module} if _buffers_made(module, device) else set()
        for module in (each for each in inside if each in holding):
            _initialise(module, init)
        yield lambda member: made.get(member.parameter, member.parameter).detach()
    finally:
        for member in found.members:
            if member.parameter in made:
                for place in member.places:
                    place.put(member.parameter)


def check_source(model: nn.Module) -> None:
    """Refuse to give other ranks the values of a model that has none."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InputError(
                f"from_rank_0 takes rank 0's values, and {name!r} is on the meta device there; build the model with "
                "values on rank 0, or leave from_rank_0 out and give init="
            )


def check_init(model: nn.Module, init: Init | None) -> None:
    """Refuse a model on meta that has modules nobody can give values."""
    if init is not None:
        return
    for path, module in model.named_modules():
        held = [*parameter_table(module).values(), *buffer_table(module).values()]
        if any(each is not None and each.is_meta for each in held) and not hasattr(module, "reset_parameters"):
            raise InputError(
                f"module {path!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(); give "
                "init=, a function that fills the parameters and buffers of one module, or from_rank_0=True with a "
                "whole model on rank 0"
            )


def prepare_buffers(
    modules: Iterable[nn.Module],
    device: torch.device,
    dtypes: Mapping[nn.Module, torch.dtype | None],
    links: Sequence[ShardComm] | None,
) -> None:
    """Move buffers to the device, in the dtype of their module; with `links`, give them rank 0's values."""
    for module in modules:
        dtype = dtypes.get(module)
        for name, buffer in buffer_table(module).items():
            if buffer is None:
                continue
            moved = buffer if links is None else _from_rank_0(buffer, device, links)
            if isinstance(buffer, DTensor) and links is not None:  # of tensor parallel: it stays what it is
                moved = DTensor.from_local(
                    moved,
                    buffer.device_mesh,
                    buffer.placements,
                    run_check=False,
                    shape=buffer.shape,
                    stride=buffer.stride(),
                )
            buffer_table(module)[name] = moved.to(device=device, dtype=dtype if buffer.is_floating_point() else None)


def _from_rank_0(tensor: torch.Tensor, device: torch.device, links: Sequence[ShardComm]) -> torch.Tensor:
    """Broadcast rank 0's values: along replicas first, then along the ranks of each."""
    tensor = local_tensor(tensor)
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device, copy=True).contiguous()
    for link in reversed(links):
        link.broadcast(values, "broadcast of rank 0's values").wait()
    return values


def _initialise(module: nn.Module, init: Init | None) -> None:
    with torch.no_grad():
        if init is not None:
            init(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


def _buffers_made(module: nn.Module, device: torch.device) -> bool:
    """Materialize buffers on meta; return whether there were any."""
    found = False
    for name, buffer in buffer_table(module).items():
        if buffer is not None and buffer.is_meta:
            buffer_table(module)[name] = torch.empty_like(buffer, device=device)
            found = True
    return found
