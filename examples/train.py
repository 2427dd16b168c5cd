"""A training loop under a plan: `python examples/train.py`. It runs on a CPU; on a GPU name it as the target.

The same file on the command line: `memfit plan examples/train.py:step --target cpu --budget 35MiB -o plan.json`, then
`memfit verify plan.json examples/train.py:step`.
"""

from __future__ import annotations

import torch
from llama import Llama, Shape, next_token_loss

import memfit

SHAPE = Shape(layers=4, hidden=128, heads=4, key_value_heads=2, feed_forward=352, vocabulary=512)
BATCH, LENGTH = 8, 128


def step(batch: int = BATCH) -> memfit.Step:
    """The step of the loop below, with values to verify it on."""
    torch.manual_seed(0)
    model = Llama(SHAPE, LENGTH)
    tokens = torch.randint(0, SHAPE.vocabulary, (batch, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The loop keeps no name for the model's output, so it is gone before backward.
    return memfit.Step(model, tokens, loss=next_token_loss, optimizer=optimizer, keep_output=False)


def main() -> None:
    planned = step()
    model, optimizer = planned.model, planned.optimizer
    plan = memfit.plan(planned, target="cpu", budget="35MiB")
    print(plan)
    plan.apply(model, optimizer)
    loss_function = plan.loss(next_token_loss)  # recomputed where the plan says so
    with memfit.guard(plan, model):
        for number in range(5):
            tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH))
            loss = loss_function(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {number}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
