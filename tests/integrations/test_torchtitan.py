"""torchtitan's own llama3 and parallelize code, captured from its configuration on ranks that are not there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.capture import Category, Phase, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding import shard

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError, reason="make titan installs torchtitan")

from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.models.llama3 import llama3_args

from memfit.integrations import torchtitan
from tests.integrations.titan_steps import job, plain_step, shard_options
from tests.sharding.fsdp2_captures import captured_changes, difference, planned_changes

pytestmark = pytest.mark.zoo
_LAYERS = llama3_args["debugmodel"].n_layers
_VOCABULARY = llama3_args["debugmodel"].vocab_size


def capture(config: JobConfig, ranks: int, target: str = "h100-sxm") -> Trace:
    return memfit.trace(torchtitan.step(config), target=target, mesh=torchtitan.mesh(config, ranks=ranks))


def counts(trace: Trace) -> Counter[tuple[str, int, str]]:
    return Counter((each.kind, each.ranks, each.stream) for each in trace.collectives)


@pytest.mark.parametrize(("flavor", "ranks"), [("debugmodel", 2), ("debugmodel", 8), ("8B", 8)])
def test_fsdp_is_the_planners_schedule_event_by_event(flavor: str, ranks: int) -> None:
    """Every allocation, free and collective of FSDP2: bytes, stream and order; and the peak."""
    config = job(flavor, batch=1, length=8192 if flavor == "8B" else 128)
    trace = capture(config, ranks)
    plain = Timeline.of(memfit.trace(plain_step(config, llama3_args[flavor]), target="h100-sxm"))
    options = shard_options(llama3_args[flavor].n_layers)
    planned = shard(plain, Runtime.of(plain.trace, Roofline()), Target.parse("h100-sxm", ranks=ranks), options)
    found, expected = captured_changes(trace), planned_changes(planned)
    norm = found.pop()  # of the gradients, for clipping: the planner leaves this all-reduce out
    assert norm[0] == "all_reduce"
    assert not difference(found, expected)
    under = plain.under_plan(intervals=planned.allocations, removed=planned.removed)
    loss_bytes = 4  # the trainer's own reference to the loss, which it returns
    assert Timeline.of(trace).peak_bytes == under.peak_bytes + loss_bytes


def test_tensor_parallel_on_64_ranks() -> None:
    """8 x 8: sharded twice, sequence parallel, and logits that no rank has as a whole."""
    config = job(tensor_parallel=8, batch=1, length=256)
    trace = capture(config, 64)
    assert trace.mesh == {"dp_shard": 8, "tp": 8}
    held = sum(trace.storages[each.storage].bytes for each in trace.parameters)
    whole = sum(each.numel() for each in _parameters()) * 4
    norms = (2 * _LAYERS + 1) * llama3_args["debugmodel"].dim * 4  # whole on each rank of a tensor parallel group
    assert held == (whole - norms) // 64 + norms // 8
    found = counts(trace)
    # forward: attention and feed-forward gather the sequence and scatter their sums, embedding and head do one of both
    assert found["all_gather", 8, "compute"] >= 2 * (2 * _LAYERS + 1)
    assert found["reduce_scatter", 8, "compute"] >= 2 * (2 * _LAYERS + 1)
    units = _LAYERS + 2
    assert found["all_gather", 8, "gather"] == 2 * units - 1  # the last is kept
    assert found["reduce_scatter", 8, "reduce"] == units
    logits = 256 * _VOCABULARY * 4
    assert max(each.bytes for each in _activations(trace)) == logits // 8
    config.parallelism.disable_loss_parallel = True
    assert max(each.bytes for each in _activations(capture(config, 64))) == logits


def _activations(trace: Trace) -> list[Any]:
    return [each for each in trace.storages if each.category is Category.ACTIVATION]


def _parameters() -> list[torch.Tensor]:
    from torchtitan.models.llama3.model.model import Transformer

    with torch.device("meta"):
        return list(Transformer(llama3_args["debugmodel"]).parameters())


def test_each_mode_of_activation_checkpointing_holds_less() -> None:
    modes = ("none", "op", "full")
    traces = {mode: capture(job(checkpointing=mode, length=2048), 8) for mode in (*modes, "2")}
    peaks = {mode: Timeline.of(trace).peak_bytes for mode, trace in traces.items()}
    assert peaks["none"] > peaks["op"] > peaks["full"]
    assert peaks["none"] > peaks["2"] > peaks["full"]
    products = {mode: sum(op.name == "aten.mm.default" for op in trace.ops) for mode, trace in traces.items()}
    assert products["none"] < products["op"] < products["full"]  # every second is computed anew, or every one
    assert all(counts(trace) == counts(traces["none"]) for trace in traces.values())


def test_gradients_are_accumulated_to_the_global_batch() -> None:
    once, twice = job(), job()
    twice.training.global_batch_size = 2 * 8 * twice.training.local_batch_size
    passes = [
        sum(op.name.startswith("aten.embedding.") and op.phase is Phase.FORWARD for op in capture(each, 8).ops)
        for each in (once, twice)
    ]
    assert passes == [1, 2]
    twice.training.global_batch_size += 1
    with pytest.raises(memfit.InputError, match=r"training.global_batch_size"):
        capture(twice, 8)


def test_a_configuration_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "llama3.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[training]\nlocal_batch_size = 2\nseq_len = 128\n'
        '[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "none"\n'
    )
    assert torchtitan.mesh(path, ranks=8) == {"dp_shard": 4, "tp": 2}
    trace = memfit.trace(torchtitan.step(path), target="h100-sxm", mesh=torchtitan.mesh(path, ranks=8))
    assert trace.fingerprint == capture(job(tensor_parallel=2), 8).fingerprint


def test_torchtitan_is_left_as_it_was() -> None:
    before = llama3_args["debugmodel"].max_seq_len, parallel_dims.device_type
    capture(job(), 2, target="cpu")
    assert before == (llama3_args["debugmodel"].max_seq_len, parallel_dims.device_type)
    assert not torch.distributed.is_initialized()


def test_the_mesh_is_compared_with_the_configuration() -> None:
    step = torchtitan.step(job(tensor_parallel=2))
    for mesh in ({"dp_shard": 8}, {"tp": 2, "dp_shard": 4}, {"dp_shard": 2, "tp": 4}, 8):
        with pytest.raises(memfit.InputError, match=r"dp_shard"):
            memfit.trace(step, target="h100-sxm", mesh=mesh)
    with pytest.raises(memfit.InputError, match=r"tensor_parallel_degree=2"):
        torchtitan.mesh(job(tensor_parallel=2), ranks=7)
    assert memfit.trace(torchtitan.step(job()), target="h100-sxm", mesh=2).mesh == {"dp": 2}


@pytest.mark.parametrize(
    "setting",
    [
        ("compile", "enable", True),
        ("parallelism", "pipeline_parallel_degree", 2),
        ("parallelism", "context_parallel_degree", 2),
        ("model", "converters", ["float8"]),
        ("training", "enable_cpu_offload", True),
        ("optimizer", "early_step_in_backward", True),
    ],
)
def test_settings_that_cannot_be_captured_are_refused(setting: tuple[str, str, Any]) -> None:
    section, name, value = setting
    config = job()
    setattr(getattr(config, section), name, value)
    with pytest.raises(memfit.InputError, match=f"{section}.{name}"):
        torchtitan.step(config)


def test_a_wrong_configuration_is_named() -> None:
    with pytest.raises(memfit.InputError, match=r"debugmodel"):
        torchtitan.step(job("9B"))
    with pytest.raises(memfit.InputError, match=r"no torchtitan configuration at"):
        torchtitan.step("nowhere.toml")
    with pytest.raises(memfit.InputError, match=r"the configuration is a dict"):
        torchtitan.step({})
    with pytest.raises(memfit.InputError, match=r"flex attention"):
        capture(job("debugmodel_flex_attn"), 2)
