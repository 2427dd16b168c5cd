"""Runs memfit's whole chain on the torch of this interpreter and prints what came of each stage as JSON.

`versions.py` runs this file in one virtualenv after another; plain torch models only, so that nothing else is needed.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import memfit


class Encoder(nn.Module):
    """A transformer with dropout and its loss inside, as language models have it."""

    def __init__(self, width: int = 64, layers: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Attention(nn.Module):
    """Causal attention through `scaled_dot_product_attention`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0]).square().mean()


def convolutional() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
        for _ in range(3)
    ]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(10))


def mean_square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (4, 64))


def built_convolutional() -> nn.Module:
    model = convolutional()
    model(torch.randn(2, 3, 16, 16))
    return model


STEPS: dict[str, Callable[[], memfit.Step]] = {
    "encoder": lambda: memfit.Step(Encoder(), tokens()),
    "encoder, bfloat16 autocast": lambda: memfit.Step(Encoder(), tokens(), autocast=torch.bfloat16, clip_grad_norm=1.0),
    "encoder, 4 micro-batches": lambda: memfit.Step(Encoder(), tokens(), accumulation_steps=4),
    "attention": lambda: memfit.Step(
        nn.Sequential(*(Attention(64) for _ in range(4))), torch.randn(4, 64, 64), loss=mean_square
    ),
    "convolutions": lambda: memfit.Step(
        built_convolutional(),
        torch.randn(8, 3, 16, 16),
        loss=mean_square,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    ),
    "recurrent": lambda: memfit.Step(Recurrent(), torch.randn(4, 24, 32)),
}


def check_step(name: str) -> dict[str, Any]:
    """Capture, plan, apply and verify one step; the first stage that fails ends it."""
    found: dict[str, Any] = {"step": name}
    stage = "capture"
    try:
        torch.manual_seed(0)
        step = STEPS[name]()
        trace = memfit.trace(step, target="cpu")
        found["capture"] = f"{len(trace.ops)} ops"
        stage = "plan"
        least = memfit.plan(trace, budget="1B", progress=False).minimum_budget_bytes
        plan = memfit.plan(trace, budget=least, progress=False)
        found["plan"] = f"{len(plan.checkpoint)} units"
        stage = "verify"
        verified = plan.verify(step, steps=1, time_tolerance=None)
        assert verified.exactness is not None, verified.skipped
        found["error_percent"] = 100 * abs(verified.peak.error)
        if not (verified.exactness.equal and verified.within_budget):
            raise AssertionError("; ".join(verified.findings))
        found["verify"] = "same bits, within the budget"
        stage = "apply"
        model = step.build_model()
        optimizer = step.build_optimizer(model)
        plan.apply(model, optimizer)
        step.execute(model, optimizer, "cpu")
        plan.remove(model)
        found["apply"] = "a step under the plan, and taken off"
        stage = "capture for a GPU"
        found[stage] = f"{len(memfit.trace(step, target='h100-sxm').ops)} ops"
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        found["failed"] = f"{stage}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


def train_sharded(rank: int, folder: str) -> None:
    """Two steps on two ranks, with memfit's runtime and with DDP: the parameters must have the same bits."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    states = []
    for shard in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        wrapped = memfit.shard(model) if shard else nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        for number in range(2):
            torch.manual_seed(10 * number + rank)
            wrapped(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(memfit.sharded.full_state_dict(wrapped)["model"] if shard else model.state_dict())
    if rank == 0 and not all(torch.equal(states[0][name], states[1][name]) for name in states[1]):
        raise AssertionError("parameters differ from DDP's")
    dist.destroy_process_group()


def check_sharded() -> str:
    """What came of training on two ranks."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train_sharded, args=(folder,), nprocs=2)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    return "the bits of DDP"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": [check_step(name) for name in STEPS],
        "sharded": check_sharded(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
