"""Commands that several ranks run together: joined under torchrun, and left together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from memfit.cli.problems import UsageError


@contextlib.contextmanager
def joined_ranks(ranks: int, device_type: str, command: str) -> Iterator[int]:
    """Join the ranks that torchrun started, where there are to be several, inside the block; return this one's."""
    if ranks == 1:
        yield 0
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.get_rank()
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UsageError(
            f"the plan is for {ranks} ranks, which {command} it together: write torchrun --nproc-per-node {ranks} -m "
            f"memfit {command} ... in place of memfit {command} ..."
        )
    cuda = device_type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def wait_for_ranks(ranks: int) -> None:
    """Leave together: Gloo's threads end badly where one rank leaves while another still reads.

    Every rank comes here, because an error on one is told to all; one that has died has closed its connections.
    """
    import torch.distributed as dist

    if ranks > 1 and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()
