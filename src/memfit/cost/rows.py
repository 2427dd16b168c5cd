"""Norms and softmax on a GPU: passes over rows, of which later ones may find their rows in the cache.

Two limits are joined: the memory's, for every byte that a pass does not find in the cache, and the multiprocessors',
for rows whose length does not fill the blocks that work on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from memfit.capture import Op
from memfit.hardware import Device, kernel_figures

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
"""Threads that a multiprocessor holds, by compute capability; 2,048 elsewhere."""
_USUAL_THREADS = 2048
_FLOAT_BYTES = 4
_LAYER_NORM_THREADS = 128
_SOFTMAX_BLOCKS = 2
_WARP_SOFTMAX = 1024
"""Shorter rows are held in the registers of one warp, padded to a power of two."""
_AMPERE = (8, 0)
_ROOMY = 4
"""Where the cache is so many times larger than the rows in flight, second reads hit it."""
_LAYER = {"native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"}
_SOFTMAX = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
_GROUP = {"native_group_norm", "native_group_norm_backward"}
_BATCH = {
    "native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    "miopen_batch_norm", "batch_norm_with_update", "batch_norm_backward",
}  # fmt: skip
ROW_OPS = _LAYER | _SOFTMAX | _GROUP | _BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Bytes that pass through memory, and those that multiprocessors handle at `speed` of their usual rate."""

    memory_bytes: float
    handled_bytes: float
    speed: float


def row_work(op: Op, packet: str, moved_bytes: int, item_bytes: int, device: Device) -> RowWork:
    """The work of a norm or softmax; `moved_bytes` counts every tensor once."""
    figures, multiprocessors = kernel_figures().rows, device.multiprocessors or 1
    backward = "backward" in packet
    elements = math.prod(op.inputs[0].shape) if op.inputs else 0
    read_bytes = elements * item_bytes * (2 if backward else 1)
    if packet in _LAYER:
        length = _row_length(op.arguments, op.inputs[0].shape, 2 if backward else 1)
        blocks = _THREADS.get(device.compute_capability or (0, 0), _USUAL_THREADS) // _LAYER_NORM_THREADS
        in_flight = multiprocessors * blocks * length * item_bytes * (2 if backward else 1)
        missed = _ramp(in_flight / (device.l2_cache_bytes or math.inf), figures.cached_from, figures.cached_to)
        steps = length / figures.layer_norm_step
        again = missed + (1.0 if backward else 0.0)  # gradients of weight and bias read both inputs once more
        speed = steps / (math.ceil(steps) + figures.start)
        handled = moved_bytes * _FLOAT_BYTES / item_bytes  # four elements to a load, whatever their size
        return RowWork(memory_bytes=moved_bytes + again * read_bytes, handled_bytes=handled, speed=speed)
    if packet in _SOFTMAX:
        return _softmax(op, moved_bytes, read_bytes, item_bytes, device)
    if packet in _GROUP:
        blocks = _groups(op.arguments, op.inputs[0].shape)
        busy = min(1.0, blocks / multiprocessors)
        handled = moved_bytes + read_bytes / busy
        return RowWork(memory_bytes=moved_bytes + read_bytes, handled_bytes=handled, speed=1.0)
    return RowWork(memory_bytes=moved_bytes + read_bytes, handled_bytes=moved_bytes, speed=1.0)


def _softmax(op: Op, moved_bytes: int, read_bytes: int, item_bytes: int, device: Device) -> RowWork:
    """Rows of up to 1,024 stay in registers, others in shared memory; those too long for it are read again."""
    figures, length = kernel_figures().rows, op.inputs[0].shape[-1] if op.inputs[0].shape else 1
    if length <= _WARP_SOFTMAX:
        padded = 1 << max(0, length - 1).bit_length()
        return RowWork(memory_bytes=moved_bytes, handled_bytes=moved_bytes, speed=length / padded)
    row_bytes, shared = length * item_bytes, device.shared_memory_per_block_bytes or math.inf
    passes = 1 if "backward" in op.name else 2
    again = passes * _ramp(row_bytes / shared, figures.shared_from, figures.shared_to)
    in_flight = (device.multiprocessors or 1) * _SOFTMAX_BLOCKS * row_bytes
    if (device.l2_cache_bytes or 0) > _ROOMY * in_flight:
        again = 0.0
    steps = length / figures.softmax_step
    speed = steps / math.ceil(steps)
    if device.compute_capability is not None and device.compute_capability < _AMPERE:
        speed *= figures.softmax_before_ampere
    return RowWork(memory_bytes=moved_bytes + again * read_bytes, handled_bytes=moved_bytes, speed=speed)


def _ramp(value: float, begin: float, end: float) -> float:
    return min(1.0, max(0.0, (value - begin) / (end - begin)))


@lru_cache(maxsize=1 << 12)
def _row_length(arguments: str, shape: tuple[int, ...], place: int) -> int:
    """Elements that a layer norm goes over at once: the product of its normalized shape."""
    args, _ = msgspec.json.decode(arguments)
    given = args[place] if len(args) > place else None
    if isinstance(given, list) and given and all(isinstance(each, int) for each in given):
        return math.prod(given)
    return shape[-1] if shape else 1


@lru_cache(maxsize=1 << 12)
def _groups(arguments: str, shape: tuple[int, ...]) -> int:
    """Blocks that sum up a group norm's groups: images times groups."""
    args, _ = msgspec.json.decode(arguments)
    numbers = [each for each in args if isinstance(each, int) and not isinstance(each, bool)]
    groups = numbers[3] if len(numbers) > 3 else 1
    return max(1, (shape[0] if shape else 1) * groups)
