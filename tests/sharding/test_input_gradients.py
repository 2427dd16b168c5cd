"""Gradients of a unit's inputs that FSDP2 holds until all have come: the planner's step against FSDP2's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import memfit
from memfit import Step, spec
from memfit.memory import Timeline
from memfit.plans import Plan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions

WIDTH, WIDE, ROWS, RANKS = 32, 1024, 64, 2


class Reader(nn.Module):
    """Reads a memory, once or twice, after a wide layer: in the backward its gradient comes before that layer's."""

    def __init__(self, hidden: int, reads: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.reads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(reads))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        for read in self.reads:
            x = x + read(memory).sin()
        return x


class Pair(nn.Module):
    """Two readers, units in a unit, which has parameters of its own or none."""

    def __init__(self, hidden: int, *, own: bool = False) -> None:
        super().__init__()
        self.first, self.second = Reader(hidden), Reader(WIDTH)
        self.norm = nn.Linear(WIDTH, WIDTH) if own else nn.Identity()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(x), memory), memory)


class Model(nn.Module):
    """An encoder whose output every block reads; the peak is in the backward of the first block."""

    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.inner, self.encoder = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(map(block, (WIDE, WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, x = self.encoder(x), self.inner(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Skips(nn.Module):
    """Units of one input, whose outputs the last unit reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(16, WIDTH), Reader(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH)) for hidden in (WIDE, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = self.inner(x)
        return self.last(self.blocks[1](self.blocks[0](skipped)), skipped)


BLOCKS = tuple(f"blocks.{number}" for number in range(3))
PARTS = tuple(f"{block}.{part}" for block in BLOCKS for part in ("first", "second"))
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "read once": (lambda: Model(Reader), BLOCKS),
    "read twice": (lambda: Model(lambda hidden: Reader(hidden, reads=2)), BLOCKS),
    "units in units": (lambda: Model(lambda hidden: Pair(hidden, own=True)), (*PARTS, *BLOCKS)),
    "units in units without parameters": (lambda: Model(Pair), (*PARTS, *BLOCKS)),
    "read in units of a whole": (lambda: Model(Pair), PARTS),
    "skipped": (Skips, (*BLOCKS[:2], "last")),
}


def step_of(model: Any) -> Step:
    return Step(model, spec((ROWS, 16)), loss=lambda output, _: output.square().mean(), optimizer=torch.optim.SGD)


def planned(name: str, target: str) -> Plan:
    build, units = CASES[name]
    options = SolveOptions(shard=ShardOptions(units=units))
    return memfit.plan(step_of(build), target=target, ranks=RANKS, options=options, progress=False)


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_fsdp2(name: str, target: str) -> None:
    build, units = CASES[name]

    def sharded(mesh: DeviceMesh) -> nn.Module:
        model = build()
        for unit in sorted(units, key=lambda each: -each.count(".")):
            fully_shard(model.get_submodule(unit), mesh=mesh)
        return fully_shard(model, mesh=mesh)

    captured = memfit.trace(step_of(sharded), target=target, mesh={"dp": RANKS})
    rounding = 1 if target == "cpu" else 512
    assert planned(name, target).baseline.peak_bytes == Timeline.of(captured, rounding).peak_bytes
