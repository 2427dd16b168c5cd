"""Cross entropy a chunk of rows at a time: the function, what it replaces while a step runs, and where it can.

Note [Chunked loss]: a loss that calls `torch.nn.functional.cross_entropy` makes two or three tensors of the size of the
logits in its forward, and as many in its backward. `chunked_cross_entropy` has one chunk of each at a time; what it
computes is the same but for the order in which rows are summed. It is put in the place of torch's function by the
capture and by the engines alike (`chunked_losses`), for cross entropies over one number of classes.

A loss that casts its logits first, `logits.float()`, would keep a whole copy in float32. That cast is left to the
chunks where the trace shows that nothing but the softmax reads it (`ChunkedLoss.casts`): anything else that reads it, a
z-loss, would see half precision. A softmax that itself runs in half precision is not chunked: sums of chunks would be
rounded each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from memfit.capture.replacements import patched
from memfit.capture.trace_types import NO_INDEX, Op, Phase, TensorRef, Trace

CHUNKS = 8
_NEAR = 4
"""A likelihood follows its softmax within so many ops."""
_HALVES = (torch.bfloat16, torch.float16)
_FORWARD = (Phase.FORWARD, Phase.LOSS)
_MOVES = ("aten.clone.default", "aten._log_softmax.default", "aten._to_copy.default")
"""Ops that read values one by one: it makes no difference whether they are cast before or after."""
_whole = F.cross_entropy  # also while it is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """How a step computes its cross entropies over so many `classes`: in `chunks` of rows.

    `inside` says that the model computes them in its forward; else they are in a loss outside it. With `casts` the
    casts of logits to float32 are left to the chunks.
    """

    classes: int
    inside: bool
    casts: bool
    chunks: int = CHUNKS

    def with_chunks(self, chunks: int) -> ChunkedLoss:
        """Return the same in another number of chunks."""
        return replace(self, chunks=chunks)


def chunked_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    chunks: int = CHUNKS,
) -> torch.Tensor:
    """Compute `F.cross_entropy` of logits (rows, classes) and classes (rows,), a chunk of rows at a time.

    Each chunk of half-precision logits is computed in float32, and all again in the backward; nothing but its sum is
    kept. Give logits as the model makes them, without `.float()`. What cannot be done in chunks (weights,
    probabilities, no sum) is done at once.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    able = logits.dim() == 2 and targets.dim() == 1 and weight is None and reduction in ("mean", "sum")
    if not able:
        return _whole(_at_least_float32(logits), targets, weight, reduction=reduction, **options)
    total: Any = 0.0
    for rows, wanted in zip(logits.chunk(chunks), targets.chunk(chunks), strict=True):
        total = total + checkpoint(_summed, rows, wanted, options, use_reentrant=False, preserve_rng_state=False)
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


def _summed(rows: torch.Tensor, wanted: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return _whole(_at_least_float32(rows), wanted, reduction="sum", **options)


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype in _HALVES else tensor


@contextlib.contextmanager
def chunked_losses(setting: ChunkedLoss) -> Iterator[list[int]]:
    """Compute cross entropies over the setting's classes in chunks inside the block, on this thread.

    Gives the rows of each that was.
    """
    rows: list[int] = []

    def in_chunks(original: Any) -> Any:
        def cross_entropy(
            input: torch.Tensor,
            target: torch.Tensor,
            weight: torch.Tensor | None = None,
            size_average: bool | None = None,
            ignore_index: int = -100,
            reduce: bool | None = None,
            reduction: str = "mean",
            label_smoothing: float = 0.0,
        ) -> torch.Tensor:
            ours = input.dim() == 2 and input.shape[-1] == setting.classes and target.dim() == 1 and weight is None
            plain = size_average is None and reduce is None and reduction in ("mean", "sum")
            if ours and plain and input.requires_grad and torch.is_grad_enabled():
                rows.append(input.shape[0])
                return chunked_cross_entropy(
                    input, target, None, ignore_index, reduction, label_smoothing, chunks=setting.chunks
                )
            if setting.casts and input.shape[-1:] == (setting.classes,):
                input = _at_least_float32(input)
            return original(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)

        return cross_entropy

    def not_cast(original: Any) -> Any:
        def cast(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            ours = tensor.dtype in _HALVES and tensor.dim() > 1 and tensor.shape[-1] == setting.classes
            if ours and tensor.requires_grad and torch.is_grad_enabled():
                return tensor
            return original(tensor, *args, **options)

        return cast

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(F, "cross_entropy", in_chunks))
        if setting.casts:
            stack.enter_context(patched(torch.Tensor, "float", not_cast))
        yield rows


# -- What a trace says of its losses ----------------------------------------------------------------------------------


def find_logits(trace: Trace) -> TensorRef | None:
    """Return what the largest softmax reads whose result a negative log likelihood follows."""
    found = (op.inputs[0] for _, op in find_softmaxes(trace))
    return max(found, key=lambda ref: math.prod(ref.shape), default=None)


def find_softmaxes(trace: Trace, classes: int | None = None) -> list[tuple[int, Op]]:
    """Return the softmaxes of cross entropies in the forward, over so many classes, with their places in the step."""
    found = []
    for index, op in enumerate(trace.ops):
        if op.phase in _FORWARD and op.name == "aten._log_softmax.default" and len(op.inputs[0].shape) == 2:
            following = trace.ops[index + 1 : index + 1 + _NEAR]
            if any(_is_likelihood(each) for each in following) and classes in (None, op.inputs[0].shape[-1]):
                found.append((index, op))
    return found


def _is_likelihood(op: Op) -> bool:
    return op.name.startswith("aten.nll_loss")


def find_chunkable(trace: Trace) -> ChunkedLoss | None:
    """Return how the largest cross entropy of a step can be computed in chunks; None where an engine could not.

    Whether the step calls torch's own function is not in its trace: `is_chunked` tells, of a trace with it replaced.
    """
    logits = find_logits(trace)
    if logits is None or trace.mesh or trace.pipelines:
        return None
    classes = logits.shape[-1]
    softmaxes = find_softmaxes(trace, classes)
    model = [call for call in trace.calls if call.module == "" and call.phase is Phase.FORWARD]
    inside = {any(call.begin <= index < call.end for call in model) for index, _ in softmaxes}
    exact = all(op.outputs[0].dtype in ("float32", "float64") for _, op in softmaxes)
    outside = all(op.phase is Phase.LOSS for _, op in softmaxes)
    # Engines know the loss by calls of the model itself: one is around it, or comes before it.
    if not model or not exact or not (inside == {True} or (inside == {False} and outside)):
        return None
    return ChunkedLoss(classes=classes, inside=inside == {True}, casts=_casts_are_for_softmax(trace, classes))


def _casts_are_for_softmax(trace: Trace, classes: int) -> bool:
    """Return whether logits are cast to float32, and every reader of such a cast in the forward is a softmax."""
    halves = ("bfloat16", "float16")
    casts: set[int] = set()
    for op in trace.ops:
        if op.phase not in _FORWARD:
            continue
        source = op.inputs[0] if op.inputs else None
        result = op.outputs[0] if op.outputs else None
        if source is None or result is None:
            continue
        if (
            op.name == "aten._to_copy.default"
            and (source.dtype in halves and result.dtype == "float32")
            and len(source.shape) > 1
            and source.shape[-1] == classes
        ):
            casts.add(result.storage)
        elif any(ref.storage in casts for ref in op.inputs) and not op.view:
            if op.name not in _MOVES:
                return False
            if op.name == "aten.clone.default":
                casts.add(result.storage)
    return bool(casts)


def is_chunked(trace: Trace, plain: Trace, setting: ChunkedLoss) -> bool:
    """Return whether all cross entropies over the setting's classes are in chunks in a trace, and none is whole."""
    expected = []
    for _, op in find_softmaxes(plain, setting.classes):
        rows = op.inputs[0].shape[0]
        each = -(-rows // setting.chunks)  # as torch.chunk divides
        expected += [min(each, rows - begin) for begin in range(0, rows, each)]
    found = [op.inputs[0].shape[0] for _, op in find_softmaxes(trace, setting.classes)]
    return sorted(found) == sorted(expected) and len(found) > len(find_softmaxes(plain, setting.classes))


def find_copies(trace: Trace, logits: TensorRef) -> list[int]:
    """Return storages of the logits' size that the loss makes, but for the last gradient, which the model takes."""
    classes, count = logits.shape[-1], math.prod(logits.shape)
    owned = {number for module in trace.modules for number in (*module.parameters, *module.buffers)}
    made: dict[int, Phase] = {}
    for index, op in enumerate(trace.ops):
        for ref in op.outputs:
            number = ref.storage
            if (
                number == NO_INDEX
                or number in owned
                or trace.storages[number].alloc_at != index
                or op.phase is Phase.OPTIMIZER
            ):
                continue
            if ref.shape[-1:] == (classes,) and count <= math.prod(ref.shape) <= 2 * count:
                made.setdefault(number, op.phase)
    forward = [number for number, phase in made.items() if phase is not Phase.BACKWARD]
    backward = [number for number, phase in made.items() if phase is Phase.BACKWARD]
    return forward[1:] + backward[:-1]
