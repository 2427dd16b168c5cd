"""The loss on some rows of the logits at a time, where what it makes of the logits fills the peak."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from memfit.analysis.levers.case import Case
from memfit.analysis.levers.lever import Lever
from memfit.analysis.levers.lives import with_sizes
from memfit.capture import NEVER, Op, Phase, TensorRef, Trace
from memfit.capture.environment import patched
from memfit.engines.loss import CHUNKS, chunked_cross_entropy

_NAME = "chunked loss"
_HOW = "loss = memfit.engines.chunked_cross_entropy(logits.flatten(0, -2), targets.flatten())  # no .float()"
_NEAR = 4
"""A likelihood follows its softmax within so many ops."""


def loss(case: Case) -> Iterator[Lever]:
    """The step with a chunked cross entropy, where it calls torch's own; else an estimate."""
    logits = _logits(case.trace)
    if logits is None:
        return
    copies = _copies(case.trace, logits)
    there = [case.trace.storages[each].bytes for each in copies]
    if not case.matters(sum(there)):
        return
    if case.step is not None:
        with chunked_losses(logits.shape[-1]) as calls:
            captured = case.captured(case.step, what=_NAME)
        if captured is not None and calls:
            yield case.lever(_NAME, _HOW, case.effect(captured), "captured")
            return
    parts = {number: -(-case.trace.storages[number].bytes // CHUNKS) for number in copies}
    yield case.lever(
        _NAME,
        _HOW,
        case.effect(with_sizes(case.trace, parts)),
        "estimated",
        assumes=f"copies and gradients of the logits in {CHUNKS} chunks",
        timed=False,
    )


@contextlib.contextmanager
def chunked_losses(classes: int) -> Iterator[list[int]]:
    """In the block, cross entropies over so many classes are computed in chunks, of logits that are not cast before.

    Gives the rows of each that was.
    """
    rows: list[int] = []

    def in_chunks(original: Any) -> Any:
        def cross_entropy(input: torch.Tensor, target: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            given = {name: value for name, value in options.items() if value is not None}
            if args or {"size_average", "reduce"} & given.keys() or input.dim() != 2 or input.shape[-1] != classes:
                return original(input, target, *args, **options)
            rows.append(input.shape[0])
            return chunked_cross_entropy(input, target, **given)

        return cross_entropy

    def not_cast(original: Any) -> Any:
        def cast(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            halves = tensor.dtype in (torch.bfloat16, torch.float16)
            if halves and tensor.dim() > 1 and tensor.shape[-1] == classes and tensor.requires_grad:
                return tensor
            return original(tensor, *args, **options)

        return cast

    with patched(F, "cross_entropy", in_chunks), patched(torch.Tensor, "float", not_cast):
        yield rows


def _logits(trace: Trace) -> TensorRef | None:
    """What the largest softmax reads that a likelihood of one class a row follows."""
    found = []
    for index, op in enumerate(trace.ops):
        if op.phase in (Phase.FORWARD, Phase.LOSS) and op.name == "aten._log_softmax.default":
            following = trace.ops[index + 1 : index + 1 + _NEAR]
            if len(op.inputs[0].shape) == 2 and any(_is_likelihood(each) for each in following):
                found.append(op.inputs[0])
    return max(found, key=lambda ref: math.prod(ref.shape), default=None)


def _is_likelihood(op: Op) -> bool:
    return op.name.startswith("aten.nll_loss")


def _copies(trace: Trace, logits: TensorRef) -> list[int]:
    """Storages as large as the logits that are made of them, but for the last gradient, which the model takes."""
    classes, count = logits.shape[-1], math.prod(logits.shape)
    owned = {number for module in trace.modules for number in (*module.parameters, *module.buffers)}
    made: dict[int, Phase] = {}
    for index, op in enumerate(trace.ops):
        for ref in op.outputs:
            number = ref.storage
            if (
                number == NEVER
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
