"""What each process of the tests of captured DDP and FSDP1 runs, and the steps that it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import Step
from memfit.plans import Plan
from tests.distributed.measured_steps import WARMUP, measured

WIDTH, TOKENS, WORDS, ROWS = 64, 16, 99, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pictures(nn.Module):
    """Convolutions with batch norms, whose buffers DDP sends."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())
            for into, out in pairwise(sizes)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Partly(nn.Module):
    """A frozen block, and with `unused` one that no forward calls."""

    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.head, self.spare = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 5) if unused else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCHES: dict[type[nn.Module], tuple[tuple[int, ...], torch.dtype]] = {
    Words: ((ROWS, TOKENS), torch.int64),
    Pictures: ((ROWS, 3, 12, 12), torch.float32),
    Partly: ((ROWS, TOKENS, WIDTH), torch.float32),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A wrapped model, and the loop that trains it: `accumulated` micro-batches without reductions come first."""

    model: type[nn.Module]
    wrap: Callable[..., nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: {"dp": 2})
    accumulated: int = 0
    optimizer: Any = torch.optim.AdamW

    def build(self, mesh: DeviceMesh) -> nn.Module:
        return self.wrap(self.model(), mesh, **self.options)

    def step(self, model: Any, batch: torch.Tensor) -> Step:
        return Step(model, batch, optimizer=self._make, run=self._run)

    def batch(self) -> torch.Tensor:
        shape, dtype = BATCHES[self.model]
        return torch.zeros(shape, dtype=dtype)

    def _make(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return self.optimizer(parameters, lr=0.01, foreach=False)

    def _run(self, model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        for number in range(self.accumulated + 1):
            with model.no_sync() if number < self.accumulated else nullcontext():
                model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(model: nn.Module, mesh: DeviceMesh, *, hook: Any = None, **options: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def fsdp1(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block, nn.Sequential}))
    if mesh.ndim > 1:
        options["device_mesh"] = mesh
    return FullyShardedDataParallel(model, device_id=torch.device(mesh.device_type), **options)


_HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
_GRAD_OP, _NO = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
_HYBRID = {"dp_replicate": 2, "dp_shard": 2}

CASES: dict[str, Case] = {
    "DDP": Case(model=Words, wrap=ddp),
    "DDP, convolutions": Case(model=Pictures, wrap=ddp, options={"gradient_as_bucket_view": True}),
    "DDP, buffers": Case(model=Pictures, wrap=ddp, options={"static_graph": True}),
    "DDP, views": Case(model=Words, wrap=ddp, options={"gradient_as_bucket_view": True}, optimizer=torch.optim.SGD),
    "DDP, small buckets": Case(model=Words, wrap=ddp, options={"bucket_cap_mb": 0.05}),
    "DDP, unused": Case(model=Partly, wrap=ddp, options={"find_unused_parameters": True}),
    "DDP, accumulation": Case(model=Words, wrap=ddp, accumulated=1),
    "DDP, accumulation in views": Case(model=Words, wrap=ddp, accumulated=1, options={"gradient_as_bucket_view": True}),
    "DDP, compressed": Case(model=Words, wrap=ddp, options={"hook": fp16_compress_hook}),
    "FSDP1": Case(model=Words, wrap=fsdp1),
    "FSDP1, original parameters": Case(model=Words, wrap=fsdp1, options={"use_orig_params": True}),
    "FSDP1, convolutions": Case(model=Pictures, wrap=fsdp1, options={"forward_prefetch": True}),
    "FSDP1, frozen and unused": Case(model=Partly, wrap=fsdp1, options={"use_orig_params": True}),
    "FSDP1, gradients": Case(model=Words, wrap=fsdp1, options={"sharding_strategy": _GRAD_OP}),
    "FSDP1, gradients, original parameters": Case(
        model=Words, wrap=fsdp1, options={"sharding_strategy": _GRAD_OP, "use_orig_params": True}
    ),
    "FSDP1, replicated": Case(model=Words, wrap=fsdp1, options={"sharding_strategy": _NO}),
    "FSDP1, mixed": Case(model=Words, wrap=fsdp1, options={"mixed_precision": _HALF}),
    "FSDP1, mixed, convolutions": Case(
        model=Pictures, wrap=fsdp1, options={"mixed_precision": _LOW, "use_orig_params": True}
    ),
    "FSDP1, late prefetch": Case(
        model=Words, wrap=fsdp1, options={"backward_prefetch": BackwardPrefetch.BACKWARD_POST}
    ),
    "FSDP1, accumulation": Case(model=Words, wrap=fsdp1, accumulated=1),
    "FSDP1, hybrid": Case(
        model=Words, wrap=fsdp1, sizes=_HYBRID, options={"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    ),
}


def measure(name: str) -> list[dict[str, Any]]:
    """Train a case over Gloo and return how high its steps are."""
    return trained(name, None, ROWS)[1]


IN_CI = (*("DDP, unused", "DDP, accumulation in views", "FSDP1, frozen and unused", "FSDP1, mixed, convolutions"),)
"""Cases of every kind; the others run with `make zoo`."""

PLANNED_IN_CI = ("DDP, unused", "FSDP1, original parameters")
PLANNED = ("DDP", "FSDP1", "FSDP1, gradients", "FSDP1, mixed")
"""Cases that are trained with a plan as well."""


def trained(name: str, plan: Plan | None, rows: int) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """The parameters of a wrapped model after some steps, with a plan or without, and how high its steps are."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build(init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes)))
    shape, dtype = BATCHES[case.model]
    drawn = torch.rand((rows, *shape[1:]), generator=torch.Generator().manual_seed(7 + dist.get_rank()))
    step = case.step(model, (drawn * WORDS).long() if dtype is torch.int64 else drawn)
    optimizer = step.build_optimizer(model)
    if plan is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is the model that the plan is for
            plan.apply(model, optimizer)
    for _ in range(WARMUP):
        step.execute(model, optimizer, "cpu")
    levels = measured({name: lambda: step.execute(model, optimizer, "cpu")})[name]
    found = [parameter.detach().clone() for parameter in model.parameters()]
    if plan is not None:
        plan.remove(model)
    return found, levels


def train_planned(files: dict[str, str], rows: int) -> dict[str, list[Any]]:
    """Train cases with the plan of a file and without: the same bits. Return how high steps with the plan are."""
    levels = {}
    for name, path in files.items():
        plan = memfit.load(path)
        plain, _ = trained(name, None, rows)
        planned, levels[name] = trained(name, plan, rows)
        assert plain and all(map(torch.equal, plain, planned)), name
    return levels
