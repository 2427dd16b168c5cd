"""Models that build themselves on a mesh: `fully_shard` over `dp`, `parallelize_module` over `tp`.

A model without a mesh is the plain one. On a mesh it is wrapped as torchtitan wraps its own: decoder layers and the
whole are units of FSDP2, which gathers in the dtype of the compute and reduces in float32; over `tp` the styles of
`tensor_parallel.py`. A shape that cannot be is refused with what stands in its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.paths import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from memfit.capture import Step

TensorParallel = Callable[[Any, "DeviceMesh"], None]
"""Makes a model tensor parallel over a mesh of one dimension, in place."""
DATA, TENSOR = "dp", "tp"
TRANSFORMERS_STYLES = frozenset(
    ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce")
)
"""Styles of transformers' plans that have a counterpart in `torch.distributed.tensor.parallel`."""


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A factory of a model, plain or on a mesh. `compute` is the dtype that parameters are gathered in; None: as is."""

    build: Callable[[], nn.Module]
    tensor_parallel: TensorParallel | None = None
    no_tensor_parallel: str = "it has no plan for tensor parallelism"
    """Why there is none, where there is none."""
    compute: torch.dtype | None = None

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """The dimensions of a mesh that it knows, outermost first."""
        return (DATA,) if self.tensor_parallel is None else (DATA, TENSOR)

    def __call__(self, mesh: DeviceMesh | None = None) -> nn.Module:
        """Build the model, on the mesh if there is one."""
        model = self.build()
        if mesh is None:
            return model
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        for name in sizes:
            if name not in (DATA, TENSOR):
                raise InputError(f"the mesh has {name!r}, and the model knows {' and '.join(self.mesh_dims)}")
        if sizes.get(TENSOR, 1) > 1:
            if self.tensor_parallel is None:
                raise InputError(f"tp {sizes[TENSOR]}: {self.no_tensor_parallel}")
            self.tensor_parallel(model, mesh[TENSOR])
        if DATA in sizes:
            _shard(model, mesh[DATA], self.compute)
        return model


def in_autocast(step: Step, dtype: torch.dtype | None) -> Step:
    """Return the step with another dtype to compute in, that its model on a mesh gathers its parameters in too."""
    model = replace(step.model, compute=dtype) if isinstance(step.model, ParallelModel) else step.model
    return replace(step, model=model, autocast=dtype)


def _shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """Call `fully_shard` on the repeated blocks and the whole; on one rank too, for the sake of its dtypes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if compute is not None:
        policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    holding = {path: module for path, module in model.named_modules() if any(True for _ in module.parameters())}
    for path in repeated_blocks({path: type(module).__name__ for path, module in holding.items()}):
        fully_shard(holding[path], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
