"""What autograd's engine does differently because a dispatch mode is looking.

The engine adds gradients that meet at one input in place when it holds the last reference to the first of them
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`), unless any dispatch mode is active, which it takes
for a tensor subclass. The capture therefore sees `add` where a real run has `add_`, and puts that right here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.rules.base import fills_its_memory
from memfit.torch_private.autograd import current_autograd_node
from memfit.torch_private.dispatch import DispatchMode
from memfit.torch_private.frames import frame_above
from memfit.torch_private.storages import storage_key, storage_use_count, tensor_use_count

_add = torch.ops.aten.add.Tensor

_ADDING_NODES = (
    *("VarMean", "StdMean", "Aminmax", "Atan2", "Logcumsumexp", "Mvlgamma", "SpecialI1", "Cholesky", "LuUnpack"),
    *("LinalgCholesky", "LinalgLstsq", "LinalgLu", "LinalgPinv", "LinalgQr", "LinalgSvd", "TriangularSolve"),
)
"""Nodes whose own formula adds two tensors that nobody else holds. Seen from a mode that is no different from what the
engine does with their results, so what it adds after them is taken as added out of place, too."""


def adds_in_place(func: Any, args: Any, kwargs: dict[str, Any], depth: int) -> bool:
    """Return whether this call in backward is the engine's addition of two gradients that a real run does in place."""
    if func is not _add or kwargs or len(args) != 2 or not isinstance(args[1], torch.Tensor):
        return False
    if frame_above(depth + 1).f_code.co_name != "_engine_run_backward":
        return False
    node = current_autograd_node()  # the engine adds what it has just returned, so its name is still there
    if node is not None and node.name().startswith(_ADDING_NODES):
        return False
    return reference_counts(args[0]) == sole_owner_counts() and fills_its_memory(args[0])


def reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many references there are to the tensor and to its storage."""
    return tensor_use_count(tensor), storage_use_count(storage_key(tensor))


@functools.lru_cache(1)
def sole_owner_counts() -> tuple[int, int]:
    """Return what `reference_counts` says, in a dispatch handler, of a gradient that only the engine refers to.

    Asked for the first time outside any capture."""
    x = torch.zeros(2, device="meta", requires_grad=True)
    with torch.enable_grad(), _Probe() as probe:
        y = x * 2
        (y * 2 + y * 3).sum().backward()
    return probe.counts[-1]


class _Probe(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int]] = []
        self.refs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _add:
            self.counts.append(reference_counts(args[0]))
        result = func(*args, **(kwargs or {}))
        self.refs.append(weakref.ref(result.untyped_storage()))
        return result


_aten = torch.ops.aten
_WRITTEN_IN_PLACE = {
    _aten.index_put.default: _aten._index_put_impl_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
    _aten.logical_and.default: _aten.logical_and_.default,
}
_CHAINED = {_aten.sub.Tensor: _aten.sub_.Tensor, _aten.mul.Tensor: _aten.mul_.Tensor}
SEEN_DIFFERENTLY = frozenset(map(id, (_add, *_WRITTEN_IN_PLACE, *_CHAINED)))
"""Ops, by identity, that a mode may see in backward in place of those of a real run."""

SCATTERS = {str(func): str(written) for func, written in _WRITTEN_IN_PLACE.items()}
"""By name: what a mode sees, and what a real run does."""

_SCATTERING_NODES = (
    *("IndexBackward", "IndexSelect", "Gather", "Topk", "Sort", "Max", "Min", "Kthvalue", "Median", "Mode"),
    *("Cummax", "Cummin", "MaskedSelect", "Clamp"),
)
_BCE_NODE = "BinaryCrossEntropyWithLogits"


def _differentiates_target(node: Any) -> bool:
    """Return whether a binary cross-entropy also has a gradient for its target, whose formula writes to nothing."""
    edges = node.next_functions
    return len(edges) > 1 and edges[1][0] is not None


def in_place_in_backward(func: Any, args: Any, is_fresh: Callable[[torch.Tensor], bool]) -> tuple[Any, Any]:
    """Return the call that a gradient formula makes without a mode; `is_fresh` says what the backward has made.

    Gradients of indexing are scattered into fresh zeros in place, unless any dispatch mode is active
    (FunctionsManual.cpp, `areAnyTensorSubclassLike` in `index_backward`, `gather_backward` and
    `value_selecting_reduction_backward`; `cummaxmin_backward`,
    `masked_select_backward` and, with masks, `clamp_backward` likewise). That of a binary cross-entropy is computed in
    one tensor (Loss.cpp, `binary_cross_entropy_with_logits_backward`), but for the first product with `pos_weight`.
    """
    written = _WRITTEN_IN_PLACE.get(func) or _CHAINED.get(func)
    if written is None or torch.is_grad_enabled():
        return func, args
    node = current_autograd_node()
    if node is None:
        return func, args
    if func in _CHAINED:
        if not node.name().startswith(_BCE_NODE) or _differentiates_target(node):
            return func, args
        first = func is _aten.mul.Tensor and not (is_fresh(args[0]) and args[0].numel() >= args[1].numel())
        return (func, args) if first else (written, args)
    if not node.name().startswith(_SCATTERING_NODES):
        return func, args
    if written is _aten._index_put_impl_.default:
        args = (*args, *(False,) * (4 - len(args)), True)
    return written, args
