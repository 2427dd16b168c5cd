"""Collectives of the user's own for one unit, by the classes that FSDP2 has for them.

`set_custom_all_gather` and `set_custom_reduce_scatter` take objects with `allocate` and `__call__`, which FSDP2 calls
with tensors that it got from `allocate`: they may come from a pool that only the collective can use. Here gathered
parameters are views of a buffer whose memory comes and goes, so such a tensor is one more, beside the buffer, while
the collective runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memfit.errors import InputError
from memfit.sharded.comm import ShardComm, join_parts

AllReduceHook = Callable[[torch.Tensor], None]
"""Takes this rank's part of the summed gradients of a unit, and changes it in place."""


def check_comm(comm: Any, name: str) -> None:
    """Refuse what cannot be called as FSDP2 calls it."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise InputError(
            f"{name} takes an object with allocate() and __call__(), as FSDP2's AllGather and ReduceScatter classes "
            f"have, not a {type(comm).__name__}"
        )


def gather_by(comm: Any, link: ShardComm, whole: torch.Tensor, about: str) -> None:
    """Fill a flat tensor with the parts of all ranks, of which this rank's own is in its place."""
    link.check(about)
    own = link.part(whole)
    output = comm.allocate(whole.shape, dtype=whole.dtype, device=whole.device)
    work = comm(output_tensor=output, input_tensor=own, group=link.group, async_op=False)
    if work is not None:
        work.wait()
    whole.copy_(output)


def sum_by(comm: Any, link: ShardComm, parts: Sequence[torch.Tensor], about: str) -> torch.Tensor:
    """Return the sum over ranks of this rank's part. What is to be divided is divided before and after."""
    link.check(about)
    joined = join_parts(parts)
    given = comm.allocate(joined.shape, dtype=joined.dtype, device=joined.device)
    given.copy_(joined)
    output = comm.allocate(parts[0].shape, dtype=joined.dtype, device=joined.device)
    work = comm(output_tensor=output, input_tensor=given, group=link.group, op=dist.ReduceOp.SUM, async_op=False)
    if work is not None:
        work.wait()
    return output.clone()  # what was allocated may be used again
