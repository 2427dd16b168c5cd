"""How torch's optimizers do their step: one tensor after another, all in lists, or in one kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from memfit.capture.step import Step

Implementation = Literal["single", "foreach", "fused"]
_FLAGS: dict[Implementation, dict[str, bool]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def implementations(optimizer: torch.optim.Optimizer) -> tuple[Implementation, ...]:
    """The ways that an optimizer can do its step; none when it has only one."""
    if not all("foreach" in group for group in optimizer.param_groups):
        return ()
    fused = all("fused" in group for group in optimizer.param_groups)
    return ("single", "foreach", "fused") if fused else ("single", "foreach")


def set_implementation(optimizer: torch.optim.Optimizer, implementation: Implementation) -> list[dict[str, Any]]:
    """Let an optimizer do its step this way; gives the flags that it had, for `set_flags`. Its state keeps its values.

    A fused step wants its counters where the parameters are.
    """
    flags = {name: on for name, on in _FLAGS[implementation].items() if name in optimizer.param_groups[0]}
    before = [{name: group[name] for name in flags} for group in optimizer.param_groups]
    set_flags(optimizer, [flags] * len(before))
    if implementation == "fused":
        for parameter, state in optimizer.state.items():
            count = state.get("step")
            if isinstance(count, torch.Tensor) and isinstance(parameter, torch.Tensor):
                state["step"] = count.to(parameter.device)
    return before


def set_flags(optimizer: torch.optim.Optimizer, flags: list[dict[str, Any]]) -> None:
    """Give each group its flags."""
    for group, each in zip(optimizer.param_groups, flags, strict=True):
        group.update(each)


@contextlib.contextmanager
def step_with(step: Step, implementation: Implementation) -> Iterator[Step]:
    """The same step with its optimizer's step done this way; an optimizer that exists is changed in the block only."""
    if isinstance(step.optimizer, torch.optim.Optimizer):
        before = set_implementation(step.optimizer, implementation)
        try:
            yield step
        finally:
            set_flags(step.optimizer, before)
        return
    make: Callable[..., torch.optim.Optimizer] | None = step.optimizer
    assert make is not None

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        set_implementation(optimizer, implementation)
        return optimizer

    yield replace(step, optimizer=made)


def implementations_of_step(step: Step) -> tuple[Implementation, ...]:
    """The ways that the optimizer of a step can do its step."""
    if step.optimizer is None:
        return ()
    if isinstance(step.optimizer, torch.optim.Optimizer):
        return implementations(step.optimizer)
    make: Callable[..., torch.optim.Optimizer] = step.optimizer
    try:
        return implementations(make([torch.nn.Parameter(torch.zeros(1))]))
    except Exception:  # a factory for the real parameters only: left as it is
        return ()
