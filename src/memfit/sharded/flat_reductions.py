"""Reductions of flat DTensors over all elements: on the local tensors, then over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from memfit.sharded.comm import ShardComm
from memfit.torch_private.dispatch import DisableTorchFunction
from memfit.torch_private.dtensor import LocalDTensor

if TYPE_CHECKING:
    from memfit.sharded.flat_dtensor import FlatDTensor, FlatSpec

_SHORT = (torch.float16, torch.bfloat16)
"""Dtypes in which nothing is summed."""


class WholeNorm(torch.Tensor):
    """A norm, or what was made of norms: the same on every rank, with the methods that FSDP2's scripts call on theirs.

    FSDP2's norms are DTensors, `clip_grad_norm_(...).full_tensor()` is the usual line; ops give such a tensor again.
    """

    @classmethod
    def __torch_function__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            made = func(*args, **(kwargs or {}))
            return made.as_subclass(cls) if type(made) is torch.Tensor else made  # gradients stay what they are

    def full_tensor(self) -> torch.Tensor:
        """Return the plain tensor."""
        with DisableTorchFunction():
            return self.as_subclass(torch.Tensor)

    def to_local(self) -> torch.Tensor:
        """Return the plain tensor, which every rank has."""
        return self.full_tensor()


def is_flat(value: object) -> TypeGuard[FlatDTensor]:
    """Return whether a value is a flat DTensor, the only kind of `LocalDTensor`."""
    return isinstance(value, LocalDTensor)


def reduce_all(name: str, value: FlatDTensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Return a reduction over all elements."""
    if name in ("linalg_vector_norm", "norm"):
        order = given.get("ord", given.get("p"))
        return reduce_norms([value], 2.0 if order is None else float(order), given.get("dtype"))[0]
    spec, local = value.flat_spec, value.local
    dtype = given.get("dtype")
    if name == "count_nonzero":
        return _summed((local != 0).sum(), spec, name).to(value.device)
    if name in ("sum", "mean"):
        exact = dtype or (value.dtype if value.dtype.is_floating_point or value.dtype.is_complex else torch.int64)
        if name == "mean" and not exact.is_floating_point and not exact.is_complex:
            local.mean(dtype=dtype)  # raises torch's own error
        wide = torch.float32 if exact in _SHORT else exact
        total = _summed(local.sum(dtype=wide), spec, name)
        return (total / math.prod(spec.shape) if name == "mean" else total).to(value.device, exact)
    return _extreme(name, value)


def _extreme(name: str, value: FlatDTensor) -> torch.Tensor:
    """Return the largest or the smallest element, which any and all are of truth values; NaN where one is."""
    spec, local, kind = value.flat_spec, value.local, value.dtype
    if name in ("any", "all"):
        local, kind = local != 0, torch.uint8 if kind is torch.uint8 else torch.bool
    floats = local.dtype.is_floating_point
    wide = local.to((torch.float32 if local.dtype in _SHORT else local.dtype) if floats else torch.int64)
    smallest = name in ("min", "amin", "all")
    if smallest:
        wide = -wide if floats else ~wide  # in the opposite order; integers have one more negative number
    least = -math.inf if floats else torch.iinfo(torch.int64).min
    found = (wide.max() if wide.numel() else wide.new_full((), least)).detach().to(spec.device)
    found = _largest(found.reshape(1), spec.links, f"all-reduce of {name}").reshape(())
    if smallest:
        found = -found if floats else ~found
    return found.to(value.device, kind)


def _largest(values: torch.Tensor, links: Sequence[ShardComm], about: str) -> torch.Tensor:
    """Return the largest of each element over ranks; backends lose NaN, which is therefore sent beside."""
    if not values.is_floating_point():
        shared = values.clone()
        for link in links:
            link.all_reduce(shared, about, largest=True).wait()
        return shared
    missing = values.isnan()
    shared = torch.stack([values.masked_fill(missing, -math.inf), missing.to(values.dtype)])
    for link in links:
        link.all_reduce(shared, about, largest=True).wait()
    return shared[0].masked_fill(shared[1] > 0, math.nan)


def _summed(value: torch.Tensor, spec: FlatSpec, name: str) -> torch.Tensor:
    shared = value.detach().to(spec.device).reshape(1).clone()
    for link in spec.links:
        link.all_reduce(shared, f"all-reduce of {name}").wait()
    return shared.reshape(())


def reduce_norms(values: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the norms of whole tensors; those of flat DTensors by one collective for all of them."""
    found: list[torch.Tensor] = []
    by_links: dict[tuple[ShardComm, ...], list[int]] = {}
    for number, value in enumerate(values):
        if not is_flat(value):
            found.append(torch.linalg.vector_norm(value, order, dtype=dtype))
            continue
        by_links.setdefault(value.flat_spec.links, []).append(number)
        local, kind = value.local, dtype or (torch.float32 if value.dtype in _SHORT else value.dtype)
        empty = math.inf if order < 0 else 0.0
        norm = (
            torch.linalg.vector_norm(local, order, dtype=kind)
            if local.numel()
            else local.new_full((), empty, dtype=kind.to_real())
        )
        found.append(norm.to(value.flat_spec.device))
    for links, numbers in by_links.items():
        widest = torch.float64 if any(found[number].dtype == torch.float64 for number in numbers) else torch.float32
        sent = torch.stack([found[number].to(widest) for number in numbers])
        if math.isinf(order):
            sign = math.copysign(1.0, order)
            sent = _largest(sent * sign, links, "all-reduce of norms") * sign
        else:
            sent = sent**order if order else sent
            for link in links:
                link.all_reduce(sent, "all-reduce of norms").wait()
            sent = sent ** (1 / order) if order else sent
        for number, norm in zip(numbers, sent.unbind(), strict=True):
            norm = norm.to(values[number].device, (dtype or values[number].dtype).to_real())
            found[number] = norm.as_subclass(WholeNorm)
    return found
