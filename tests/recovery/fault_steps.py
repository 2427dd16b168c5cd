"""Training steps that run out of memory under a real limit (RLIMIT_AS), as a script; the outcome is printed as JSON.

The limit is set once, at a place inside a step, just above what the process has mapped there, and stays for the rest of
the run: the step fails at its next large allocation, and only a tighter plan gets past that place.
"""

from __future__ import annotations

import functools
import gc
import json
import random
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.engines.recompute import is_recomputing
from memfit.recovery import OutOfMemory
from memfit.solve import SolveOptions

WARM, MORE = 1, 10


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Running statistics, blocks, a head; noise of Python's and numpy's generators."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Size:
    """How large a training run is; `part` of the baseline's peak is what its plan may take."""

    rows: int
    width: int
    layers: int
    classes: int
    part: float
    optimizer: tuple[tuple[str, Any], ...] = ()


ACTIVATIONS = Size(rows=2048, width=64, layers=4, classes=512, part=0.95)
STATES = Size(rows=64, width=384, layers=4, classes=64, part=1.0, optimizer=(("foreach", True),))


@dataclass(frozen=True)
class Case:
    """Where memory ends, after how many steps, and how far above what is mapped there."""

    where: str
    size: Size
    above_bytes: int
    force: tuple[str, ...] = ()
    warm: int = WARM
    guard: tuple[tuple[str, Any], ...] = ()


CASES = {
    "activations": [
        Case("forward", ACTIVATIONS, 1 << 19),
        Case("loss", ACTIVATIONS, 1 << 19),
        Case("backward", ACTIVATIONS, 1 << 19),
        Case("second run", ACTIVATIONS, 1 << 19, force=("layers.3",)),
        Case("no way out", ACTIVATIONS, 1 << 19),
    ],
    "states": [
        Case("optimizer", STATES, 12 << 20),
        Case("first optimizer step", STATES, 12 << 20, warm=0),
        Case("inside the optimizer", STATES, 12 << 20),
        Case("inside the optimizer, with copies", STATES, 12 << 20, guard=(("copies", True),)),
    ],
}


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class Limit:
    """Sets the process's limit the first time it is called while armed."""

    def __init__(self, above_bytes: int) -> None:
        self.armed = False
        self.above_bytes = above_bytes

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + self.above_bytes, resource.RLIM_INFINITY))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Training:
    """A model and its steps; everything follows from the seed."""

    def __init__(self, size: Size, limit: Limit | None = None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.size = size
        self.limit = limit or Limit(0)
        self.where = ""
        self.attempts = 0
        self.model = Model(size.width, size.layers, size.classes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **dict(size.optimizer))

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.size.rows, self.size.width, generator=generator)
        return x, torch.randint(0, self.size.classes, (self.size.rows,), generator=generator)

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.where == "loss":
            self.limit()
        return F.cross_entropy(output, labels)

    def step(self, number: int) -> None:
        self.attempts += 1
        x, labels = self.batch(number)
        loss = self.loss(self.model(x), labels)
        if self.where == "backward":
            self.limit()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def place_limit(self, where: str) -> None:
        """Call the limit at a place in the step; it does nothing until it is armed."""
        self.where = where
        last = self.model.layers[-1]
        if where == "forward":
            last.register_forward_pre_hook(lambda *_: None if is_recomputing() else self.limit())
        elif where == "second run":
            last.up.register_forward_pre_hook(lambda *_: self.limit() if is_recomputing() else None)
        elif where == "no way out":
            self.model.register_forward_pre_hook(self.limit)
        elif "optimizer" in where:
            self.optimizer.register_step_pre_hook(self.limit)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes and leaves."""
        found = {name: each.detach().clone() for name, each in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = torch.as_tensor(value).clone()
        found["torch"] = torch.get_rng_state()
        found["python"] = torch.tensor(random.getstate()[1])
        found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
        return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() ^ other.keys())
    return names + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]


@functools.cache
def captured(size: Size) -> memfit.Trace:
    """The step of every run of a size. The model draws from Python's generator: capturing it takes a dozen passes."""
    training = Training(size)
    x, labels = training.batch(0)
    step = memfit.Step(
        training.model, x, loss=lambda output, _: F.cross_entropy(output, labels), optimizer=training.optimizer
    )
    return memfit.trace(step, target="cpu")


def planned(size: Size, options: SolveOptions) -> memfit.Plan:
    baseline = memfit.plan(captured(size), progress=False).baseline.peak_bytes
    return memfit.plan(captured(size), budget=int(size.part * baseline), options=options, progress=False)


def reference(cases: list[Case]) -> dict[int, dict[str, torch.Tensor]]:
    """The state of a run that never fails after as many steps as the cases are compared at."""
    training = Training(cases[0].size)
    compared = {number for case in cases for number in (case.warm, case.warm + 1 + MORE)}
    states = {}
    for number in range(max(compared) + 1):
        if number in compared:
            states[number] = training.state()
        training.step(number)
    return states


def run(case: Case, states: dict[int, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A run in which memory ends once, beside one that never failed."""
    options = SolveOptions(force=case.force)
    plan = planned(case.size, options)
    gc.collect()  # what planning and the case before left
    training = Training(case.size, Limit(case.above_bytes))
    plan.apply(training.model, training.optimizer)
    training.loss = plan.loss(training.loss)  # type: ignore[method-assign]
    inside = case.where.startswith("inside")
    if not inside:
        training.place_limit(case.where)
    guard = memfit.guard(
        plan,
        training.model,
        optimizer=training.optimizer,
        step=captured(case.size),
        options=options,
        **dict(case.guard),
    )
    with guard:
        if inside:
            training.place_limit(case.where)  # after the guard's own hooks
        for number in range(case.warm):
            guard.step(training.step, number)
        training.attempts, training.limit.armed = 0, True
        error: OutOfMemory | None = None
        try:
            guard.step(training.step, case.warm)
        except OutOfMemory as failed:
            error = failed
        found: dict[str, Any] = {
            "attempts": training.attempts,
            "limited": not training.limit.armed,
            "error": None if error is None else str(error),
            "restored": None if error is None else error.restored,
            "cause": None if error is None else str(error.__cause__),
            "peaks": [plan.predicted.peak_bytes, guard.plan.predicted.peak_bytes],
            "foreach": training.optimizer.param_groups[0]["foreach"],
        }
        if error is not None:
            training.limit.lift()
            found["differs after the failure"] = differing(training.state(), states[case.warm])
            if error.restored:
                guard.step(training.step, case.warm)
        if error is None or error.restored:
            for number in range(case.warm + 1, case.warm + 1 + MORE):
                guard.step(training.step, number)
            training.limit.lift()
            found["differs at the end"] = differing(training.state(), states[case.warm + 1 + MORE])
    guard.plan.remove(training.model)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = CASES[sys.argv[1]]
    never_failed = reference(cases)
    sys.stdout.write(json.dumps({case.where: run(case, never_failed) for case in cases}))
