"""Levers that capture a changed step: the optimizer's step, a chunked loss, a smaller micro-batch, bfloat16."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.analysis.levers.case import Case, Effect, Lever, attempt
from memfit.analysis.levers.lifetimes import with_sizes
from memfit.capture import (
    CHUNKS,
    CapturedOn,
    Category,
    ChunkedLoss,
    Implementation,
    Step,
    Trace,
    batch_rows,
    chunked_losses,
    divide_step,
    find_copies,
    find_logits,
    implementations_of_step,
    step_with,
    trace,
)
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.sharding import ShardDtypes
from memfit.torch_private.pytree import tree_map_only

_WAYS: dict[Implementation, tuple[str, str]] = {
    "fused": ("fused optimizer", "fused=True"),
    "single": ("optimizer one tensor at a time", "foreach=False"),
}


def optimizer(case: Case) -> Iterator[Lever]:
    """Yield levers that lower the peak of the optimizer's step; what is before that step limits what they save."""
    if not case.matters(case.peak_bytes - case.peak_elsewhere_bytes):
        return
    named = case.trace.optimizer.split(", ")[0] or "AdamW"
    if case.step is None or (case.step.run is not None and case.step.optimizer is None):
        yield from _without_temporaries(case, named)
        return
    kinds = implementations_of_step(case.step)
    for kind, (name, option) in _WAYS.items():
        if kind not in kinds:
            continue
        with step_with(case.step, kind) as changed:
            captured = case.captured(changed, what=name)
        if captured is None:
            continue
        if captured.fingerprint == case.trace.fingerprint:
            return  # the step does this already, and the ways after it need no less
        how = f"torch.optim.{named}(model.parameters(), ..., {option})"
        yield case.lever(name, how, case.effect(captured), "captured", option="--optimizer-lever")


def _without_temporaries(case: Case, named: str) -> Iterator[Lever]:
    """Yield the lever of a fused optimizer step, which needs no temporaries."""
    left = case.timeline.during_bytes - np.where(case.in_optimizer, case.row(Category.TEMPORARY), 0)
    yield case.lever(
        "fused optimizer",
        f"torch.optim.{named}(model.parameters(), ..., fused=True)",
        Effect(peak_bytes=int(left.max()), step_ms=case.step_ms),
        "estimated",
        assumes="a fused step makes no temporaries",
        timed=False,
    )


# The loss on some rows of the logits at a time


_NAME = "chunked loss"
_HOW = "loss = memfit.engines.chunked_cross_entropy(logits.flatten(0, -2), targets.flatten())  # no .float()"


def loss(case: Case) -> Iterator[Lever]:
    """Yield the lever of a chunked cross entropy: captured where the step calls torch's own, else estimated."""
    logits = find_logits(case.trace)
    if logits is None or (case.report.plan is not None and case.report.plan.chunked_loss):
        return
    copies = find_copies(case.trace, logits)
    there = [case.trace.storages[each].bytes for each in copies]
    if not case.matters(sum(there)):
        return
    if case.step is not None:
        step, early = case.step, None if case.early is None else case.early.with_chunked_loss
        chunks = CHUNKS if case.early is None else case.early.chunks
        captured = case.noted(
            attempt(lambda: capture_with_chunked_loss(step, case.target, logits.shape[-1], case.trace.captured_on))
            if early is None
            else early.result(),
            what=_NAME,
        )
        if captured is not None:
            how = _HOW if chunks == CHUNKS else _HOW.replace("flatten())", f"flatten(), chunks={chunks})")
            yield case.lever(_NAME, how, case.effect(captured), "captured")
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


def capture_with_chunked_loss(
    step: Step, target: Target, classes: int, where: CapturedOn | None = None, *, chunks: int = CHUNKS
) -> Trace | None:
    """Capture the step with its cross entropies over so many classes in chunks; None where it calls none of torch's."""
    setting = ChunkedLoss(classes=classes, inside=False, casts=True, chunks=chunks)
    with chunked_losses(setting) as calls:
        captured = trace(step, target=target, **(where or {}))
    return captured if calls else None


# A smaller micro-batch, accumulated to the same batch


_ADVICE = "what has a row for each sample must be halved too: take labels from the batch, or write labels[:len(output)]"


def micro_batch(case: Case) -> Iterator[Lever]:
    """Yield the lever of running half of the batch at a time; none where the batch cannot be halved."""
    step, what = case.step, "smaller micro-batch"
    if step is None or step.run is not None:
        case.left_out.append(f"{what}: only a Step with a batch can be halved, not a trace or a loop of one's own")
        return
    rows = batch_rows(step.batch)
    if rows is None or rows % 2:
        found = "tensors of different lengths" if rows is None else f"{rows} row{'s' if rows > 1 else ''}"
        case.left_out.append(f"{what}: a batch of {found} cannot be halved")
        return
    changed = divide_step(step, 2)
    times = changed.accumulation_steps
    captured = case.captured(changed, what=what, advice=_ADVICE)
    if captured is not None:
        yield case.lever(
            f"micro-batch of {rows // 2} instead of {rows}",
            f"(loss / {times}).backward() on {times} micro-batches, then optimizer.step()",
            case.effect(captured),
            "captured",
            option=f"--batch {rows // 2} --accumulation-steps {times}",
        )


# bfloat16 where the step uses float32


def precision(case: Case) -> Iterator[Lever]:
    """Yield the levers of autocast and bfloat16; none where no parameter is float32."""
    if not has_float32_parameters(case.trace):
        return
    device = case.target.device.type
    if case.step is not None and case.step.run is None:
        if case.step.autocast is None:
            name = "bfloat16 compute"
            captured = case.captured(replace(case.step, autocast=torch.bfloat16), what=name)
            if captured is not None:
                how = f'with torch.autocast("{device}", dtype=torch.bfloat16): loss = ...'
                option = "--autocast bfloat16"
                yield case.lever(name, how, case.effect(captured), "captured", same_numbers=False, option=option)
        name = "bfloat16 parameters, gradients and state"
        step, early = case.step, case.early.in_bfloat16 if case.early is not None and case.has_early else None
        captured = case.noted(
            attempt(lambda: case.capture(lambda: capture_in_bfloat16(step, case.target, case.trace.captured_on)))
            if early is None
            else early.result(),
            what=name,
        )
        if captured is not None:
            how = "model.to(torch.bfloat16) before the optimizer is made, and inputs that are float32"
            yield case.lever(name, how, case.effect(captured), "captured", same_numbers=False)
    if case.target.ranks > 1 and case.report.problem.options.shard.parallel == "fsdp":
        yield from _sums(case)


def _sums(case: Case) -> Iterator[Lever]:
    """Yield the lever of reducing gradients in bfloat16; parameters are gathered in the dtype that they were."""
    shard, name = case.report.problem.options.shard, "gradients summed in bfloat16"
    if shard.reduce_dtype == "bfloat16":
        return
    changed = replace(shard, reduce_dtype="bfloat16")
    try:
        effect = case.effect(shard=changed)
    except InputError as error:
        case.left_out.append(f"{name}: {error}")
        return
    dtypes = ShardDtypes.of(case.trace, changed)
    policy = {"param_dtype": dtypes.param and f"torch.{dtypes.param}", "reduce_dtype": "torch.bfloat16"}
    if case.trace.autocast is not None:
        policy["cast_forward_inputs"] = "False"
    options = ", ".join(f"{option}={value}" for option, value in policy.items() if value is not None)
    how = f"fully_shard(..., mp_policy=MixedPrecisionPolicy({options}))"
    if case.trace.autocast is not None:
        how += ", with autocast as it is"
    yield case.lever(name, how, effect, "captured", same_numbers=False, option="--reduce-dtype bfloat16")


def has_float32_parameters(trace: Trace) -> bool:
    """Return whether a parameter that is trained is float32."""
    return any(each.trainable and each.dtype == "float32" for each in trace.parameters)


def capture_in_bfloat16(step: Step, target: Target, where: CapturedOn | None = None) -> Trace:
    """Capture the step with model and inputs in bfloat16, where no engine casts them."""
    mesh = where if where and "mesh" in where else {}
    return trace(cast_to_bfloat16(step), target=target, **mesh)


def cast_to_bfloat16(step: Step) -> Step:
    """Return the step with model and inputs in bfloat16. What exists is copied without its data and left as it was."""
    given = step.model
    if isinstance(given, nn.Module):
        model: nn.Module | Callable[[], nn.Module] = _copied(given)
    else:
        make: Callable[..., nn.Module] = given

        @functools.wraps(make)
        def built(**arguments: Any) -> nn.Module:
            return make(**arguments).to(torch.bfloat16)

        model = built
    optimizer: Any = step.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        kind: Any = type(optimizer)
        known = inspect.signature(kind).parameters
        defaults = {name: value for name, value in optimizer.defaults.items() if name in known}

        def made(parameters: Any) -> torch.optim.Optimizer:
            return kind(parameters, **defaults)

        optimizer = made
    batch = tree_map_only(torch.Tensor, _emptied, step.batch)
    return replace(step, model=model, batch=batch, optimizer=optimizer)


def _copied(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_emptied(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _emptied(buffer)
    return copy.deepcopy(model, memo)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data, in bfloat16 where it was floating point."""
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
