"""The ops that really run on the CPU in the forward of a step, beside those of its trace."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memfit.capture import Phase, Step, Trace
from memfit.capture.call_stack import CallTracker, module_calls
from memfit.capture.environment import patched
from memfit.engines.compiled_policy import not_counted, same_op

Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Ran(NamedTuple):
    """An op, the number of the module call in which it ran, and the shapes and strides of its results."""

    func: Any
    call: int
    outputs: tuple[Layout, ...]


class _Seen(TorchDispatchMode):
    def __init__(self, tracker: CallTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.ops: list[Ran] = []
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.in_backward:
            tensors = (leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor))
            self.ops.append(Ran(func, self.tracker.current, tuple(_layout(t.shape, t.stride()) for t in tensors)))
        return result

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.in_backward:
            self.tracker.enter(module, Phase.FORWARD, len(self.ops), ())

    def leave(self, module: nn.Module, _: object) -> None:
        if not self.in_backward:
            self.tracker.exit(len(self.ops))

    def backward(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.in_backward = True
            try:
                return original(*args, **kwargs)
            finally:
                self.in_backward = False

        return backward


def real_ops(step: Step, model: nn.Module) -> tuple[list[Ran], list[str]]:
    """What a dispatch mode sees of forward and loss, with hooks on what autograd saves; and the module calls."""
    tracker = CallTracker(model)
    seen = _Seen(tracker)
    forward_and_backward = dataclasses.replace(step, optimizer=None, clip_grad_norm=None)
    with (
        patched(torch.autograd, "backward", seen.backward),
        module_calls(seen.enter, seen.leave),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        seen,
    ):
        forward_and_backward.execute(model, None, "cpu")
    return seen.ops, _called(tracker.calls)


def differences(trace: Trace, step: Step, model: nn.Module, *, layouts: bool = False) -> str:
    """A unified diff of the forward ops, each with its module call, in the trace and in a real run; empty when equal.

    What engines pass over is no difference: detachments that a capture does not see, and composites that write in place
    only without a dispatch mode.
    """
    planned = [op for op in trace.ops if op.phase in (Phase.FORWARD, Phase.LOSS)]
    names = _called(trace.calls)
    captured = [
        _line(names[op.call], op.name, [_layout(ref.shape, ref.stride) for ref in op.outputs] if layouts else ())
        for op in planned
    ]
    ran, names = real_ops(step, model)
    seen: list[str] = []
    for op in ran:
        expected = planned[len(seen)].name if len(seen) < len(planned) else ""
        if not_counted(op.func, expected):
            continue
        name = expected if same_op(str(op.func), expected) else str(op.func)
        seen.append(_line(names[op.call], name, op.outputs if layouts else ()))
    return "\n".join(difflib.unified_diff(captured, seen, "trace", "real run", lineterm="", n=2))


def _layout(shape: Sequence[int], stride: Sequence[int]) -> Layout:
    """Shape and strides, without those of dimensions of one element: nothing is read with them."""
    return tuple(shape), tuple(step if size > 1 else 0 for size, step in zip(shape, stride, strict=True))


def _called(calls: Sequence[Any]) -> list[str]:
    """Module calls by name; the last is what runs outside of any."""
    return [*(f"{call.module}[{call.index}]" for call in calls), "outside"]


def _line(call: str, name: str, outputs: Sequence[Layout]) -> str:
    return f"{call}: {name}" + "".join(f" {shape}/{stride}" for shape, stride in outputs)
