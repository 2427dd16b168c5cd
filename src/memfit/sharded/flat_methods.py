"""The methods of flat DTensors that optimizers call parameter by parameter, straight on the local tensors.

An op of a tensor subclass goes to C++, from there to `__torch_dispatch__` and back, some microseconds each time; an
optimizer without `foreach`, the default on a CPU, does eight for every parameter. Outside of autograd, on numbers and
on tensors sharded alike, nothing of that is needed: these methods of the subclass run the op on the local tensor.
With anything else they are torch's own, which end in the rules of `flat_ops.py`: what is right and what is refused
is decided there alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.torch_private.autograd import increment_versions

_IN_PLACE = ("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "neg_", "zero_", "clamp_")
_OUT_OF_PLACE = (
    "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "abs", "square", "sign",
    "__add__", "__sub__", "__mul__", "__truediv__", "__neg__",
)  # fmt: skip
_NUMBERS = frozenset((float, int, bool))


def attach_methods(kind: type[Any]) -> None:
    """Give a class of flat DTensors, with `local` and `flat_spec`, its methods."""
    for name in _IN_PLACE:
        setattr(kind, name, _in_place(kind, name))
    for name in _OUT_OF_PLACE:
        setattr(kind, name, _out_of_place(kind, name))


def _in_place(kind: type[Any], name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not _are_plain(kind, self.flat_spec, args, kwargs):
            return own(self, *args, **kwargs)
        own(self.local, *[each.local if type(each) is kind else each for each in args], **kwargs)
        increment_versions((self,))  # autograd may have kept it
        return self

    method.__name__ = name
    return method


def _out_of_place(kind: type[Any], name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not _are_plain(kind, self.flat_spec, args, kwargs):
            return own(self, *args, **kwargs)
        local = own(self.local, *[each.local if type(each) is kind else each for each in args], **kwargs)
        return self.flat_spec.wrap(local)

    method.__name__ = name
    return method


def _are_plain(kind: type[Any], spec: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments are numbers and tensors with this spec; a rule decides about all others."""
    for each in args:
        if type(each) is kind:
            if each.flat_spec is not spec:
                return False
        elif type(each) not in _NUMBERS:
            return False
    return not kwargs or all(type(each) in _NUMBERS for each in kwargs.values())
