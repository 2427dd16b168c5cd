"""The methods of flat DTensors that optimizers call parameter by parameter, straight on the local tensors.

An op of a tensor subclass goes to C++, from there to `__torch_dispatch__` and back, some microseconds each time; an
optimizer without `foreach`, the default on a CPU, does eight for every parameter. Outside of autograd, on numbers and
on tensors of the same home, nothing of that is needed: these methods of the subclass run the op on the local tensor.
With anything else they are torch's own, which end in the rules of `flat_dtensor.py`: what is right and what is refused
is decided there alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

_IN_PLACE = ("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "neg_", "zero_", "clamp_")
_OUT_OF_PLACE = (
    "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "abs", "square", "sign",
    "__add__", "__sub__", "__mul__", "__truediv__", "__neg__",
)  # fmt: skip
_NUMBERS = (float, int, bool)


def attach_methods(kind: type[Any]) -> None:
    """Give a class of flat DTensors, with `local` and `home`, its methods."""
    for name in _IN_PLACE:
        setattr(kind, name, _in_place(kind, name))
    for name in _OUT_OF_PLACE:
        setattr(kind, name, _out_of_place(kind, name))


def _in_place(kind: type[Any], name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = None if torch.is_grad_enabled() else _local(kind, self.home, args, kwargs)
        if local is None:
            return own(self, *args, **kwargs)
        own(self.local, *local, **kwargs)
        increment_version(self)  # autograd may have kept it
        return self

    method.__name__ = name
    return method


def _out_of_place(kind: type[Any], name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = None if torch.is_grad_enabled() else _local(kind, self.home, args, kwargs)
        if local is None:
            return own(self, *args, **kwargs)
        return self.home.wrap(own(self.local, *local, **kwargs))

    method.__name__ = name
    return method


def _local(kind: type[Any], home: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return what the op on the local tensor is given; None where a rule has to decide."""
    found = []
    for each in args:
        if type(each) is kind and each.home is home:
            found.append(each.local)
        elif type(each) in _NUMBERS:
            found.append(each)
        else:
            return None
    for each in kwargs.values():
        if type(each) not in _NUMBERS:
            return None
    return found
