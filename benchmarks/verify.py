"""What `plan.verify` takes, over three plain steps of the same model.

Both are timed in turn, several rounds, and the median of the ratios is printed: for a step so small that it is all
Python, and for one whose ops take their time. Verifying runs fourteen steps, so the ratio cannot be below about five.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memfit


def build(hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        vocab_size=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def ratios(hidden: int, layers: int, batch: int, length: int, rounds: int) -> list[float]:
    model = build(hidden, layers)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 512, (batch, length))
    step = memfit.Step(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer)
    trace = memfit.trace(step, target="cpu")
    least = memfit.plan(trace, budget="1B", progress=False).minimum_budget_bytes
    assert least is not None
    plan = memfit.plan(trace, budget=int(1.2 * least), progress=False)

    def plain_s() -> float:
        began = time.perf_counter()
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - began

    def verify_s() -> float:
        began = time.perf_counter()
        assert plan.verify(step, time_tolerance=None).ok
        return time.perf_counter() - began

    plain_s()
    return [verify_s() / plain_s() for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, sizes in {"all Python": (64, 4, 4, 64), "real ops": (256, 4, 8, 128)}.items():
        found = sorted(ratios(*sizes, rounds))
        print(
            f"{name}: verify over three plain steps {statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"
        )


if __name__ == "__main__":
    main()
