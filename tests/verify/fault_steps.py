"""Training steps that run out of memory under a real limit (RLIMIT_AS), as a script; the outcome is printed as JSON.

The limit is set once, at a place inside a step, just above what the process has mapped there, and stays for the rest of
the run: the step fails at its next large allocation, and only a tighter plan gets past that place.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.engines.rerun import running_again
from memfit.solve import SolveOptions
from memfit.verify import Guard, OutOfMemory

WARM, MORE = 2, 10
ABOVE_BYTES = 1 << 20


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


@dataclass
class Case:
    """One training run: how large, which optimizer, and where memory ends."""

    rows: int = 8192
    width: int = 64
    layers: int = 6
    classes: int = 64
    above_bytes: int = ABOVE_BYTES
    optimizer: dict[str, Any] = field(default_factory=dict)
    force: tuple[str, ...] = ()
    warm: int = WARM
    guard: dict[str, Any] = field(default_factory=dict)


CASES = {
    "forward": Case(),
    "loss": Case(classes=512),
    "backward": Case(),
    "second run": Case(force=("layers.5",)),
    "optimizer": Case(rows=256, width=256, layers=8, above_bytes=12 << 20, optimizer={"foreach": True}),
    "first optimizer step": Case(rows=256, width=256, layers=8, above_bytes=12 << 20, warm=0),
    "inside the optimizer": Case(rows=256, width=256, layers=8, above_bytes=12 << 20, optimizer={"foreach": True}),
    "inside the optimizer, with copies": Case(
        rows=256, width=256, layers=8, above_bytes=12 << 20, optimizer={"foreach": True}, guard={"copies": True}
    ),
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

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.case = case
        self.limit = Limit(case.above_bytes)
        self.where = ""
        self.model = Model(case.width, case.layers, case.classes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **case.optimizer)
        self.attempts = 0

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.case.rows, self.case.width, generator=generator)
        return x, torch.randint(0, self.case.classes, (self.case.rows,), generator=generator)

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.where == "loss":
            self.limit()
        if self.where == "backward" and output.requires_grad:
            output.register_hook(self.limit)
        return F.cross_entropy(output, labels)

    def step(self, number: int) -> None:
        self.attempts += 1
        x, labels = self.batch(number)
        loss = self.loss(self.model(x), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end_memory(self, where: str) -> None:
        """Arm the limit for a place in the step."""
        self.where, self.limit.armed = where, True
        last = self.model.layers[-1]
        if where == "forward":
            last.register_forward_pre_hook(lambda *_: None if running_again() else self.limit())
        elif where == "second run":
            last.up.register_forward_pre_hook(lambda *_: self.limit() if running_again() else None)
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


def planned(training: Training) -> tuple[memfit.Plan, memfit.Trace, SolveOptions]:
    case = training.case
    x, labels = training.batch(0)
    step = memfit.Step(
        training.model, x, loss=lambda output, _: F.cross_entropy(output, labels), optimizer=training.optimizer
    )
    captured = memfit.trace(step, target="cpu")
    options = SolveOptions(force=case.force)
    baseline = memfit.plan(captured, progress=False).baseline.peak_bytes
    return memfit.plan(captured, budget=int(0.95 * baseline), options=options, progress=False), captured, options


def guarded_step(guard: Guard, step: Callable[[int], None], number: int) -> OutOfMemory | None:
    try:
        guard.step(step, number)
    except OutOfMemory as error:
        return error
    return None


def run(where: str) -> dict[str, Any]:
    """A run in which memory ends once, beside one that never failed."""
    case = CASES[where]
    total = case.warm + 1 + MORE
    reference = Training(case)
    for number in range(total):
        if number == case.warm:
            before = reference.state()
        reference.step(number)
    expected = reference.state()
    del reference

    training = Training(case)
    plan, captured, options = planned(training)
    plan.apply(training.model, training.optimizer)
    if not where.startswith("inside"):
        training.end_memory(where)
        training.limit.armed = False
    # capturing and planning use no random numbers of the run
    guard = memfit.guard(
        plan, training.model, optimizer=training.optimizer, step=captured, options=options, **case.guard
    )
    with guard:
        if where.startswith("inside"):
            training.end_memory(where)
            training.limit.armed = False
        for number in range(case.warm):
            guard.step(training.step, number)
        training.attempts, training.limit.armed = 0, True
        error = guarded_step(guard, training.step, case.warm)
        attempts = training.attempts
        found: dict[str, Any] = {
            "attempts": attempts,
            "error": None if error is None else str(error),
            "restored": None if error is None else error.restored,
            "cause": None if error is None else type(error.__cause__).__name__,
            "peaks": [plan.predicted.peak_bytes, guard.plan.predicted.peak_bytes],
            "foreach": training.optimizer.param_groups[0]["foreach"],
        }
        if error is not None:
            found["differs after the failure"] = differing(training.state(), before)
            training.limit.lift()
            if not error.restored:
                return found
            guard.step(training.step, case.warm)
        for number in range(case.warm + 1, total):
            guard.step(training.step, number)
    found["differs at the end"] = differing(training.state(), expected)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(run(sys.argv[1])))
