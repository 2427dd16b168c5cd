"""Whether a step gives the same under a plan, bit for bit: losses, gradients, and what it leaves behind."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.capture import fills_its_memory, patched
from memfit.torch_private.autograd import in_backward, post_accumulate_hooks
from memfit.torch_private.distributed_tensors import has_arrived, local_tensor, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not the same with the plan as without it. `step` counts from 0.

    `kind` is loss, gradient, parameter, buffer or random state; `largest` is the largest difference of two values,
    infinite when one of them is missing or not finite, and `part` is that as a part of the largest value without the
    plan. `rank` is where it is largest, None on one device.
    """

    kind: str
    name: str
    step: int
    largest: float
    rank: int | None = None
    part: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """How the steps with the plan compare with the same steps without it. The largest difference of a kind comes first.

    `reproducible` says whether the step without the plan gives the same when it is run twice; None when that was not
    asked, because nothing differs. With a `tolerance` the plan sums in another order: losses and gradients of the first
    step may differ by that part of their largest value, and what follows from them is not compared. On ranks,
    `chunked_in_both` says that the loss is in chunks in what the plan is compared with, too.
    """

    steps: int
    gradients: int
    differences: tuple[Difference, ...]
    reproducible: bool | None = None
    tolerance: float | None = None
    chunked_in_both: bool = False

    @property
    def equal(self) -> bool:
        """Whether everything is the same, bit for bit or within the tolerance."""
        return not self.differences

    def first(self, kind: str) -> Difference | None:
        """Return the largest difference of a kind."""
        return next((each for each in self.differences if each.kind == kind), None)


@dataclass(slots=True)
class Outcome:
    """What one step computed, in host memory."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def record_outcome(model: nn.Module) -> Iterator[Outcome]:
    """Record the losses and the last gradients of the steps that run in the block."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                stack.enter_context(_watched(name, parameter, outcome))
        stack.enter_context(patched(torch.autograd, "backward", lambda backward: _noting(backward, outcome)))
        yield outcome


@contextlib.contextmanager
def _watched(name: str, parameter: nn.Parameter, outcome: Outcome) -> Iterator[None]:
    def note(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            outcome.gradients[name] = host_copy(parameter.grad)

    had_hooks = post_accumulate_hooks(parameter) is not None
    handle = parameter.register_post_accumulate_grad_hook(note)
    try:
        yield
    finally:
        handle.remove()
        if not had_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def _noting(backward: Callable[..., Any], outcome: Outcome) -> Callable[..., Any]:
    """Wrap backward to record the losses that it starts from; backwards inside another one do not count."""

    def noting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_backward():
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            outcome.losses += [host_copy(root) for root in roots if root.numel() == 1]
        return backward(tensors, *args, **kwargs)

    return noting


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's values to host memory that torch's allocator does not count (Note [Second of two])."""
    local = local_tensor(tensor)
    if not has_arrived(tensor):
        wait_for(local)
    tensor = local
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    if not dense.numel():
        return torch.empty(dense.shape, dtype=dense.dtype)
    memory = torch.from_numpy(np.empty(dense.numel() * dense.element_size(), np.uint8)).view(dense.dtype)
    if fills_its_memory(dense):
        return memory.as_strided(dense.shape, dense.stride()).copy_(dense)  # copying a transpose would take scratch
    return memory.view(dense.shape).copy_(dense)


def compare_outcomes(planned: Outcome, plain: Outcome, step: int) -> list[Difference]:
    """Return losses and gradients of one step that are not the same."""
    names = [f"{number}" for number in range(max(len(planned.losses), len(plain.losses)))]
    losses = [dict(zip(names, each.losses, strict=False)) for each in (planned, plain)]
    return [
        *compare_tensors("loss", losses[0], losses[1], step),
        *compare_tensors("gradient", planned.gradients, plain.gradients, step),
    ]


def compare_tensors(
    kind: str, planned: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor], step: int
) -> list[Difference]:
    """Return the tensors of one kind that are not the same bit for bit, the largest difference first."""
    found = []
    for name in dict.fromkeys((*planned, *plain)):
        one, other = planned.get(name), plain.get(name)
        if one is None or other is None or not same_bits(one, other):
            largest = _largest(one, other)
            whole = 0.0 if other is None else _largest(other, torch.zeros_like(other))
            part = largest / whole if whole else math.inf
            found.append(Difference(kind=kind, name=name, step=step, largest=largest, part=part))
    return sorted(found, key=lambda each: -each.largest)


def beyond_tolerance(differences: Iterable[Difference], tolerance: float) -> list[Difference]:
    """Return the differences that another order of sums does not explain: of the first step, beyond the tolerance."""
    return [
        each
        for each in differences
        if each.kind == "random state"
        or (each.step == 0 and each.kind in ("loss", "gradient") and not each.part <= tolerance)
    ]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same bit for bit; a NaN equals itself here, and zeros have signs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _largest(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    exact = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    apart = (one.to(exact) - other.to(exact)).abs()
    largest = float(apart.max()) if apart.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf
