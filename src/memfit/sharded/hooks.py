"""How modules call the runtime."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from memfit.sharded.runtime import Runtime
from memfit.sharded.unit import Run, Unit
from memfit.torch_private.compiler import disable_dynamo
from memfit.torch_private.modules import forward_hooks


def attach(runtime: Runtime, unit: Unit) -> None:
    """Make a unit's module call the runtime around its forward; user hooks see gathered parameters."""
    module = unit.module
    entered: list[tuple[Run | None, BaseException | None]] = []

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run = Run(unit) if torch.is_grad_enabled() else None
        entered.append((run, sys.exc_info()[1]))
        hooks = forward_hooks(module)
        hooks[last.id] = hooks.pop(last.id)
        args, kwargs = runtime.before_forward(unit, args, kwargs)
        return (args, kwargs) if run is None else runtime.mark_inputs(run, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        run, handled = entered.pop() if entered else (None, None)
        if sys.exc_info()[1] is not handled:
            runtime.failed_forward(unit)
            return None
        return runtime.after_forward(unit, run, (args, kwargs), output)

    module.register_forward_pre_hook(disable_dynamo(before), prepend=True, with_kwargs=True)
    last = module.register_forward_hook(disable_dynamo(after), with_kwargs=True, always_call=True)
