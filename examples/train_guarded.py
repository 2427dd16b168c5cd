"""Training on several ranks under the guard: `torchrun --nproc-per-node 2 examples/train_guarded.py`.

In one step the last rank has no memory left; here it raises what an allocator raises. The other ranks, which wait for
it in a collective, are let out, all of them go back to before the step, run the tighter plan that one has solved, and
repeat it. With `--quiet` no rank fails, and the losses are the same.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from llama import Llama, Shape, next_token_loss

import memfit

SHAPE = Shape(layers=4, hidden=128, heads=4, key_value_heads=2, feed_forward=352, vocabulary=512)
BATCH, LENGTH, STEPS, FAILS_AT = 8, 128, 5, 2


def main(*, fails: bool) -> None:
    dist.init_process_group("gloo")
    step = memfit.Step(
        lambda: Llama(SHAPE, LENGTH),  # the whole model, which no rank has after apply: the guard plans from this
        memfit.spec((BATCH, LENGTH), torch.int64),
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
    )
    plan = memfit.plan(step, target="cpu", ranks=dist.get_world_size(), budget="30MiB", progress=False)
    torch.manual_seed(0)
    model = Llama(SHAPE, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan.apply(model, optimizer, engine="fsdp2")
    loss_function = plan.loss(next_token_loss)
    torch.manual_seed(dist.get_rank())
    last = fails and dist.get_rank() == dist.get_world_size() - 1
    attempts: list[int] = []

    def train(number: int, tokens: torch.Tensor) -> float:
        attempts.append(number)
        loss = loss_function(model(tokens), tokens)
        if last and number == FAILS_AT and attempts.count(number) == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with memfit.guard(plan, model, optimizer=optimizer, step=step) as guard:
        for number in range(STEPS):
            tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH))
            loss = guard.step(train, number, tokens)
            if dist.get_rank() == 0:
                print(f"step {number}: loss {loss:.6f}")
    if dist.get_rank() == 0:
        peak = guard.plan.predicted.peak_bytes / 2**20
        print(f"{len(attempts)} attempts for {STEPS} steps; the plan's peak is {peak:.1f} MiB now")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(fails="--quiet" not in sys.argv[1:])
