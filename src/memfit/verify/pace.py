"""How long real steps take: the median of some, and the forward of each module by itself."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.capture import NEVER, Phase, Trace
from memfit.cost import Roofline, Runtime
from memfit.torch_private.autograd import in_backward


def step_ms(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one run."""
    _settle(device)
    start = time.perf_counter()
    run()
    _settle(device)
    return (time.perf_counter() - start) * 1e3


def module_forward_ms(run: Callable[[], None], model: nn.Module, device: torch.device) -> dict[str, float]:
    """Run a step and return the milliseconds each module spends in its own forward, without the modules inside it."""
    with _timed_modules(model, device) as spent:
        run()
    return spent


def predicted_forward_ms(trace: Trace, step_ms: float) -> dict[str, float]:
    """The same as predicted: the parts that modules have in the roofline's time, of a step that takes `step_ms`."""
    runtime = Runtime.of(trace, Roofline())
    scale = step_ms / runtime.total_ms if runtime.total_ms else 0.0
    found: dict[str, float] = defaultdict(float)
    for op, op_ms in zip(trace.ops, runtime.op_ms.tolist(), strict=True):
        if op.call != NEVER and op.phase in (Phase.FORWARD, Phase.LOSS):
            found[trace.calls[op.call].module] += op_ms * scale
    return dict(found)


@contextlib.contextmanager
def _timed_modules(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    """Own times by path. What runs inside a backward is a second run and does not count."""
    paths = {id(module): path for path, module in model.named_modules()}
    spent: dict[str, float] = defaultdict(float)
    stack: list[tuple[int, float, float]] = []  # module, when it began, what the modules inside it took

    def before(module: nn.Module, _: Any) -> None:
        if not in_backward():
            _settle(device)
            stack.append((id(module), time.perf_counter(), 0.0))

    def after(module: nn.Module, _: Any, __: Any) -> None:
        while stack and stack[-1][0] != id(module):
            stack.pop()
        if not stack or in_backward():
            return
        _settle(device)
        _, began, inside = stack.pop()
        taken = time.perf_counter() - began
        if id(module) in paths:
            spent[paths[id(module)]] += (taken - inside) * 1e3
        if stack:
            outer, began, inside = stack[-1]
            stack[-1] = (outer, began, inside + taken)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
