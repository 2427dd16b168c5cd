"""A step on several ranks that is captured as it is and trained on real processes, and how these measure it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit import Step
from memfit.plans import Plan
from tests.distributed.measured_steps import WARMUP, measured


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
        torch.manual_seed(0)
        model = case.build(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
        step = case.step(model, torch.zeros)
        optimizer = step.build_optimizer(model)
        for _ in range(WARMUP):
            step.execute(model, optimizer, "cpu")
        trained[name] = functools.partial(step.execute, model, optimizer, "cpu")
    return measured(trained)


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
        for _ in range(WARMUP):
            step.execute(model, optimizer, "cpu")
        levels = measured({"case": functools.partial(step.execute, model, optimizer, "cpu")})["case"]
        parameters.append([each.detach().clone() for each in model.parameters()])
    return levels, all(torch.equal(*each) for each in zip(*parameters, strict=True))
