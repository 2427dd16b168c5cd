"""Joint graphs of small models, made by AOTAutograd and run without Inductor, so that nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function, nop
from torch import fx, nn

from memfit.compiled.joint_graph import JointGraph, read_joint_graph


def fixed_ms(_: fx.Node, is_extern: bool) -> float:
    """Time of an op that is the same on every machine."""
    return 1.0 if is_extern else 0.01


def run_with(split: Callable[..., Any], model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of a model whose joint graph is split by this function."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(values: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,)).square().mean()

    compiled = aot_function(loss, fw_compiler=nop, partition_fn=split)
    return list(torch.autograd.grad(compiled(parameters, batch), parameters))


def joint_graph_of(model: nn.Module, batch: torch.Tensor) -> JointGraph:
    """Return the joint graph of a model's mean square."""
    from functorch.compile import min_cut_rematerialization_partition

    found: list[JointGraph] = []

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        found.append(read_joint_graph(joint, num_fwd_outputs, fixed_ms, 1e-9))
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    run_with(split, model, batch)
    return found[0]
