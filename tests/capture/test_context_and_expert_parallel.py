"""Context and expert parallel steps for GPUs, captured as they are; on CPUs against real ranks in tests/distributed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import memfit
from memfit import Step, spec
from memfit.capture import CaptureError, Trace, check_trace
from tests.distributed import context_parallel_ranks, expert_parallel_ranks
from tests.distributed.context_parallel_ranks import HEADS, WIDTH

RANKS, TOKENS = 4, 512
SHARD_BYTES = 2 * TOKENS // RANKS * WIDTH * 2
"""A rank's part of the keys, or of the values, in bfloat16."""


def in_context(backend: SDPBackend, rotation: str, rank: int = 0) -> Trace:
    def build(mesh: DeviceMesh) -> nn.Module:
        return context_parallel_ranks.build(mesh, rotation, rings=False).to(torch.bfloat16)

    def run(*args: Any) -> None:
        with sdpa_kernel(backend):
            context_parallel_ranks.run(*args)

    step = Step(build, spec((2, TOKENS, WIDTH), torch.bfloat16), run=lambda m, o, b: run(m, o, b))
    trace = memfit.trace(step, target="h100-sxm", mesh={"cp": RANKS}, rank=rank)
    check_trace(trace)
    return trace


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        (SDPBackend.FLASH_ATTENTION, "aten._scaled_dot_product_flash_attention"),
        (SDPBackend.EFFICIENT_ATTENTION, "aten._scaled_dot_product_efficient_attention"),
        (SDPBackend.CUDNN_ATTENTION, "aten._scaled_dot_product_cudnn_attention"),
    ],
)
def test_attention_runs_once_for_each_part_of_the_sequence(backend: SDPBackend, kernel: str) -> None:
    trace = in_context(backend, "allgather")
    for name in (f"{kernel}.default", f"{kernel}_backward.default"):
        calls = [op for op in trace.ops if op.name == name]
        assert len(calls) == 2 * RANKS, "two layers"
        query = 0 if name == f"{kernel}.default" else 1
        # the first rank has the first and the last part of the sequence: of other ranks' keys only the last needs some
        assert calls[0].inputs[query].shape == (2, HEADS, TOKENS // RANKS, WIDTH // HEADS)
        assert calls[1].inputs[query].shape[2] == TOKENS // RANKS // 2
    gathers = [each.bytes for each in trace.collectives if each.kind == "all_gather"]
    assert gathers == [2 * RANKS * SHARD_BYTES] * 4, "keys and values, in the forward and in the backward of two layers"
    rotations = [each.bytes for each in trace.collectives if each.kind == "all_to_all"]
    assert rotations == [2 * 2 * SHARD_BYTES] * 2 * RANKS, "their gradients, in float32, go round"


def test_keys_and_values_go_round_where_they_are_not_gathered() -> None:
    trace = in_context(SDPBackend.FLASH_ATTENTION, "alltoall", rank=2)
    assert {each.kind for each in trace.collectives} == {"all_to_all"}
    sizes = [each.bytes for each in trace.collectives]
    assert sizes.count(2 * SHARD_BYTES) == 2 * 2 * (RANKS - 1)
    assert sizes.count(2 * 2 * SHARD_BYTES) == 2 * RANKS
    shape = [op.inputs[1].shape[2] for op in trace.ops if op.name == "aten._scaled_dot_product_flash_attention.default"]
    assert shape[:RANKS] == [TOKENS // RANKS, TOKENS // RANKS // 2, TOKENS // RANKS // 2, TOKENS // RANKS]


def test_cpus_have_no_context_parallel_attention() -> None:
    build = functools.partial(context_parallel_ranks.build, rings=False)
    step = Step(build, spec((2, 32, WIDTH)), run=context_parallel_ranks.run)
    with pytest.raises(CaptureError, match="for_cpu"):
        memfit.trace(step, target="cpu", mesh={"cp": 2})


def test_experts_exchange_tokens_four_times_a_layer() -> None:
    case = expert_parallel_ranks.CASES["expert parallel of a sharded model"]
    trace = memfit.trace(case.step(case.build, spec), target="h100-sxm", mesh=case.sizes)
    check_trace(trace)
    exchanged = [each for each in trace.collectives if each.kind == "all_to_all"]
    tokens = expert_parallel_ranks.TOKENS * expert_parallel_ranks.WIDTH * 4
    assert [(each.ranks, each.stride, each.bytes) for each in exchanged] == [(2, 1, tokens)] * 4 * 2
    gathered = {each.stride for each in trace.collectives if each.kind == "all_gather"}
    assert gathered == {2}, "ranks of dp lie two apart"


def test_parts_whose_size_the_router_decides_are_refused() -> None:
    class Uneven(nn.Module):
        def __init__(self, mesh: DeviceMesh) -> None:
            super().__init__()
            self.router, self.group = nn.Linear(8, 4), mesh.get_group()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.router(x).argmax(-1)
            sent = torch.histc(chosen.float(), bins=2, min=0, max=3).long()
            received = functional.all_to_all_single(sent, None, None, self.group)
            sizes = received.tolist(), sent.tolist()
            return functional.all_to_all_single_autograd(self.router(x)[chosen.argsort()], *sizes, self.group)

    step = Step(Uneven, spec((16, 8)), loss=lambda output, _: output.sum())
    with pytest.raises(CaptureError, match="depends on the values"):
        memfit.trace(step, target="h100-sxm", mesh={"ep": 2})
