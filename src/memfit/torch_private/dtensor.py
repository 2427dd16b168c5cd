"""DTensors with a local tensor of another kind than PyTorch's placements have.

Imported by the sharded runtime, not before: `torch.distributed.tensor` takes a second to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_utils

__all__ = ["DTensorSpec", "LocalDTensor"]

# DTensorSpec (torch/distributed/tensor/_dtensor_spec.py) is what a DTensor says of itself: mesh, placements, shape.


class LocalDTensor(DTensor):
    """A DTensor that is made from its local tensor and its spec, and runs ops by its own `__torch_dispatch__`.

    `local` is `DTensor._local_tensor` (torch/distributed/tensor/_api.py), a slot that C++ sets.
    """

    local: torch.Tensor = DTensor.__dict__["_local_tensor"]
    _spec: DTensorSpec

    def __init__(self, *_: Any, **__: Any) -> None:  # DTensor's own only tells Dynamo, at some microseconds each
        pass


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a contiguous DTensor."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(size, stride, dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of PyTorch's own around a local tensor, without a view or a collective.

    `DTensor.from_local` makes a view of the local tensor; `DTensor.__new__` (torch/distributed/tensor/_api.py) takes it
    as it is, as FSDP2 does for parameters under tensor parallel.
    """
    return DTensor(local, spec, requires_grad=False)  # pyrefly: ignore


def find_block(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of this rank's block of a DTensor.

    `compute_local_shape_and_global_offset` (torch/distributed/tensor/_utils.py), which torch.distributed.checkpoint
    uses for the same.
    """
    block, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))
    return tuple(block), tuple(offset)


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the dimensions of several parts of one mesh.

    `DeviceMesh._concatenate` (torch/distributed/device_mesh.py), as FSDP2 uses it; raises a RuntimeError where the
    parts have no mesh in common or overlap. Without it, models with DTensor parameters end with an AttributeError.
    """
    return DeviceMesh._concatenate(list(meshes))


def support_foreach(kind: type[torch.Tensor]) -> None:
    """Let optimizers and `torch.nn.utils` use `torch._foreach_*` for a subclass, as DTensor does for itself.

    Both lists are `_foreach_supported_types` (torch/optim/optimizer.py, torch/utils/_foreach_utils.py); a subclass that
    is not in them is stepped one parameter at a time.
    """
    for kinds in (_of_optimizers, _of_utils):
        if kind not in kinds:
            kinds.append(kind)  # type: ignore[arg-type]
