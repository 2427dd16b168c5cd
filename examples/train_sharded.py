"""Training on several ranks under a plan: `torchrun --nproc-per-node 2 examples/train_sharded.py`.

It runs on CPUs over Gloo. On GPUs write `init_process_group("nccl")` and `torch.cuda.set_device(...)`, and name the GPU
as the target.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from llama import Llama, Shape, next_token_loss

import memfit
from memfit.sharded import clip_grad_norm_, load, save, saves

SHAPE = Shape(layers=4, hidden=128, heads=4, key_value_heads=2, feed_forward=352, vocabulary=512)
BATCH, LENGTH, STEPS = 8, 128, 5


def main(folder: str | None) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama(SHAPE, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH))
    step = memfit.Step(model, tokens, loss=next_token_loss, optimizer=optimizer)
    plan = memfit.plan(step, target="cpu", ranks=dist.get_world_size(), budget="30MiB", progress=False)
    plan.apply(model, optimizer)
    loss_function = plan.loss(next_token_loss)  # recomputed where the plan says so
    first = 0
    if folder is not None and saves(folder):
        first = load(folder, model, optimizer).extra["step"]
    torch.manual_seed(first * dist.get_world_size() + dist.get_rank())
    for number in range(first, first + STEPS):
        tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH))
        loss = loss_function(model(tokens), tokens)
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.3f}, norm of gradients {norm.item():.3f}")
    if folder is not None:
        save(folder, model, optimizer, extra={"step": first + STEPS})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
