"""Models that build themselves on a mesh: `fully_shard` over `dp`, `parallelize_module` over `tp`, stages over `pp`,
sequences that ranks of `cp` share.

A model without a mesh is the plain one. On a mesh it is wrapped as torchtitan wraps its own: decoder layers and the
whole are units of FSDP2, which gathers in the dtype of the compute and reduces in float32; over `tp` the styles of
`tensor_parallel.py`. A shape that cannot be is refused with what stands in its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.paths import repeated_blocks
from memfit.torch_private.process_groups import along

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from memfit.capture import Step

TensorParallel = Callable[[Any, "DeviceMesh"], None]
"""Makes a model tensor parallel over a mesh of one dimension, in place."""
Pipeline = Callable[[Any, "DeviceMesh"], nn.Module]
"""Returns the part of a model that this rank of a pipeline holds."""
ContextParallel = Callable[[Any, "DeviceMesh"], None]
"""Notes on a model the mesh of one dimension whose ranks share sequences, or refuses it."""
DATA, TENSOR, PIPELINE, CONTEXT = "dp", "tp", "pp", "cp"
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
    pipeline: Pipeline | None = None
    context_parallel: ContextParallel | None = None
    compute: torch.dtype | None = None

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """The dimensions of a mesh that are searched unless others are asked for, outermost first."""
        return (DATA,) if self.tensor_parallel is None else (DATA, TENSOR)

    @property
    def known_dims(self) -> tuple[str, ...]:
        """All dimensions of a mesh that it knows, outermost first."""
        outer, *inner = self.mesh_dims
        staged = () if self.pipeline is None else (PIPELINE,)
        return (*staged, outer, *(() if self.context_parallel is None else (CONTEXT,)), *inner)

    def step_on_mesh(self, step: Step, sizes: Mapping[str, int]) -> Step:
        """Return the step as it runs on a mesh.

        Along `pp` a schedule runs forward and backward of micro-batches; along `cp` a step divides its sequences.
        """
        # imported when they are used: they load DTensor, which takes a second
        if sizes.get(PIPELINE, 1) > 1 and self.pipeline is not None:
            if step.accumulation_steps > 1:
                raise InputError("a pipeline has micro-batches of its own; leave accumulation_steps out")
            from memfit.presets.pipeline import run_stage

            run: Callable[..., None] = run_stage
        elif sizes.get(CONTEXT, 1) > 1 and self.context_parallel is not None:
            if step.accumulation_steps > 1:
                raise InputError(f"cp {sizes[CONTEXT]}: its step has one micro-batch; leave accumulation_steps out")
            from memfit.presets.context_parallel import run_divided

            run = run_divided
        else:
            return step
        return replace(step, run=partial(run, compute=step.autocast, largest_norm=step.clip_grad_norm))

    def __call__(self, mesh: DeviceMesh | None = None) -> nn.Module:
        """Build the model, on the mesh if there is one."""
        model = self.build()
        if mesh is None:
            return model
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        for name in sizes:
            if name not in (*self.known_dims, TENSOR):  # which says itself why there is none
                raise InputError(f"the mesh has {name!r}, and the model knows {' and '.join(self.known_dims)}")
        ranks_of = [name for name in sizes if sizes[name] > 1]
        if TENSOR in ranks_of and CONTEXT in ranks_of[ranks_of.index(TENSOR) :]:
            raise InputError("the mesh has 'tp' outside of 'cp': fully_shard takes dimensions outside of 'tp' only")
        staged = sizes.get(PIPELINE, 1) > 1
        if staged:
            assert self.pipeline is not None
            model = self.pipeline(model, mesh[PIPELINE])
        if sizes.get(CONTEXT, 1) > 1:
            assert self.context_parallel is not None
            self.context_parallel(model, mesh[CONTEXT])
        if sizes.get(TENSOR, 1) > 1:
            if self.tensor_parallel is None:
                raise InputError(f"tp {sizes[TENSOR]}: {self.no_tensor_parallel}")
            self.tensor_parallel(model, mesh[TENSOR])
        over = [name for name in sizes if name == DATA or (name == CONTEXT and sizes[name] > 1)]
        if over:
            _shard(model, along(mesh, over), self.compute, reshard=False if staged else None)
        return model


def in_autocast(step: Step, dtype: torch.dtype | None) -> Step:
    """Return the step with another dtype to compute in, that its model on a mesh gathers its parameters in too."""
    model = replace(step.model, compute=dtype) if isinstance(step.model, ParallelModel) else step.model
    return replace(step, model=model, autocast=dtype)


def _shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None, *, reshard: bool | None) -> None:
    """Call `fully_shard` on the repeated blocks and the whole; on one rank too, for the sake of its dtypes.

    Stages of a pipeline keep what they gathered for all micro-batches, as in torchtitan.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if compute is not None:
        policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    holding = {path: module for path, module in model.named_modules() if any(True for _ in module.parameters())}
    for path in repeated_blocks({path: type(module).__name__ for path, module in holding.items()}):
        fully_shard(holding[path], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
