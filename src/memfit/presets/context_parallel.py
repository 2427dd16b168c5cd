"""The built-in decoders with sequences that ranks share: `cp` of a mesh, by PyTorch's `context_parallel`.

Each rank has two parts of every sequence, one from its beginning and one from its end, so that causal attention is as
much work for all (PyTorch's own order). Tokens, labels and the tables of positions are divided while a step runs, and
attention is a ring: keys and values of other ranks are gathered, their gradients go round. Parameters are sharded over
the ranks of `dp` and `cp` together, as torchtitan does it, which also sums their gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel

from memfit.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_length(length: int, ranks: int) -> None:
    """Refuse a number of ranks among which a sequence cannot be divided in two parts each."""
    if length % (2 * ranks):
        raise InputError(f"cp {ranks}: {length} tokens cannot be divided by {2 * ranks}, two parts for each rank")


@contextlib.contextmanager
def divided(model: Any, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Give each rank its part of the batch inside the block, and of the tables of positions in the model.

    `context_parallel` changes what it divides in place: a data loader gives new tensors in every step, and so does
    this.
    """
    mesh: DeviceMesh | None = getattr(model, "context_mesh", None)
    if mesh is None:
        yield batch
        return
    own = {name: each.clone() for name, each in batch.items()}
    buffers = [*own.values(), model.cosine, model.sine]
    dims = [1] * len(own) + [0, 0]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(own.values())):
        yield own


def run_divided(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    *,
    compute: torch.dtype | None = None,
    largest_norm: float | None = None,
) -> None:
    """Run one step on this rank's part of every sequence."""
    mesh: Any = model.context_mesh
    with divided(model, batch) as own:
        with torch.autocast(mesh.device_type, dtype=compute, enabled=compute is not None):
            loss = model(**own)
        loss.backward()  # inside: what is recomputed finds the same attention
    if largest_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
    optimizer.step()
    optimizer.zero_grad()
