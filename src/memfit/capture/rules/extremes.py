"""Extremes and medians of a whole tensor, whose gradient on CPU depends on a value; quantiles and picked elements, for
which C++ compares the devices of their operands: all of them are meta tensors when a rule is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.rules import Rule, RuleContext
from memfit.torch_private.dispatch import below_autograd

_aten = torch.ops.aten


def _of_all(name: str) -> Rule:
    def rule(context: RuleContext, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Without a dimension the gradient is shared by all elements that equal the result."""
        if args or kwargs or not input.requires_grad or not torch.is_grad_enabled():
            return NotImplemented
        return _Extreme.apply(input, name)

    return rule


class _Extreme(torch.autograd.Function):
    """FunctionsManual.cpp, `evenly_distribute_backward`, which on CPU asks whether the result is NaN: none is here."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, name: str) -> Tensor:
        with below_autograd():
            value = getattr(_aten, name)(input)
        ctx.save_for_backward(input, value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, value = ctx.saved_tensors
        with below_autograd():
            value.isnan()
            mask = input == value
            spread = grads[0].new_zeros(input.shape, dtype=input.dtype)
            return spread.masked_fill_(mask, grads[0] / mask.sum()), None


def _quantile(name: str) -> Rule:
    def rule(context: RuleContext, input: Tensor, q: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A number is made a tensor, as in C++ (ATen/native/Sorting.cpp), beside the input and without a value."""
        return getattr(torch, name)(input, q if isinstance(q, Tensor) else input.new_full((), q), *args, **kwargs)

    return rule


def _as_it_is(context: RuleContext, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


_COMPARING = {**{name: _quantile(name) for name in ("quantile", "nanquantile")}, "take_along_dim": _as_it_is}
FUNCTIONS = {
    "cpu": {**_COMPARING, **{name: _of_all(name) for name in ("max", "min", "median", "nanmedian")}},
    "cuda": _COMPARING,
}
