"""A step on several ranks that is captured as it is and trained on real processes, and how these measure it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit import Step
from memfit.plans import Plan
from tests.distributed.fsdp2_ranks import _MEASURED, _STEP, _WARMUP, _counts, _steps

_BACKWARD = ("autograd::engine", "aten::ones_like")
"""Where a backward begins: the gradient of the loss is made before the engine runs."""


@dataclass(frozen=True)
class Case:
    """A model that `build` wraps on a mesh of these sizes, and its batch, made by `torch.zeros` or `spec`."""

    build: Callable[[DeviceMesh], nn.Module]
    sizes: dict[str, int]
    batch: Callable[[Callable[..., torch.Tensor]], Any]
    run: Callable[..., Any] | None = None

    def step(self, model: Any, make: Callable[..., torch.Tensor]) -> Step:
        if self.run is not None:
            return Step(model, self.batch(make), run=self.run, optimizer=_adamw)
        return Step(model, self.batch(make), loss=_loss, optimizer=_adamw)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())


def _loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def measure(cases: Mapping[str, Case]) -> dict[str, list[Any]]:
    """Train the cases on this rank and return how high their steps are."""
    trained = {}
    for name, case in cases.items():
        sizes = case.sizes
        model = case.build(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
        step = case.step(model, torch.zeros)
        optimizer = step.build_optimizer(model)
        for _ in range(_WARMUP):
            step.execute(model, optimizer, "cpu")
        trained[name] = step, model, optimizer
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        for name, (step, model, optimizer) in trained.items():
            for _ in range(_MEASURED):
                with torch.profiler.record_function(f"{_STEP}{name}"):
                    step.execute(model, optimizer, "cpu")
    steps: dict[str, list[list[Any]]] = {}
    for name, events in _steps(profiler):
        steps.setdefault(name, []).append(events)
    return {name: _levels(each) for name, each in steps.items()}


def train_planned(case: Case, plans: list[str]) -> tuple[list[dict[str, Any]], bool]:
    """Train a case with and without this rank's plan; return how high planned steps are, and whether both are equal."""
    mesh = init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes))
    parameters = []
    levels: list[dict[str, Any]] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = case.build(mesh)
        step = case.step(model, torch.zeros)
        optimizer = step.build_optimizer(model)
        if planned:
            Plan.from_json(plans[mesh.get_rank()]).apply(model, optimizer)
        for _ in range(_WARMUP):
            step.execute(model, optimizer, "cpu")
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        with profiler:
            for _ in range(_MEASURED):
                with torch.profiler.record_function(f"{_STEP}case"):
                    step.execute(model, optimizer, "cpu")
        levels = _levels([events for _, events in _steps(profiler)])
        parameters.append([each.detach().clone() for each in model.parameters()])
    return levels, all(torch.equal(*each) for each in zip(*parameters, strict=True))


def _levels(steps: list[list[Any]]) -> list[dict[str, Any]]:
    """Peaks above the start of each step but the first and the last.

    What a step leaves the next one may free: outputs of micro-batches. A free on a thread of Gloo is not seen; what is
    not freed by the end of the next step was freed so. Peaks without it are too low by no more than that, peaks with it
    too high by no more.
    """
    events = [(number, event) for number, step in enumerate(steps) for event in step]
    alive: dict[int, int] = {}
    missing: set[int] = set()
    for place, (step, event) in enumerate(events):
        if event.bytes > 0:
            missing |= {alive[event.address]} if event.address in alive else set()
            alive[event.address] = place
        elif event.address in alive and events[alive[event.address]][0] >= step - 1:
            del alive[event.address]
    missing |= {place for place in alive.values() if events[place][0] < len(steps) - 1}
    missing = {place for place in missing if _counts(events[place][1])}
    bounds = [_peaks(events, len(steps), missing, counted=counted) for counted in (False, True)]
    found = []
    for number in range(1, len(steps) - 1):
        (low, low_forward), (high, high_forward) = (each[number] for each in bounds)
        found.append(
            {
                "missing_bytes": sum(events[place][1].bytes for place in missing if events[place][0] == number),
                "peak_bytes": [low, high],
                "forward_peak_bytes": [low_forward, high_forward],
            }
        )
    return found


def _peaks(events: list[tuple[int, Any]], count: int, missing: set[int], *, counted: bool) -> list[tuple[int, int]]:
    """The highest point of each step and of its first forward, above where the step began.

    What is freed unseen is left out, or counted to the end of its step.
    """
    alive: dict[int, int] = {}
    found = []
    level = 0
    for number in range(count):
        start = peak = forward_peak = level
        in_forward = True
        for place, (step, event) in enumerate(events):
            if step != number:
                continue
            in_forward = in_forward and not any(op.startswith(_BACKWARD) for op in event.ops)
            level -= alive.pop(event.address, 0)
            if event.bytes > 0 and _counts(event) and (counted or place not in missing):
                alive[event.address] = event.bytes
                level += event.bytes
            peak = max(peak, level)
            forward_peak = peak if in_forward else forward_peak
        for place in missing:
            step, event = events[place]
            if step == number:
                level -= alive.pop(event.address, 0)
        found.append((peak - start, forward_peak - start))
    return found
