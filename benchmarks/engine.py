"""What it costs to run a plan beyond the ops that it runs again, beside PyTorch's selective checkpointing.

Three ways to train one Llama shape, interleaved, medians: plain; under a plan of memfit; with the same units and saved
ops through `torch.utils.checkpoint` and `create_selective_checkpoint_contexts`. The ops that run again are timed by
themselves, without any code around them. A whole step differs by a few per cent from one moment to the next on a shared
machine, so what the host takes is also measured where it is all there is: the same plan on a batch so small that ops
take no time. Printed are both, at budgets between the smallest that can be met (0) and the baseline (1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

import memfit
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.plans import Checkpoint, Plan
from memfit.solve import Problem, SolveOptions, minimum_budget_bytes


def build(layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        vocab_size=1024,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_plan(step: memfit.Step, part: float, layers: int) -> Plan:
    trace = memfit.trace(step, target="cpu")
    blocks = tuple(f"model.layers.{number}" for number in range(layers))
    options = SolveOptions(ac_units=blocks)
    problem = Problem.of(Runtime.of(trace, Roofline.of(Target.parse("cpu"))), Target.parse("cpu"), options)
    least = minimum_budget_bytes(problem)
    assert least is not None
    budget = int(least + (problem.baseline_bytes - least) * part)
    return memfit.plan(trace, budget=budget, options=options, progress=False)


def selective(model: nn.Module, plan: Plan) -> None:
    """PyTorch's way: the same units, the same saved ops."""
    for entry in plan.checkpoint:
        module = model.get_submodule(entry.module)
        forward = module.forward
        module.forward = partial(_checkpointed, forward, entry)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], entry: Checkpoint, *args: Any, **kwargs: Any) -> Any:
    saved = {op.offset for op in entry.saved_ops}
    counts = {False: -1, True: -1}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += 1
        save = counts[context.is_recompute] in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy) if saved else None
    more = {} if context is None else {"context_fn": context}
    return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)


class _Again(TorchDispatchMode):
    """Writes down the ops of the backward that are a forward running again."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and "empty" not in str(func):
            clone = partial(tree_map_only, torch.Tensor, lambda tensor: tensor.detach().clone())
            self.ops.append((func, clone(args), clone(kwargs or {})))
        return result


def ops_again(batch: dict[str, torch.Tensor], model: nn.Module) -> list[tuple[Any, Any, Any]]:
    """The ops that run again in one backward of the planned model."""
    loss = model(**batch).loss
    with _Again() as seen:
        loss.backward()
    model.zero_grad()
    return seen.ops


def ops_s(ops: list[tuple[Any, Any, Any]], unit: int) -> float:
    """Seconds of ops without any code around them. Results of a unit are there together, as backward needs them."""
    with torch.no_grad():
        began = time.perf_counter()
        for first in range(0, len(ops), unit):
            held = [func(*args, **kwargs) for func, args, kwargs in ops[first : first + unit]]
            del held
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = {"full": _batch(options.batch, options.length), "tiny": _batch(1, 4)}
    worst = 0.0
    for part in (0.0, 0.35, 0.7):
        plain, ours, theirs = (build(options.layers, options.hidden) for _ in range(3))
        plan = make_plan(memfit.Step(plain, batches["full"]), part, options.layers)
        plan.apply(ours)
        selective(theirs, plan)
        models = {"plain": plain, "memfit": ours, "pytorch": theirs}
        saved = sum(len(entry.saved_ops) for entry in plan.checkpoint)
        print(f"budget at {part:.2f}: {len(plan.checkpoint)} units, {saved} ops saved")
        full = measured(models, plan, batches["full"], options.rounds)
        tiny = measured(models, plan, batches["tiny"], 10 * options.rounds)
        needed_ms = full["plain"] + full["ops"]
        for name in ("memfit", "pytorch"):
            host_ms = tiny[name] - tiny["plain"] - tiny["ops"]
            print(
                f"  {name:8s} {full[name]:7.1f} ms, {full[name] / needed_ms:.3f} of the {needed_ms:.1f} ms that ops "
                f"need; its host takes {host_ms:5.1f} ms more on a tiny batch: {1 + host_ms / needed_ms:.3f}",
                flush=True,
            )
            if name == "memfit":
                worst = max(worst, full[name] / needed_ms)
    print(f"the planned step over what its ops need, worst: {worst:.3f} (must be at most 1.03)")


def measured(models: dict[str, nn.Module], plan: Plan, batch: dict[str, torch.Tensor], rounds: int) -> dict[str, float]:
    """Medians in ms of forward and backward of each model, and of the ops that run again by themselves."""
    times: dict[str, list[float]] = {name: [] for name in (*models, "ops")}
    for model in models.values():
        for _ in range(2):
            model(**batch).loss.backward()
            model.zero_grad()
    again = ops_again(batch, models["memfit"])
    for _ in range(rounds):
        for name, model in models.items():
            began = time.perf_counter()
            model(**batch).loss.backward()
            times[name].append(time.perf_counter() - began)
            model.zero_grad()
        times["ops"].append(ops_s(again, len(again) // len(plan.checkpoint)))
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def _batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 1024, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main()
