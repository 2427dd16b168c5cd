"""DTensor and AsyncCollectiveTensor, told by their classes: whoever has one has imported what it is in, which is slow.

`DTensor._local_tensor` and `_spec` (torch/distributed/tensor/_api.py): the part of this rank, and how the whole is
sharded. `AsyncCollectiveTensor.elem` and `completed` (torch/distributed/_functional_collectives.py): the result of a
collective, and whether it was waited for. Where they are gone, plans on tensor parallel models end with an
AttributeError in the first planned forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memfit.torch_private.dispatch import DisableTorchDispatch

_WAITS = ("wait_tensor", "_wrap_tensor_autograd")


@functools.cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.distributed"))


def is_dtensor(tensor: Any) -> bool:
    """Return whether a value is a DTensor, also one of memfit's runtime."""
    return "DTensor" in _names(type(tensor))


def is_local_dtensor(tensor: Any) -> bool:
    """Return whether a DTensor is one of memfit's own runtime (`LocalDTensor` in `dtensor.py`)."""
    return any(kind.__name__ == "LocalDTensor" for kind in type(tensor).__mro__)


def is_distributed(kind: type) -> bool:
    """Return whether tensors of a class are around the part of this rank."""
    return not _names(kind).isdisjoint(("DTensor", "AsyncCollectiveTensor"))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor; any that is not distributed as it is."""
    while type(tensor) is not torch.Tensor and is_distributed(type(tensor)):
        tensor = tensor._local_tensor if is_dtensor(tensor) else tensor.elem  # type: ignore[attr-defined]
    return tensor


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor distributed like another one, of which this rank holds `local`."""
    return wrapping_like(tensor)(local)


def has_arrived(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its values: false for the result of a collective that nobody has waited for."""
    while type(tensor) is not torch.Tensor and is_distributed(type(tensor)):
        if not is_dtensor(tensor) and not tensor.completed:  # type: ignore[attr-defined]
            return False
        tensor = tensor._local_tensor if is_dtensor(tensor) else tensor.elem  # type: ignore[attr-defined]
    return True


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor around the same part, cut off from its graph by ops that no mode sees."""
    if not is_distributed(type(tensor)):
        guard = DisableTorchDispatch()
        try:
            return tensor.detach() if tensor.requires_grad else tensor
        finally:
            del guard
    if is_dtensor(tensor):
        local = without_graph(tensor._local_tensor)  # type: ignore[attr-defined]
        return type(tensor)(local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined, call-arg]
    found = type(tensor)(without_graph(tensor.elem))  # type: ignore[attr-defined]
    found.completed = tensor.completed  # type: ignore[attr-defined]
    return found


def wrapping_like(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes a tensor of this kind from the part of this rank, without holding the tensor."""
    if not is_dtensor(tensor):
        return lambda local: local
    kind, spec = type(tensor), tensor._spec  # type: ignore[attr-defined]
    return lambda local: kind(local, spec, requires_grad=False)  # type: ignore[call-arg]


def layout_of(tensor: torch.Tensor) -> Any:
    """Return how a distributed tensor is divided between ranks, None for any other."""
    if type(tensor) is torch.Tensor or not is_distributed(type(tensor)):
        return None
    return tensor._spec if is_dtensor(tensor) else "collective"  # type: ignore[attr-defined]


def only_waits(func: Any) -> bool:
    """Return whether an op waits for the result of a collective, or makes a tensor that will.

    `wait_tensor` and `_wrap_tensor_autograd` of the namespace `_c10d_functional` (torch/csrc/distributed/c10d/
    Functional.cpp, torch/distributed/_functional_collectives.py), which give back what they are given.
    """
    return func.namespace == "_c10d_functional" and func._overloadpacket.__name__ in _WAITS


def is_begun(func: Any) -> bool:
    """Return whether an op begins a collective that is waited for by another op, `wait_tensor`."""
    return func.namespace == "_c10d_functional" and not only_waits(func)


def wait_for(tensor: torch.Tensor) -> None:
    """Wait for the result of a collective."""
    torch.ops._c10d_functional.wait_tensor(tensor)
