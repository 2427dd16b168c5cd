"""Training steps made of one op each, from PyTorch's OpInfo database: sample inputs in many layouts and dtypes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

BACKWARD = "memfit: backward"
"""The profiler's label around the backward of a step."""


@functools.lru_cache(1)
def op_database() -> dict[str, Any]:
    """OpInfo entries by name, with the variant in parentheses where an op has several."""
    from torch.testing import _utils
    from torch.testing._internal import common_methods_invocations

    # The copies that it makes of the random state are none of the op's.
    vars(_utils)["freeze_rng_state"] = contextlib.nullcontext
    entries: dict[str, Any] = {}
    for entry in common_methods_invocations.op_db:
        name = f"{entry.name} ({entry.variant_test_name})" if entry.variant_test_name else entry.name
        entries[name] = entry
    return entries


def dense(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return tensor.clone(), lambda leaf: leaf


def transposed(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Dimensions in the opposite order in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous(), lambda leaf: leaf.permute(order)


def sliced(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Every second element of the last dimension."""
    if tensor.dim() == 0:
        return dense(tensor)
    leaf = tensor.repeat_interleave(2, -1)
    return leaf, lambda leaf: leaf[..., ::2]


def expanded(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The first row in place of all, with stride 0."""
    if tensor.dim() == 0 or tensor.size(0) == 0:
        return dense(tensor)
    shape = tensor.shape
    return tensor[:1].clone(), lambda leaf: leaf.expand(shape)


def zero_strided(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """One element in place of all."""
    if tensor.numel() == 0:
        return dense(tensor)
    shape = tensor.shape
    return tensor.flatten()[0].clone(), lambda leaf: leaf.expand(shape)


def channels_last(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return dense(tensor)
    return tensor.clone().contiguous(memory_format=formats[tensor.dim()]), lambda leaf: leaf


def empty(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """No row of the first dimension."""
    return tensor[:0].clone() if tensor.dim() else tensor.clone(), lambda leaf: leaf


def broadcast(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The first row only, for ops that broadcast it."""
    return (tensor[:1].clone() if tensor.dim() else tensor.clone()), lambda leaf: leaf


OPERANDS = {
    function.__name__: function
    for function in (dense, transposed, sliced, expanded, zero_strided, channels_last, empty, broadcast)
}
GRADIENTS = ("dense", "expanded", "transposed", "sliced", "channels_last")
LAYOUTS = (
    ("dense", "dense"),
    ("dense", "expanded"),
    ("dense", "transposed"),
    ("dense", "sliced"),
    ("transposed", "dense"),
    ("transposed", "expanded"),
    ("sliced", "dense"),
    ("expanded", "dense"),
    ("zero_strided", "transposed"),
    ("channels_last", "dense"),
    ("channels_last", "expanded"),
    ("dense", "channels_last"),
    ("broadcast", "expanded"),
    ("empty", "expanded"),
)
"""Operands and gradients; operands of one case differ only where `other` says so."""


class _GradientLike(torch.autograd.Function):
    """Ends a step: a zero whose backward gives every output a gradient of a chosen layout."""

    @staticmethod
    def forward(ctx: Any, layout: str, *outputs: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.like = [(output.shape, output.dtype) for output in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(gradient(grads[0], shape, dtype, ctx.layout) for shape, dtype in ctx.like)


def gradient(like: Tensor, shape: torch.Size, dtype: torch.dtype, layout: str) -> Tensor:
    """Ones of a layout."""
    if layout == "expanded":
        return like.new_ones((), dtype=dtype).expand(shape)
    if layout == "transposed":
        return like.new_ones(tuple(reversed(shape)), dtype=dtype).permute(tuple(reversed(range(len(shape)))))
    if layout == "sliced" and shape:
        return like.new_ones((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    if layout == "channels_last" and len(shape) in (4, 5):
        order = (0, *range(2, len(shape)), 1)
        back = (0, len(shape) - 1, *range(1, len(shape) - 1))
        return like.new_ones([shape[dim] for dim in order], dtype=dtype).permute(back)
    return like.new_ones(shape, dtype=dtype)


class OpModel(nn.Module):
    """Calls one op on views of its parameters and buffers."""

    def __init__(self, op: Callable[..., Any], values: Any, layouts: Callable[[int], str]) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = tree_flatten(values)
        self.views: list[Any] = []
        self.plain = leaves
        number = 0
        self.anchor = nn.Parameter(torch.zeros(()))
        for position, value in enumerate(leaves):
            if not isinstance(value, Tensor):
                self.views.append(None)
                continue
            self.plain[position] = None
            leaf, view = OPERANDS[layouts(number)](value.detach())
            name = f"t{position}"
            if value.requires_grad:
                self.register_parameter(name, nn.Parameter(leaf))
            else:
                self.register_buffer(name, leaf)
            self.views.append((name, view))
            number += 1

    def forward(self) -> list[Tensor]:
        leaves = [
            self.plain[position] if view is None else view[1](getattr(self, view[0]))
            for position, view in enumerate(self.views)
        ]
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        outputs = self.op(first, *args, **kwargs)
        return [each for each in tree_flatten(outputs)[0] if isinstance(each, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op on one sample, with the layouts of its operands and of the gradient."""

    op: str
    sample: int
    dtype: torch.dtype
    operands: str
    gradient: str
    mixed: torch.dtype | None
    model: OpModel

    @property
    def label(self) -> str:
        mixed = f" with {str(self.mixed)[6:]}" if self.mixed is not None else ""
        return f"sample {self.sample}, {str(self.dtype)[6:]}{mixed}, operands {self.operands}, gradient {self.gradient}"

    def run(self, model: nn.Module, *_: Any) -> None:
        """The training step: forward, then backward where an output takes gradients."""
        outputs = [each for each in model() if each.requires_grad]
        loss = _GradientLike.apply(self.gradient, *outputs) if outputs else model.anchor.view(())
        del outputs
        with torch.profiler.record_function(BACKWARD):
            loss.backward()
        del loss
        model.zero_grad()


QUICK = (("dense", "dense"), ("transposed", "expanded"))
"""The layouts of cases in bfloat16, and on targets where there is nothing to compare with."""


def cases(name: str, *, quick: bool = False, samples: int = 1) -> Iterator[Case]:
    """The cases of an op: all layouts and mixtures of dtypes in float32, a few layouts in bfloat16."""
    entry = op_database()[name]
    supported = entry.supported_backward_dtypes("cpu") if entry.supports_autograd else entry.supported_dtypes("cpu")
    if not supported:
        return
    wide = torch.float32 if torch.float32 in supported else min(supported, key=str)
    for number, sample in enumerate(_spread(entry, wide, samples)):
        make = functools.partial(_case, name, entry, number, wide, sample)
        for operands, gradient_layout in QUICK if quick else LAYOUTS:
            yield from make(operands, gradient_layout, None)
        for other in () if quick else (torch.float64, torch.bfloat16, torch.int64):
            yield from make("dense", "dense", other)
    if torch.bfloat16 in supported and not quick:
        for number, sample in enumerate(_spread(entry, torch.bfloat16, 1)):
            for operands, gradient_layout in QUICK:
                yield from _case(name, entry, number, torch.bfloat16, sample, operands, gradient_layout, None)


_LARGE = 1 << 20
"""Elements of samples that are left out: they take long and show nothing more."""


def _spread(entry: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """The largest sample, and others from all over the list."""
    try:
        found = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd), 200))
    except Exception:  # a sampler that needs what this machine lacks
        return []
    found = [sample for sample in found if _numel(sample) < _LARGE]
    found.sort(key=lambda sample: -_numel(sample) // 8)
    return found[:: max(1, len(found) // count)][:count]


def _numel(sample: Any) -> int:
    leaves = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))[0]
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _case(
    name: str, entry: Any, number: int, dtype: torch.dtype, sample: Any, operands: str, gradient_layout: str, mixed: Any
) -> Iterator[Case]:
    """The case, when the layout makes any difference to these operands."""
    values = (sample.input, list(sample.args), dict(sample.kwargs))
    tensors = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
    if not tensors or any(t.layout != torch.strided for t in tensors):
        return
    if "channels_last" in (operands, gradient_layout) and all(t.dim() not in (4, 5) for t in tensors):
        return
    if operands == "broadcast" and len(tensors) < 2:
        return
    if operands in ("broadcast", "empty") and "batch_norm" in name:
        return  # PyTorch reads beyond statistics that are too short
    if operands == "empty" and name == "nn.functional.pdist":
        return  # PyTorch crashes
    if operands not in ("dense", "empty") and all(t.dim() == 0 for t in tensors):
        return

    def layout(position: int) -> str:
        return "dense" if operands == "broadcast" and position == 0 else operands

    if mixed is not None:
        floats = [t for t in tensors if t.is_floating_point()]
        if len(floats) < 2:
            return
        values = _with_dtype(values, mixed)
    model = OpModel(entry.op, values, layout)
    yield Case(
        op=name, sample=number, dtype=dtype, operands=operands, gradient=gradient_layout, mixed=mixed, model=model
    )


def _with_dtype(values: Any, dtype: torch.dtype) -> Any:
    """All floating tensors but the first in another dtype."""
    leaves, spec = tree_flatten(values)
    seen = False
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if seen:
                changed = leaf.detach().to(dtype)
                leaves[position] = changed.requires_grad_(leaf.requires_grad and dtype.is_floating_point)
            seen = True
    return tree_unflatten(leaves, spec)
