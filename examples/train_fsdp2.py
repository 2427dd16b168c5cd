"""Training with PyTorch's FSDP2 under a plan: `torchrun --nproc-per-node 2 examples/train_fsdp2.py`.

`plan.apply(model, optimizer, engine="fsdp2")` calls `fully_shard` on the plan's units and runs its checkpoint policies
inside. With `--wrapped` the script calls `fully_shard` itself, as a script that has done so for long would, and the
plan brings its policies only. Both train to the same numbers. It runs on CPUs over Gloo; on GPUs write
`init_process_group("nccl")` and `torch.cuda.set_device(...)`, and name the GPU as the target.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from llama import Llama, Shape, next_token_loss
from torch.distributed.fsdp import fully_shard

import memfit

SHAPE = Shape(layers=4, hidden=128, heads=4, key_value_heads=2, feed_forward=352, vocabulary=512)
BATCH, LENGTH, STEPS = 8, 128, 5


def main(*, wrapped: bool) -> None:
    dist.init_process_group("gloo")
    step = memfit.Step(
        lambda: Llama(SHAPE, LENGTH),  # planned from a factory: nothing is allocated, and nothing is sharded yet
        memfit.spec((BATCH, LENGTH), torch.int64),
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
    )
    plan = memfit.plan(step, target="cpu", ranks=dist.get_world_size(), budget="30MiB", progress=False)
    torch.manual_seed(0)
    model = Llama(SHAPE, LENGTH)
    if wrapped:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan.apply(model, optimizer)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan.apply(model, optimizer, engine="fsdp2")  # the optimizer goes on with the shards
    loss_function = plan.loss(next_token_loss)  # recomputed where the plan says so
    torch.manual_seed(dist.get_rank())
    for number in range(STEPS):
        tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH))
        loss = loss_function(model(tokens), tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.6f}, norm of gradients {norm.full_tensor().item():.6f}")
        else:
            norm.full_tensor()  # every rank takes part in it
    plan.remove(model)
    if dist.get_rank() == 0:
        print(f"{len(plan.checkpoint)} units were checkpointed; the model is {type(model).__name__} again")
    dist.barrier()  # Gloo's threads may still let go of tensors, which aborts a process that is ending
    dist.destroy_process_group()


if __name__ == "__main__":
    main(wrapped="--wrapped" in sys.argv[1:])
