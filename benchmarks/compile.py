"""A compiled model within a budget in bytes, beside torch's own `activation_memory_budget`, on the CPU with Inductor.

For each model, torch's fraction is set to a grid of values with its solvers dp, greedy and ilp; settings that save the
same values are compiled once. Every one is measured: the peak of the whole step by the allocator's events. Then memfit
compiles for four budgets between the lowest and the highest of these peaks. Steps of all of them are timed by turns;
beside memfit's median is the fastest of torch's whose measured peak is within the same budget, found by trying all of
them, and the median of the ratios of each turn. glibc is told to keep its memory, as a caching allocator does: mapping
it anew in every step takes up to a fifth of the time, and more the more is saved. Gradients are compared with those of
the compiled model without a budget.

    python benchmarks/compile.py                      # four models, about 15 minutes on 2 cores
    python benchmarks/compile.py --models vit --turns 9
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from quality.runs import keep_memory
from torch import fx, nn

import memfit
from memfit.torch_private.partitioner import (
    CUSTOM_PARTITIONER,
    make_partitioner,
    partition_with_budget,
    unlimited_recompiles,
)
from memfit.torch_private.pytree import tree_leaves
from memfit.verify import Found, measure_rise, step_ms

SOLVERS = ("dp", "greedy", "ilp")
FRACTIONS = (0.7, 0.5, 0.3, 0.1, 0.0)
BUDGETS = (0.75, 0.5, 0.25, 0.05)
"""Parts of the way from torch's lowest measured peak to its highest."""
CPU = torch.device("cpu")


# -- four models --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward: with RMS norms and SwiGLU as in Llama, or with layer norms and GELU."""

    def __init__(self, size: int, heads: int, *, llama: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first = RMSNorm(size) if llama else nn.LayerNorm(size)
        self.second = RMSNorm(size) if llama else nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        gelu = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.feed_forward = SwiGLU(size) if llama else gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.second(x))


class Decoder(nn.Module):
    def __init__(self, layers: int, size: int, heads: int, vocabulary: int, *, llama: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Block(size, heads, llama=llama, causal=True) for _ in range(layers))
        self.norm = RMSNorm(size) if llama else nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class ViT(nn.Module):
    def __init__(self, layers: int, size: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, 4, stride=4)
        self.layers = nn.ModuleList(Block(size, heads, llama=False, causal=False) for _ in range(layers))
        self.head = nn.Linear(size, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, 4, stride=4)
        self.layers = nn.ModuleList(MixerBlock(64, size) for _ in range(layers))
        self.head = nn.Linear(size, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def build(name: str, layers: int) -> memfit.Step:
    torch.manual_seed(0)
    tokens, images = torch.randint(0, 512, (16, 128)), torch.randn(64, 3, 32, 32)
    models: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "llama": lambda: (Decoder(layers, 128, 4, 512, llama=True), tokens),
        "gpt2": lambda: (Decoder(layers, 128, 4, 512, llama=False), tokens),
        "vit": lambda: (ViT(layers, 128, 4), (images, torch.randint(0, 10, (64,)))),
        "mixer": lambda: (Mixer(layers, 128), (images, torch.randint(0, 10, (64,)))),
    }
    model, batch = models[name]()
    return memfit.Step(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))


# -- torch's own settings, and memfit's ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    name: str
    model: Any
    peak_bytes: int


class Runner:
    """Runs and measures steps of one model however it is compiled."""

    def __init__(self, step: memfit.Step) -> None:
        assert isinstance(step.model, nn.Module)
        self.step, self.module = step, step.model
        self.resident_bytes = int(memfit.memory.Timeline.of(memfit.trace(step, target="cpu")).before_bytes[0])

    def run(self, model: Any) -> None:
        optimizer = self.step.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.step.execute(model, optimizer, "cpu")

    def measure(self, model: Any) -> int:
        with Found(self.step, self.module).kept(), unlimited_recompiles():
            self.run(model)
            self.run(model)
            return self.resident_bytes + measure_rise(lambda: self.run(model), CPU).rise_bytes

    def gradients(self, model: Any) -> list[torch.Tensor]:
        with Found(self.step, self.module).kept():
            batch = self.step.batch
            loss = model(*batch) if isinstance(batch, tuple) else model(batch)
            loss.backward()
            return [parameter.grad.clone() for parameter in self.module.parameters() if parameter.grad is not None]


def using(split: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of torch.compile that have a joint graph split by this function."""
    return {CUSTOM_PARTITIONER: make_partitioner(split)}


def distinct_settings(runner: Runner) -> list[tuple[float, str]]:
    """Return the settings of torch's that save different values; nothing is compiled for this but the last of them."""
    found: dict[frozenset[str], tuple[float, str]] = {}

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        kwargs["num_fwd_outputs"] = num_fwd_outputs
        settings = [(1.0, "dp"), *((fraction, solver) for fraction in FRACTIONS for solver in SOLVERS)]
        for fraction, solver in settings:
            forward, _ = partition_with_budget(joint, inputs, fraction, solver, **kwargs)
            (output,) = (node for node in forward.graph.nodes if node.op == "output")
            found.setdefault(frozenset(map(str, tree_leaves(output.args)[num_fwd_outputs:])), (fraction, solver))
        return partition_with_budget(joint, inputs, 1.0, "dp", **kwargs)

    model = torch.compile(runner.module, fullgraph=True, dynamic=False, options=using(split))
    with Found(runner.step, runner.module).kept(), unlimited_recompiles():
        runner.run(model)
    return list(found.values())


def compile_as_torch(runner: Runner, fraction: float, solver: str) -> Entry:
    def split(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return partition_with_budget(joint, inputs, fraction, solver, **kwargs)

    model = torch.compile(runner.module, fullgraph=True, dynamic=False, options=using(split))
    return Entry(name=f"torch {fraction} {solver}", model=model, peak_bytes=runner.measure(model))


def compare(name: str, layers: int, turns: int) -> float:
    step = build(name, layers)
    runner = Runner(step)
    torchs = [compile_as_torch(runner, *setting) for setting in distinct_settings(runner)]
    default = torchs[0]
    low, high = min(each.peak_bytes for each in torchs), default.peak_bytes
    print(
        f"\n{name}: torch's peaks " + ", ".join(f"{e.name[6:]}: {e.peak_bytes / 2**20:.2f}" for e in torchs) + " MiB",
        flush=True,
    )
    ours: list[tuple[int, Entry, memfit.compiled.Compiled]] = []
    for part in BUDGETS:
        budget = int(low + (high - low) * part)
        compiled = memfit.compiled.compile(step, budget=budget)
        ours.append((budget, Entry(name="memfit", model=compiled.model, peak_bytes=compiled.peak_bytes), compiled))
    entries = [*torchs, *(entry for _, entry, _ in ours)]
    times: dict[int, list[float]] = {id(entry): [] for entry in entries}
    with Found(step, runner.module).kept():
        for turn in range(turns):
            for entry in entries[:: -1 if turn % 2 else 1]:
                times[id(entry)].append(step_ms(lambda entry=entry: runner.run(entry.model), CPU))
    medians = {id(entry): statistics.median(times[id(entry)]) for entry in entries}
    halves = [
        [statistics.median(found[: turns // 2]), statistics.median(found[turns // 2 :])] for found in times.values()
    ]
    apart_part = statistics.median(max(pair) / min(pair) - 1 for pair in halves)
    plain = runner.gradients(default.model)
    worst = 0.0
    for budget, entry, compiled in ours:
        fitting = [each for each in torchs if each.peak_bytes <= budget]
        best = min(fitting, key=lambda each: medians[id(each)])
        ratio = statistics.median(a / b for a, b in zip(times[id(entry)], times[id(best)], strict=True))
        worst = max(worst, ratio)
        pairs = list(zip(runner.gradients(entry.model), plain, strict=True))
        equal = all(torch.equal(a, b) for a, b in pairs)
        apart = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)
        print(
            f"  budget {budget / 2**20:7.2f} MiB: measured {entry.peak_bytes / 2**20:7.2f} "
            f"(estimate off by {compiled.chosen.error_bytes / 2**20:+.2f}, {len(compiled.rounds)} compiled), "
            f"{medians[id(entry)]:7.2f} ms; {best.name}: {best.peak_bytes / 2**20:7.2f} MiB, "
            f"{medians[id(best)]:7.2f} ms; ratio {ratio:.3f}; "
            f"gradients {'the same bits' if equal else f'differ by {apart:.1e} of the largest'}",
            flush=True,
        )
        assert entry.peak_bytes <= budget
    print(f"  without a budget {medians[id(default)]:.2f} ms at {high / 2**20:.2f} MiB;", end=" ")
    print(f"medians of the first and the second half of the turns are {apart_part:.1%} apart (median)", flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama", "gpt2", "vit", "mixer"])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--turns", type=int, default=41, help="2 or more")
    arguments = parser.parse_args()
    keep_memory()
    worst = {name: compare(name, arguments.layers, arguments.turns) for name in arguments.models}
    print(
        "\nworst ratio of memfit's time to torch's best within the same budget: "
        + ", ".join(f"{n} {r:.3f}" for n, r in worst.items())
    )


if __name__ == "__main__":
    main()
