"""PyTorch's three trackers on one step, and memfit's trace of the same step with times by the same formula.

The prototype asks the GPU it runs on for its speed; here both sides have one made up. Its estimate also times
`prim.device`, a question that Python asks a fake tensor and no kernel; `timed_questions` shows that fault and is
off elsewhere.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import aggregate_stats as their_aggregate_stats
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.utils._pytree import tree_leaves
from torch.utils._runtime_estimation import _IGNORE_OPS, get_num_bytes
from torch.utils.flop_counter import flop_registry

from memfit import Step
from memfit.capture import TensorRef, Trace, trace
from memfit.cost import Runtime
from tests.compat.graph_models import SHAPE, Model, one_step

CPU = torch.device("cpu")
FLOP_PER_MS = 0.75 * 10e9 * 2
BYTES_PER_MS = 100e6
IGNORED = {f"aten.{packet.__name__}" for packet in _IGNORE_OPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The prototype's three trackers of a step, and the model that they refer to weakly."""

    model: nn.Module
    memory: MemTracker
    runtime: RuntimeEstimator
    sac: SACEstimator

    @property
    def all(self) -> tuple[nn.Module, MemTracker, RuntimeEstimator, SACEstimator, torch.device]:
        return (self.model, self.memory, self.runtime, self.sac, CPU)


def watched(build: Model, *, run: Callable[..., None] = one_step, timed_questions: bool = False) -> Peer:
    """The step under PyTorch's trackers, with optimizer state that is there already."""

    def estimate(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _IGNORE_OPS or (func.namespace == "prim" and not timed_questions):
            return out, 0.0
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        return out, max(sum(map(get_num_bytes, tensors)) / BYTES_PER_MS, flops / FLOP_PER_MS)

    with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model, x = build(), torch.randn(SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        run(model, optimizer, x)
        memory = MemTracker()
        memory.track_external(model, optimizer, x)
        with memory:
            run(model, optimizer, x)
        runtime = RuntimeEstimator()("operator-level-cost-model")
        runtime._estimate = estimate
        with runtime:
            run(model, optimizer, x)
        sac = SACEstimator()
        sac._estimate_runtime = estimate
        with sac:
            model(x)
    return Peer(model=model, memory=memory, runtime=runtime, sac=sac)


def their_info(peer: Peer) -> dict[str, Any]:
    """The prototype's own aggregate; its fit of trade-offs needs a package and is left out."""
    peer.sac.pwlf_sac_tradeoff_curve = lambda: None  # type: ignore[method-assign]
    return their_aggregate_stats(*peer.all)  # type: ignore[return-value]


def captured(build: Model, *, run: Callable[..., None] = one_step) -> Trace:
    """memfit's trace of the step, without the workspaces of kernels, which the prototype cannot see."""
    step = trace(
        Step(build(), torch.randn(SHAPE), run=run, optimizer=lambda p: torch.optim.AdamW(p, foreach=False)),
        target="cpu",
    )
    return msgspec.structs.replace(step, ops=tuple(msgspec.structs.replace(op, workspace_bytes=0) for op in step.ops))


def timed(step: Trace) -> Runtime:
    """The prototype's formula on the ops of a trace."""
    times = [
        0.0
        if op.name.rpartition(".")[0] in IGNORED
        else max(sum(map(_bytes, (*op.inputs, *op.outputs))) / BYTES_PER_MS, op.flops / FLOP_PER_MS)
        for op in step.ops
    ]
    return Runtime(step, np.array(times))


def _bytes(ref: TensorRef) -> int:
    count = 1
    for size, stride in zip(ref.shape, ref.stride, strict=True):
        count *= size if stride else 1
    return count * getattr(torch, ref.dtype).itemsize
