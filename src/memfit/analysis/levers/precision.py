"""bfloat16 where the step uses float32: for compute, for parameters, gradients and state, for sums over ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.analysis.levers.case import Case
from memfit.analysis.levers.lever import Lever
from memfit.capture import Step
from memfit.errors import InputError
from memfit.sharding.options import ShardDtypes
from memfit.torch_private.pytree import tree_map_only


def precision(case: Case) -> Iterator[Lever]:
    """Nothing where no parameter is float32."""
    trained = [each for each in case.trace.parameters if each.trainable]
    if not any(each.dtype == "float32" for each in trained):
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
        captured = case.captured(in_bfloat16(case.step), what=name)
        if captured is not None:
            how = "model.to(torch.bfloat16) before the optimizer is made, and inputs that are float32"
            yield case.lever(name, how, case.effect(captured), "captured", same_numbers=False)
    if case.target.ranks > 1 and case.report.problem.options.shard.parallel == "fsdp":
        yield from _sums(case)


def _sums(case: Case) -> Iterator[Lever]:
    """Gradients summed over the ranks in bfloat16; parameters are gathered in the dtype that they were."""
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


def in_bfloat16(step: Step) -> Step:
    """The step with model and inputs in bfloat16. What exists is copied without its data and left as it was."""
    given = step.model
    if isinstance(given, nn.Module):
        model: nn.Module | Callable[[], nn.Module] = _copied(given)
    else:
        make: Callable[[], nn.Module] = given

        def built() -> nn.Module:
            return make().to(torch.bfloat16)

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
    """A tensor without data, in bfloat16 where it was floating point."""
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
