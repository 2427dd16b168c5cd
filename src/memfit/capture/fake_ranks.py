"""Ranks that are not there: a process group of any size for the time of a capture, and models built on it.

The group is PyTorch's own fake one: collectives return at once. It is made for one capture and destroyed after it, also
when the capture fails; a process that has a process group of its own is refused, because there is only one default
group, and what runs on it must not see another.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from memfit.capture.environment import cuda_present
from memfit.capture.wrapped_models import wrapping
from memfit.errors import InputError
from memfit.hardware import Device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Mesh = Mapping[str, int] | int
"""The ranks of a step that is captured as it is: sizes by name, outermost first, or the size of the only dimension."""

RankLike = Mapping[str, int] | int
"""One rank of a mesh: its number, or its place in dimensions by name, the first in those that are not named."""


def resolve_mesh(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of a mesh by name; a number is that of data parallel ranks."""
    sizes = {"dp": mesh} if isinstance(mesh, int) else dict(mesh) if isinstance(mesh, Mapping) else None
    if not sizes:
        raise InputError(f"mesh is {mesh!r}; give the ranks of each dimension by name, as in mesh={{'dp': 8}}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1 or not isinstance(name, str):
            raise InputError(f"the mesh has {size!r} ranks in {name!r}; give whole numbers of at least 1, by name")
    return {name: int(size) for name, size in sizes.items()}


def resolve_rank(rank: RankLike | None, sizes: Mapping[str, int]) -> int:
    """Return the number of a rank of a mesh, which may be given by its place in some dimensions; the first without."""
    ranks = math.prod(sizes.values())
    if rank is None:
        return 0
    if isinstance(rank, Mapping):
        for name, place in rank.items():
            if name not in sizes:
                raise InputError(f"rank names {name!r}, and the mesh has {', '.join(sizes)}")
            if not _is_count(place) or not 0 <= place < sizes[name]:
                raise InputError(f"rank is {place!r} in {name!r}, which has {sizes[name]} ranks, numbered from 0")
        number = 0
        for name, size in sizes.items():  # the last dimension is the innermost
            number = number * size + int(rank.get(name, 0))
        return number
    if not _is_count(rank) or not 0 <= rank < ranks:
        raise InputError(
            f"rank is {rank!r}, and the mesh has {ranks} ranks, numbered from 0; give a number, or the place in a "
            f"dimension, as in rank={{{next(iter(sizes))!r}: 1}}"
        )
    return int(rank)


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def takes_mesh(factory: Any) -> bool:
    """Return whether a model factory asks for the mesh."""
    try:
        return "mesh" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def fake_ranks(sizes: Mapping[str, int], device: Device, rank: int = 0) -> Iterator[DeviceMesh]:
    """Make this process a rank of a mesh that is not there, and give the mesh; all of it is undone after."""
    if not dist.is_available():
        raise InputError("this build of torch has no torch.distributed: a step on several ranks cannot be captured")
    if dist.is_initialized():
        raise InputError(
            "this process has a process group, and a step on several ranks is captured on one that memfit makes; "
            "capture before init_process_group, or in a process of its own"
        )
    from torch.distributed.device_mesh import init_device_mesh

    from memfit.torch_private.distributed import fake_group

    with fake_group(math.prod(sizes.values()), rank):
        kind = "cuda" if device.type == "cuda" else "cpu"
        with building(device):
            mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        yield mesh


@contextlib.contextmanager
def building(device: Device) -> Iterator[None]:
    """Let a model be built and wrapped as on the target: it is asked for its GPU, and tensors there are on meta."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(cuda_present(device, lambda _: None))
        stack.enter_context(wrapping(device))
        stack.enter_context(_OnMeta(device.type))
        yield


class _OnMeta(TorchFunctionMode):
    """Makes and keeps tensors on meta that are asked for on the target's device."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.device and self._device_type == "cuda" and len(args) == 1 and isinstance(args[0], int):
            return torch.device("cuda", args[0])  # a number alone is the accelerator's, and here may be none
        of_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if kwargs.get("device") is not None and (of_meta or torch.device(kwargs["device"]).type == "cuda"):
            kwargs["device"] = _META  # `Module.to_empty` asks for tensors like those on meta
        if of_meta and name in ("cuda", "cpu"):
            return args[0]
        if of_meta and name == "to" and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], _META, *args[2:])
        return func(*args, **kwargs)


_META = torch.device("meta")
