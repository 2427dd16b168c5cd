"""What cuDNN may take for convolutions beside their tensors: a range, since it chooses its algorithms as it runs.

Note [Workspaces of convolutions]: torch asks cuDNN for an algorithm when a convolution of some shape first runs
(ATen/native/cudnn/Conv_v8.cpp). With `torch.backends.cudnn.benchmark` it tries all of them, in a workspace as large as
the largest needs; without, it takes the first that the heuristics name. Either is made by the caching allocator and
freed when the convolution is over, so it is seen in what is reserved. Which algorithm wins depends on cuDNN's version
and the device, and no rule carried over from one published set of runs to the next, so there is a range:

- at least nothing: implicit products need no workspace
- at most so many times the bytes of input, output and filter. Winograd's transforms of tiles of 2 x 2 hold 16 numbers
  for each 4 of input and output, four times as much, and copies in the layout that tensor cores read are once as much:
  five times. Where all are tried, Fourier transforms are among them, which pad and hold complex numbers: more still,
  how much depends on the shape. Seven was chosen by looking at the published runs, all of them. Heuristics seldom
  choose any of these: transforms of tiles of 4 x 4 hold 36 numbers for each 16, which with the copies is about three
  times.

Depthwise convolutions run torch's own kernel, which has none. `CUDNN_CONV_WSCAP_DBG` caps a workspace, in MiB.
docs/evidence.md says how often real runs were inside the range.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np

from memfit.capture import Op, TensorRef, Trace
from memfit.memory.allocations import BETWEEN, AllocationTable, Bytes

MOST_WITH_BENCHMARK = 7.0
"""Times the bytes of input, output and filter, where all algorithms are tried."""
MOST_BY_HEURISTICS = 3.0
"""The same where the heuristics choose."""
CAP = "CUDNN_CONV_WSCAP_DBG"

_FORWARD, _BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16}
_MIB = 1 << 20


def convolution_workspaces(trace: Trace) -> Bytes | None:
    """Return the most that cuDNN may take for each op of a step; None where it takes nothing at all."""
    if trace.device_type != "cuda":
        return None
    times = MOST_WITH_BENCHMARK if trace.cudnn_benchmark else MOST_BY_HEURISTICS
    cap_bytes = _cap_bytes()
    found = np.zeros(len(trace.ops) + 1, np.int64)
    for index, op in enumerate(trace.ops):
        if op.name in (_FORWARD, _BACKWARD):
            found[index] = min(int(times * _tensor_bytes(op)), cap_bytes)
    return found if found.any() else None


def with_convolutions(table: AllocationTable, workspaces: Bytes, part: float = 1.0) -> AllocationTable:
    """Return the table of a step in which convolutions take this part of the most that they may."""
    taken = np.where(table.run == BETWEEN, 0, (workspaces * part).astype(np.int64)[table.op])[:-1]
    return replace(table, workspace_bytes=np.maximum(table.workspace_bytes, taken))


def _tensor_bytes(op: Op) -> int:
    """Return the bytes of input, output and filter; 0 for a depthwise convolution."""
    if op.name == _FORWARD:
        (given, weight), result = op.inputs[:2], op.outputs[0]
    else:
        result, given, weight = op.inputs[:3]
    depthwise = weight.shape[1] == 1 and given.shape[1] > 1
    return 0 if depthwise else sum(map(_bytes, (given, weight, result)))


def _bytes(tensor: TensorRef) -> int:
    return math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 4)


def _cap_bytes() -> int:
    given = os.environ.get(CAP, "")
    return int(given) * _MIB if given.isdigit() else 1 << 62
