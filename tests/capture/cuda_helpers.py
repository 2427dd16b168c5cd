"""What the tests of CUDA rules share: small modules made of one function, and compact views of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.capture.capture import trace
from memfit.capture.step import Step
from memfit.capture.trace_types import Op, Trace

H100, A100, V100, T4, RTX4090, B200 = "h100-sxm", "a100-sxm-80gb", "v100-sxm2-32gb", "t4", "rtx-4090", "b200"


class Calls(nn.Module):
    """A module whose forward is one function of its parameters."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.values = nn.ParameterList([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])

    def forward(self) -> torch.Tensor:
        return self.function(*self.values)


def captured(
    function: Callable[..., torch.Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    target: str = H100,
    **options: Any,
) -> Trace:
    """A step of the function for a target; the loss is the sum of its result unless that is a scalar."""

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        return output if output.dim() == 0 else output.sum()

    step = Step(Calls(function, *shapes, dtype=dtype), None, loss=loss, optimizer=None, **options)
    return trace(step, target=target)


def names(trace: Trace, phase: str = "forward") -> list[str]:
    """The ops of a phase that do work, without namespace and default overload."""
    return [
        op.name.removeprefix("aten.").removesuffix(".default")
        for op in trace.ops
        if op.phase.value == phase and not op.view
    ]


def only(trace: Trace, name: str) -> Op:
    """The only op of that name."""
    (op,) = [op for op in trace.ops if op.name == f"aten.{name}"]
    return op


def made_bytes(trace: Trace, op: Op) -> list[int]:
    """The bytes of each storage that the op made, in the order of its results."""
    numbers = dict.fromkeys(ref.storage for ref in op.outputs)
    return [trace.storages[number].bytes for number in numbers]
