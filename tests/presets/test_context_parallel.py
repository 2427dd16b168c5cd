"""The built-in decoders with sequences that ranks share: what is captured on a mesh with `cp`, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

import memfit
from memfit import Step, spec
from memfit.capture import CaptureError, Trace
from memfit.errors import InputError
from memfit.memory import Timeline
from memfit.presets.models.llama import LlamaSizes
from memfit.presets.shapes import language_step

_SIZES = LlamaSizes(
    layers=2,
    hidden=64,
    heads=4,
    key_value_heads=2,
    head=16,
    feed_forward=128,
    vocabulary=256,
    rope_theta=1e4,
    norm_epsilon=1e-5,
)


def step_of(batch: int, length: int = 256) -> Step:
    tokens = {name: spec((batch, length), torch.int64) for name in ("tokens", "labels")}
    return language_step(_SIZES, length, tokens)


def captured(mesh: dict[str, int], rank: int = 0) -> Trace:
    return memfit.trace(step_of(2), target="h100-sxm", mesh=mesh, rank=rank)


def kinds(trace: Trace) -> Counter[tuple[str, tuple[str, ...]]]:
    return Counter((each.kind, each.dims) for each in trace.collectives)


def test_each_rank_has_its_part_of_the_sequence_and_shards_over_dp_and_cp() -> None:
    plain, shared = captured({"dp": 4}), captured({"dp": 2, "cp": 2})
    (weight,) = (each for each in shared.parameters if each.names == ("head.weight",))
    shards = [trace.storages[weight.storage].bytes for trace in (plain, shared)]
    assert shards[0] == shards[1], "parameters are shared by as many"
    found = kinds(shared)
    assert found["all_gather", ("cp",)] == 2 * _SIZES.layers, "keys and values, in forward and backward"
    assert found["all_to_all", ("cp",)] == 2 * _SIZES.layers, "their gradients"
    assert found["reduce_scatter", ("dp", "cp")] == kinds(plain)["reduce_scatter", ("dp",)]
    attention = "aten._scaled_dot_product_cudnn_attention.default"
    calls = [[op.inputs[0].shape for op in trace.ops if op.name == attention] for trace in (plain, shared)]
    assert {shape[2] for shape in calls[0]} == {256}
    assert calls[1][0][2] == 128 and len(calls[1]) == 2 * _SIZES.layers
    assert Timeline.of(shared).peak_bytes < Timeline.of(plain).peak_bytes


@pytest.mark.parametrize("mesh", [{"dp": 1, "pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "cp": 2, "tp": 2}])
def test_stages_of_tensor_parallel_ranks_share_sequences_too(mesh: dict[str, int]) -> None:
    found = kinds(captured(mesh))
    assert found["all_to_all", ("cp",)] and found["all_gather", ("tp",)] and found["send", ("pp",)]
    assert found["reduce_scatter", ("cp",)], "gradients are summed over cp where dp has one rank, or there is none"


def test_the_table_has_shapes_of_dp_and_cp_and_why_some_cannot_be() -> None:
    found = memfit.search(
        lambda batch: step_of(batch, length=192),
        over="mesh",
        target="h100-sxm",
        ranks=64,
        dims=("dp", "cp"),
        global_batch=64,
        progress=False,
    )
    points = {point.mesh["cp"]: point for point in found.points}
    assert sorted(points) == [1, 2, 4, 8, 16, 32, 64]
    assert points[64].status == "impossible" and "192 tokens cannot be divided by 128" in (points[64].reason or "")
    assert all(points[cp].status != "impossible" and points[cp].batch == cp for cp in (1, 2, 4, 8, 16, 32))


def test_dimensions_are_put_in_the_order_that_the_model_is_built_in() -> None:
    with pytest.raises(InputError, match="'tp' outside of 'cp'"):
        captured({"dp": 1, "tp": 2, "cp": 2})
    dims = ("dp", "tp", "pp", "cp")
    found = memfit.search(
        lambda batch: step_of(batch), over="mesh", target="h100-sxm", ranks=2, dims=dims, global_batch=2, progress=False
    )
    assert found.dims == ("pp", "dp", "cp", "tp") and any("pp x dp x cp x tp" in note for note in found.notes)
    assert len(found.points) == 4 and all(point.fits for point in found.points)


def test_sequences_cannot_be_shared_where_torch_has_no_kernel_for_it() -> None:
    with pytest.raises(CaptureError, match="for_cpu"):
        memfit.trace(step_of(2), target="cpu", mesh={"dp": 2, "cp": 2})


def test_a_step_of_several_micro_batches_is_refused() -> None:
    with pytest.raises(InputError, match="accumulation_steps"):
        memfit.trace(dataclasses.replace(step_of(2), accumulation_steps=2), target="h100-sxm", mesh={"cp": 2})
