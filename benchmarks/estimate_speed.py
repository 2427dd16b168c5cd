"""How fast a whole estimate is: trace, timeline, run time, statistics of every module, frontier of every unit.

The peer runs in the same process on the same model, the transformer of PyTorch's own tests of these tools: MemTracker,
RuntimeEstimator and SACEstimator on fake CPU tensors and aggregate_stats. Its roofline needs a GPU, so its two
questions to one (peak rate and bandwidth) are answered with an H100's figures. Ratios are of medians of interleaved
runs.
"""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import aggregate_stats
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

import memfit
from memfit.capture import Trace
from memfit.compat import module_info, parse_module_info
from memfit.cost import Roofline, Runtime
from memfit.memory import Timeline
from memfit.tradeoff import build_frontiers

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Shape, training_step

LLAMA_405B = Shape(layers=126, hidden=16384, heads=128, key_value_heads=8, feed_forward=53248)
REPEATS = 3


PEERS_MODEL = ModelArgs(vocab_size=8192, max_seq_len=1024, dim=1024, n_layers=16, n_heads=16, dropout_p=0.1)
BATCH = 2


def transformer_step() -> memfit.Step:
    """One step of the transformer with which PyTorch tests these trackers, with 16 layers."""
    tokens = memfit.spec((BATCH, PEERS_MODEL.max_seq_len), torch.int64)
    return memfit.Step(
        lambda: Transformer(PEERS_MODEL), tokens, loss=lambda out, _: out.sum(), optimizer=torch.optim.Adam
    )


def timed(function: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def estimate_from(trace: Trace) -> None:
    """Everything a planner needs to know, from one trace."""
    timeline = Timeline.of(trace)
    runtime = Runtime.of(trace, Roofline())
    graph = parse_module_info(module_info(runtime, timeline=timeline))
    found = build_frontiers(trace, runtime.op_ms)
    assert timeline.peak_bytes and runtime.total_ms and graph.nodes and found


def estimate(target: str) -> None:
    """The whole estimate of the model that the peer sees."""
    estimate_from(memfit.trace(transformer_step(), target=target))


def estimate_with_pytorch() -> None:
    """The three trackers on three runs, as PyTorch's own tests of its solver collect them."""
    with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model = Transformer(PEERS_MODEL)
        optimizer = torch.optim.Adam(model.parameters())
        tokens = torch.randint(0, PEERS_MODEL.vocab_size, (BATCH, PEERS_MODEL.max_seq_len))

        def run() -> None:
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        memory = MemTracker()
        memory.track_external(model, optimizer)
        with memory:
            for step in range(2):
                run()
                if step == 0:
                    memory.reset_mod_stats()
        figures = "torch.utils._runtime_estimation"
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch(f"{figures}.get_device_tflops", return_value=989.4),
            mock.patch(f"{figures}.get_gpu_dram_gbps", return_value=3350),
        ):
            runtime = RuntimeEstimator()
            with runtime("operator-level-cost-model"):
                run()
            tradeoff = SACEstimator()
            with tradeoff("operator-level-cost-model"):
                model(tokens).sum()
        aggregate_stats(model, memory, runtime, tradeoff, torch.device("cpu"))


def main() -> None:
    estimate("h100-sxm")
    captures, wholes = [], []
    for _ in range(REPEATS):
        trace = None
        began = time.perf_counter()
        trace = memfit.trace(training_step(LLAMA_405B), target="h100-sxm")
        captures.append(time.perf_counter() - began)
        wholes.append(captures[-1] + timed(lambda captured=trace: estimate_from(captured)))
    growth = statistics.median(wholes) / statistics.median(captures)
    print(
        f"Llama 3 405B, 126 layers: capture {statistics.median(captures):.2f} s, all {statistics.median(wholes):.2f} s"
    )

    cpu: list[float] = []
    gpu: list[float] = []
    theirs: list[float] = []
    for _ in range(REPEATS):
        cpu += [timed(lambda: estimate("cpu")) for _ in range(2)]
        theirs.append(timed(estimate_with_pytorch))
        gpu += [timed(lambda: estimate("h100-sxm")) for _ in range(2)]
    peer = statistics.median(theirs)
    mine, for_gpu = statistics.median(cpu), statistics.median(gpu)
    print(f"16 layers, PyTorch's three trackers and aggregate_stats on fake CPU tensors: {peer:.1f} s")
    print(f"16 layers, memfit: {mine:.2f} s for the CPU, {for_gpu:.2f} s for an H100")
    print(f"estimate of the 405B shape over its capture: {growth:.2f} (must be at most 3)")
    print(f"times faster than PyTorch, with the CPU kernels that it sees: {peer / mine:.1f}")
    print(f"times faster than PyTorch, for an H100: {peer / for_gpu:.1f} (must be at least 50)")


if __name__ == "__main__":
    main()
