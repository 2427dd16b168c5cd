"""`F.linear_cross_entropy` in chunks (torch 2.13): the FLOPs of its products, and the buffers of a chunk.

With `options`, the head and the loss are one custom op, `torch_nn._linear_cross_entropy_batch_chunked`, which computes
the gradients in its forward; without a reduction they are computed in the backward, op by op. Defined in torch by
torch/nn/modules/linear_cross_entropy.py, in Python: what the op holds is found by running that code on meta tensors.
Without `options` the function is composed of `linear` and `cross_entropy`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.rules.base import Rule, RuleContext
from memfit.torch_private.dispatch import (
    DisableTorchFunction,
    DispatchMode,
    EnableTorchFunction,
    TensorBase,
    disable_current_modes,
)
from memfit.torch_private.kernels import chunked_cross_entropy
from memfit.torch_private.storages import key_of

_META = torch.device("meta")
_DEVICE_GETTER = vars(TensorBase)["device"].__get__
_RETAINS = 11
"""The position of `allow_retain_graph`, which only the backward asks for."""


class _OnDevice(TorchFunctionMode):
    """Answers with the target's device, by which the code chooses its buffers, and makes meta tensors."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device = torch.device(device_type)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE_GETTER:
            return self.device
        kwargs = kwargs or {}
        with DisableTorchFunction():  # the capture's own mode may be below
            return func(*args, **({**kwargs, "device": _META} if kwargs.get("device") is not None else kwargs))


class _Held(DispatchMode):
    """Adds up what the ops inside make and hold, kernels' own buffers included."""

    def __init__(self, context: RuleContext, workspaces: dict[str, Rule], given: list[Tensor]) -> None:
        super().__init__()
        self.context = context
        self.workspaces = workspaces
        self.known = {key_of(tensor.untyped_storage()) for tensor in given}
        self.level = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in tensors_of((result,)):
            storage = tensor.untyped_storage()
            key, n_bytes = key_of(storage), storage.nbytes()
            if key not in self.known:
                self.known.add(key)
                self.level += n_bytes
                weakref.finalize(storage, self._free, key, n_bytes)
        rule = self.workspaces.get(str(func))
        inside = rule(self.context, func, args, kwargs, result) if rule is not None else 0
        self.peak = max(self.peak, self.level + inside)
        return result

    def _free(self, key: int, n_bytes: int) -> None:
        self.known.discard(key)
        self.level -= n_bytes


def _chunked(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return what the op holds at its highest beyond its results: logits of a chunk, accumulators, casts."""
    return _held(context, (*args[:_RETAINS], *args[_RETAINS + 1 :]))


def _unreduced(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The forward without a reduction: losses of every row, and no gradient."""
    tensors, (ignore_index, chunk, policy, dtype) = args[:5], args[5:9]
    given = (*tensors, "none", ignore_index, 0.0, chunk, policy, dtype, False, False, False)
    return _held(context, given)


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _held(context: RuleContext, given: Any) -> int:
    from memfit.capture.rules import rules_for  # which lists this file

    with disable_current_modes(), torch.no_grad():
        given = map_tensors(given, _meta_like)
        mode = _Held(context, rules_for(context.device_type).workspaces, tensors_of(given))
        with EnableTorchFunction(), _OnDevice(context.device_type), mode:
            made = chunked_cross_entropy()(*given)
        level = mode.level
    del made
    return mode.peak - level


WORKSPACES = {
    device: {
        "torch_nn._linear_cross_entropy_batch_chunked.default": _chunked,
        "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": _unreduced,
    }
    for device in ("cpu", "cuda")
}
