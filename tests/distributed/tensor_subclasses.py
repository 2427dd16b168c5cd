"""Tensor subclasses for weights, with FSDP2's extension points; what they do is written out, so that it can be read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_ALIKE = {
    _aten.detach.default, _aten.clone.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.view.default,
    _aten.as_strided.default, _aten.new_zeros.default, _aten.copy_.default, _aten.empty_like.default,
    _aten._to_copy.default,
}  # fmt: skip
"""Ops whose result is a weight again: what FSDP2 itself calls."""


class ByteWeight(torch.Tensor):
    """A gathered weight in 8 bits with one scale; ops see what it stands for, in the dtype of compute."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> ByteWeight:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device
        )
        made.data8, made.scale = data, scale
        return made

    data8: torch.Tensor
    scale: torch.Tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ByteWeight({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, size: Any, stride: Any) -> ByteWeight:
        return ByteWeight(inner["data8"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten.detach.default, _aten.view.default, _aten.as_strided.default):
            return cls(func(args[0].data8, *args[1:]), args[0].scale, args[0].dtype)
        args = tree_map_only(cls, lambda each: each.data8.to(each.dtype) * each.scale.to(each.dtype), args)
        return func(*args, **(kwargs or {}))


class CastWeight(torch.Tensor):
    """A weight in full precision that is gathered in 8 bits, with a scale that all ranks agree on (as float8 is)."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CastWeight:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    inner: torch.Tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CastWeight({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> CastWeight:
        return CastWeight(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        found = func(*plain_args, **plain_kwargs)
        if func._schema.name.endswith("_") and not func._schema.name.startswith("aten::_foreach"):
            return args[0]
        return tree_map_only(torch.Tensor, cls, found) if func in _ALIKE else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.inner.abs().max() if self.inner.numel() else self.inner.new_zeros(())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest.clamp(min=1e-6) / 100
        return ((self.inner / scale).to(torch.float8_e4m3fn),), (scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,), (scale,) = gathered, metadata
        if out is not None:
            assert isinstance(out, ByteWeight) and out.data8.data_ptr() == data.data_ptr()
            out.scale = scale
            return None
        return ByteWeight(data, scale, param_dtype), (data,)


class PairWeight(torch.Tensor):
    """A weight as the sum of a coarse and a fine tensor of two dtypes, both of which are gathered."""

    @staticmethod
    def __new__(cls, coarse: torch.Tensor, fine: torch.Tensor) -> PairWeight:
        made = torch.Tensor._make_wrapper_subclass(
            cls, fine.size(), strides=fine.stride(), dtype=fine.dtype, device=fine.device
        )
        made.coarse, made.fine = coarse, fine
        return made

    coarse: torch.Tensor
    fine: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor) -> PairWeight:
        coarse = value.to(torch.bfloat16)
        return cls(coarse, value - coarse.to(value.dtype))

    def value(self) -> torch.Tensor:
        return self.coarse.to(self.fine.dtype) + self.fine

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PairWeight({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["coarse", "fine"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> PairWeight:
        return PairWeight(inner["coarse"], inner["fine"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALIKE and func is not _aten.copy_.default:
            halves = [func(each, *args[1:], **kwargs) for each in (args[0].coarse, args[0].fine)]
            if isinstance(halves[0], (list, tuple)):
                return [cls(*each) for each in zip(*halves, strict=True)]
            return cls(*halves)
        values = tree_map_only(cls, lambda each: each.value(), args)
        found = func(*values, **kwargs)
        if func._schema.is_mutable:
            changed, new = (args[0], values[0]) if isinstance(args[0], list) else ([args[0]], [values[0]])
            for each, value in zip(changed, new, strict=True):
                if isinstance(each, cls):
                    made = cls.of(value)
                    each.coarse.copy_(made.coarse)
                    each.fine.copy_(made.fine)
            return args[0]
        return found

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert isinstance(module, nn.Module) and mp_policy.param_dtype is None
        rows = -(-outer_size[0] // mesh.size())
        padded = []
        for each in (self.coarse, self.fine):
            whole = each.new_zeros((rows, *each.shape[1:]))
            whole[: each.shape[0]] = each
            padded.append(whole)
        return tuple(padded), None

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            assert isinstance(out, PairWeight)
            return None
        return PairWeight(*gathered), gathered
