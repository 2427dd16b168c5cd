"""Attention over a sequence that ranks share, trained on each process of the tests and captured as each of them.

`context_parallel` has no kernel for CPUs: DTensor does not know their flash attention. What it runs on GPUs, ring
attention, is run here with that kernel, so that real processes can run it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from tests.distributed.parallel_case import Case

WIDTH, HEADS, TOKENS = 64, 4, 32
_aten = torch.ops.aten


class RingAttention(torch.autograd.Function):
    """Causal ring attention with the flash attention of CPUs."""

    @staticmethod
    def forward(ctx: Any, group: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu
        output, logsumexp = ring._templated_ring_attention(  # type: ignore[attr-defined]
            group, 2, kernel, query=query, key=key, value=value, is_causal=True, dropout_p=0.0
        )
        ctx.group = group
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, logsumexp = ctx.saved_tensors
        gradients = ring._templated_ring_attention_backward(  # type: ignore[attr-defined]
            ctx.group,
            2,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grad,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=output,
            logsumexp=logsumexp,
            is_causal=True,
            dropout_p=0.0,
        )
        return None, *gradients[:3]


class Attention(nn.Module):
    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.group is None:
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        else:
            mixed = RingAttention.apply(self.group, *heads)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    mesh: DeviceMesh
    rotation: str

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(
    mesh: DeviceMesh, rotation: str = "allgather", shard: bool = False, rings: bool = True, layers: int = 2
) -> nn.Module:
    """Build the whole model on every rank, or sharded along `dp`; ranks of `cp` share the sequence."""
    model = Model(layers)
    model.mesh, model.rotation = mesh["cp"], rotation
    for layer in model.layers:
        layer.group = mesh["cp"].get_group() if rings else None
        if shard:
            fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]) if shard else model


def run(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Run one step on this rank's part of the sequence."""
    ring.set_rotate_method(model.rotation)
    x = batch + 1  # `context_parallel` resizes what it shards
    with context_parallel(model.mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        model(x).square().mean().backward()
    ring.set_rotate_method("allgather")  # torch's own, which other tests of this process count on
    optimizer.step()
    optimizer.zero_grad()


def _case(sizes: dict[str, int], **options: Any) -> Case:
    return Case(functools.partial(build, **options), sizes, _batch, run=run)


def _batch(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make((2, TOKENS, WIDTH))


CASES = {
    "context parallel": _case({"cp": 2}),
    "context parallel, all-to-all": _case({"cp": 2}, rotation="alltoall"),
    "context parallel of a sharded model": _case({"dp": 2, "cp": 2}, shard=True),
}
