"""A unit whose forward is recomputed in backward, as its policy says.

Note [Recompute]: what autograd packs while the unit runs is counted. A compiled policy says which of these tensors are
dropped; all others are held. When backward asks for the first of them, held or dropped, the forward runs in the same
context and on the same inputs, until the last dropped tensor has been packed. A unit of which nothing is saved pays for
two hooks and nothing else. Where ops are saved, a dispatch mode looks at the gaps (Note [Gaps]) that contain them: in
the recompute it answers with what was kept; in the forward it is there only for results that autograd would not have
packed. A policy is compiled by a run that looks at every op, once for each kind of input.

A run that packs other tensors than its compiled policy says is recomputed whole, and after several in a row the policy
is compiled anew. That is right only if inputs, parameters and buffers have not been written to since; if they have, it
is an error. Under a compiled policy, too, what it reads must be what it was, unless a run whose values were compared
has shown that nothing recomputed depends on it. Hooks for saved tensors end autograd's own check of this.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.capture import host_state, with_host_state
from memfit.engines.compiled_policy import CompiledPolicy, Gap, OpKey, OpKind, SubmoduleTracker, op_kind
from memfit.engines.forward_context import Bindings, ForwardContext, generators_of, with_generators
from memfit.engines.offload import OffloadedCall
from memfit.engines.tensors import StridedView, detached, is_outer, is_strided, local_key, plain, strided_view_of
from memfit.errors import StateError
from memfit.torch_private.autograd import version_of
from memfit.torch_private.dispatch import DisableTorchDispatch, DispatchMode
from memfit.torch_private.distributed_tensors import has_arrived, local_tensor
from memfit.torch_private.pytree import PyTree, TreeSpec, tree_flatten, tree_map_only, tree_unflatten

_here = threading.local()


def is_recomputing() -> bool:
    """Return whether a unit is recomputed on this thread: what it calls is no new call of the step."""
    return getattr(_here, "recomputing", False)


class _Stop(Exception):
    """Raised to end a recompute once everything that was dropped has been made."""


class SavedTensor:
    """What autograd holds for a tensor it packed: the tensor, or the run that will make it."""

    __slots__ = ("__weakref__", "index", "run", "tensor")

    def __init__(self, run: RecomputedCall, index: int, tensor: torch.Tensor | None) -> None:
        self.run: RecomputedCall | None = run
        self.index = index
        self.tensor = tensor


class RecomputedCall:
    """One call of a unit, from its forward to its recompute."""

    __slots__ = (
        "_bindings",
        "_bound",
        "_context",
        "_forward",
        "_generators",
        "_host_state",
        "_inputs",
        "_name",
        "_on_backward",
        "_read",
        "_recomputed",
        "_shapes",
        "_unit",
        "_versions",
        "compiled",
        "device_type",
        "held",
        "kept",
        "offloaded",
        "samples",
        "watched",
    )

    def __init__(
        self,
        name: str,
        unit: nn.Module,
        bindings: Bindings,
        forward: Callable[..., Any],
        device_type: str,
        on_backward: Callable[[], None],
    ) -> None:
        self._name = name
        self._on_backward = on_backward
        self._unit = unit
        self._bindings = bindings
        self._forward = forward
        self.device_type = device_type
        self.compiled: CompiledPolicy | None = None
        self.held: dict[int, torch.Tensor] = {}
        self.kept: dict[tuple[int, OpKey], Any] = {}
        self.offloaded: OffloadedCall | None = None
        """What leaves for the host until the backward."""
        self.samples: dict[int, list[float]] = {}
        """Values of dropped tensors, by pack."""
        self.watched = False
        """Whether they are taken, where the compiled policy says of which."""
        self._inputs: _Inputs | None = None
        self._shapes: dict[int, torch.Size] = {}
        self._recomputed: dict[int, torch.Tensor] | None = None
        self._bound: list[Any] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._read: list[tuple[torch.Tensor, int]] = []

    def remember_context(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what the forward starts from."""
        self._inputs = inputs = _Inputs(args, kwargs)
        self._context = ForwardContext.current(self.device_type)
        self._generators = generators_of(self.device_type, *inputs.leaves)
        self._host_state = host_state(self._bindings.generators)
        self._bound = self._bindings.here()
        self._versions = self._versions_now([each for _, each in self.buffers()])

    def buffers(self) -> list[tuple[int, torch.Tensor]]:
        """Return the buffers of the unit, by number."""
        return self._bindings.buffers()

    def settle(self, compiled: CompiledPolicy | None) -> None:
        """Note how the forward ended: as this compiled policy says, or None."""
        self.compiled = compiled
        if not self._shapes:  # nothing will be recomputed, and nothing is held for that
            self._inputs, self._bound, self._versions = None, [], []
        elif compiled is not None:
            read = [each for number, each in self.buffers() if number in compiled.reads] if compiled.reads else []
            self._read = self._versions_now(read)

    def offload(self, compiled: CompiledPolicy, leaving: Sequence[SavedTensor]) -> None:
        """Note what leaves for the host: these tensors, and saved results."""
        self.offloaded = offloaded = OffloadedCall(self._name)
        for saved in leaving:
            offloaded.add_saved(saved)
            if saved.index in self.held:
                offloaded.add_entry(self.held, saved.index)
        for key in compiled.offloaded_kept:
            offloaded.add_entry(self.kept, key)

    def _versions_now(self, others: Sequence[torch.Tensor] = ()) -> list[tuple[torch.Tensor, int]]:
        assert self._inputs is not None
        tensors = [each for each in self._inputs.leaves if isinstance(each, torch.Tensor)]
        tensors += [*self._bindings.parameters(), *others]
        return [(each, version_of(each)) for each in tensors if not each.is_inference()]

    def note(self, index: int, tensor: torch.Tensor) -> None:
        """Sample values of a dropped tensor, to compare them after the recompute (Note [Samples])."""
        found = sample(tensor)
        if found is not None:
            self.samples[index] = found

    def dropped(self, index: int, shape: torch.Size) -> SavedTensor:
        """Return what stands for a tensor that is not held."""
        self._shapes[index] = shape
        return SavedTensor(self, index, None)

    def drop(self, saved: SavedTensor, shape: torch.Size) -> None:
        """Free a tensor that was held for backward."""
        self._shapes[saved.index] = shape
        saved.tensor = None

    def run_forward(self, compiled: CompiledPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Run the forward as the compiled policy says. False when it ran otherwise."""
        if compiled.last >= 0:
            self.remember_context(args, kwargs)
        drops, needed, held = compiled.drops, compiled.needed, self.held
        expected = len(drops)
        compared = compiled.compared if self.watched else frozenset()
        offloaded = compiled.offloaded
        leaving: list[SavedTensor] = []
        count = 0
        same = True

        def pack(tensor: torch.Tensor) -> SavedTensor:
            nonlocal count, same
            index = count
            count = index + 1
            shape = drops[index] if index < expected else None
            if shape is not None:
                same = same and shape == tensor.shape
                if index in compared:
                    self.note(index, tensor)
                return self.dropped(index, tensor.shape)
            if tensor.grad_fn is not None:
                tensor = detached(tensor)
            if index in needed:
                held[index] = tensor
                same = same and needed[index] == strided_view_of(tensor)
                same = same and compiled.storage_bytes[index] == local_tensor(tensor).untyped_storage().nbytes()
            saved = SavedTensor(self, index, tensor)
            if index in offloaded:
                leaving.append(saved)
            return saved

        with saved_tensors_hooks(pack, unpack):
            if compiled.fresh:
                tracker = SubmoduleTracker(
                    compiled.root, compiled.keeping, lambda gap: _KeepMode(gap, self) if gap.fresh else None
                )
                result = tracker.run(self._forward, args, kwargs)
                same = same and not tracker.diverged and len(self.kept) == compiled.fresh
            else:
                result = self._forward(*args, **kwargs)
        same = same and count == expected
        self.settle(compiled if same else None)
        if same and (leaving or compiled.offloaded_kept):
            self.offload(compiled, leaving)
        leaving.clear()  # autograd keeps the hook, and the hook this list
        return result, same

    def run_forward_dropping_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward and drop all that it makes: for a unit that the plan does not know as it is now."""
        self.remember_context(args, kwargs)
        assert self._inputs is not None
        inputs = {local_key(each) for each in self._inputs.leaves if is_strided(each)}
        count = 0

        def pack(tensor: torch.Tensor) -> SavedTensor:
            nonlocal count
            index = count
            count = index + 1
            if tensor.grad_fn is None or not is_strided(tensor) or local_key(tensor) in inputs:
                return SavedTensor(self, index, detached(tensor) if tensor.grad_fn is not None else tensor)
            if self.watched:
                self.note(index, tensor)
            return self.dropped(index, tensor.shape)

        with saved_tensors_hooks(pack, unpack):
            return self._forward(*args, **kwargs)

    def recompute(self) -> dict[int, torch.Tensor]:
        """Run the forward until every dropped tensor has been made, and return these by pack."""
        found: dict[int, torch.Tensor] = {}
        shapes, last, count = self._shapes, max(self._shapes, default=-1), 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            index = count
            count = index + 1
            if index in shapes:
                if tensor.shape != shapes[index]:
                    raise StateError(
                        f"unit {self._name!r} ran differently the second time: what it packs as number {index} has "
                        f"shape {tuple(tensor.shape)} and had {tuple(shapes[index])}; make its forward depend on "
                        "nothing but its inputs, or forbid it: SolveOptions(forbid=(...,))"
                    )
                if index in self.samples:
                    self._compare(index, tensor, exactly=rewritten)
                found[index] = detached(tensor)
                if index == last:
                    raise _Stop

        assert self._inputs is not None
        rewritten = self._check_unwritten()
        args, kwargs = self._inputs.detached(aliases=self.compiled is None or self.compiled.overwrites_inputs)
        bound, self._inputs, self._bound, self._versions, self._read = self._bound, None, [], [], []
        with (
            with_generators(self._generators, self.device_type),
            with_host_state(self._host_state, self._bindings.generators),
            self._context.restored(),
            self._bindings.bound(bound),
            saved_tensors_hooks(pack, unpack),
        ):
            before, _here.recomputing = is_recomputing(), True
            try:
                self._recompute_forward(args, kwargs)
            except Exception:
                if len(found) < len(shapes):  # _Stop may come back as TorchScript's own error
                    raise
            finally:
                _here.recomputing = before
        if len(found) < len(shapes):
            raise StateError(
                f"unit {self._name!r} ran differently the second time: it packed {count} tensors, and number {last} "
                "was needed; make its forward depend on nothing but its inputs, or forbid it: SolveOptions(forbid=...)"
            )
        if rewritten and self.compiled is not None:
            self.compiled.rewritten = True
        self.held.clear()  # autograd keeps the hook, and the hook this dictionary
        self.kept.clear()
        self.samples.clear()
        return found

    def _compare(self, index: int, tensor: torch.Tensor, *, exactly: bool) -> None:
        """Refuse a recomputation that makes other values than the forward did."""
        again = sample(tensor)
        differs = None if again is None else difference(self.samples[index], again, tensor.dtype, exactly=exactly)
        if differs is not None:
            raise StateError(
                f"unit {self._name!r} computes something else when it is recomputed: the tensor that it saves as "
                f"number {index} held {differs[0]:g} and now holds {differs[1]:g}, so its gradients would be wrong. "
                "Its forward reads something that changes between forward and backward, such as a random generator "
                "that no module holds: make that an attribute of the module, or forbid the unit: "
                f"SolveOptions(forbid=({self._name!r},))"
            )

    def _check_unwritten(self) -> bool:
        """Refuse to recompute what would read other values than the first time. True where a comparison will tell."""
        compiled = self.compiled
        versions = self._versions if compiled is None else self._read
        if all(version_of(tensor) == version for tensor, version in versions):
            return False
        if compiled is None:
            raise StateError(
                f"unit {self._name!r} did not run as it was planned, and an input, a parameter or a buffer of it was "
                "written to after it had been read: it cannot be run again. Run the step as it was planned, or plan it "
                "as it is"
            )
        if not (compiled.rewritten or self.watched or self.samples):
            raise StateError(
                f"an input, a parameter or a buffer of unit {self._name!r} was written to between its forward and its "
                "backward (an optimizer step, an in-place op, a further forward in train mode), and was not so far: "
                "recomputed, the unit would give other gradients. Call backward first, or plan the step as it is"
            )
        return not compiled.rewritten

    def _recompute_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiled = self.compiled
        if compiled is None:
            with _RestoredBuffers(self._unit):
                self._forward(*args, **kwargs)
        elif compiled.answering is not None:
            SubmoduleTracker(compiled.root, compiled.answering, lambda gap: _AnswerMode(gap, self)).run(
                self._forward, args, kwargs
            )
        else:
            self._forward(*args, **kwargs)

    def take(self, index: int) -> torch.Tensor:
        """Return a dropped tensor that has been recomputed, and forget it."""
        assert self._recomputed is not None
        return self._recomputed.pop(index)

    def ensure_recomputed(self) -> None:
        """Recompute, unless that has been done or nothing was dropped."""
        if self._recomputed is None:
            self._on_backward()
            if self.offloaded is not None:
                self.offloaded.restore()
                self.offloaded = None
            self._recomputed = {}
            if self._shapes:
                self._recomputed = self.recompute()


def unpack(saved: SavedTensor) -> torch.Tensor:
    """Unpack what backward asks for; the first request recomputes the unit."""
    run = saved.run
    if run is not None:
        run.ensure_recomputed()
        saved.run = None
        if saved.tensor is None:
            saved.tensor = run.take(saved.index)
    assert saved.tensor is not None
    return saved.tensor


class _GapMode(DispatchMode):
    """Dispatch mode that identifies each op of a gap by its kind and its number among ops of that kind."""

    def __init__(self, gap: Gap, run: RecomputedCall) -> None:
        super().__init__()
        self._gap, self._run = gap, run
        self._counts: dict[OpKind, int] = {}

    def _key(self, func: Any, args: Any) -> OpKey:
        kind = op_kind(func, args)
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return kind, number


class _KeepMode(_GapMode):
    """Keeps the results that autograd would not have packed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_outer(types):
            return NotImplemented  # Note [Distributed tensors]
        result = func(*args, **(kwargs or {}))
        key = self._key(func, args)
        if key in self._gap.fresh:
            self._run.kept[id(self._gap), key] = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return result


class _AnswerMode(_GapMode):
    """Returns for saved ops what they returned before, and lets all others run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_outer(types):
            return NotImplemented
        key = self._key(func, args)
        if key in self._gap.instead:
            later, view = self._gap.instead[key]
            return _view(self._run.kept[id(self._gap), later], view)
        if key in self._gap.fresh:
            kept = self._run.kept[id(self._gap), key]
            return tree_map_only(torch.Tensor, torch.Tensor.detach, kept)
        sources = self._gap.sources.get(key)
        if sources is None:
            return func(*args, **(kwargs or {}))
        assert self._run.compiled is not None
        held, views = self._run.held, self._run.compiled.views
        made = [None if each is None else _view(held[each.pack], views[each.view]) for each in sources]
        return made[0] if key in self._gap.single else tuple(made)


def _view(tensor: torch.Tensor, view: StridedView) -> torch.Tensor:
    return view.of(local_tensor(tensor).untyped_storage())


class _Inputs:
    """The inputs of a run. Whether they require gradients is noted: it may change when they are written to."""

    __slots__ = ("_required", "_tree", "leaves")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found: tuple[list[PyTree], TreeSpec] = tree_flatten((args, kwargs))
        self.leaves, self._tree = found
        self._required = [isinstance(each, torch.Tensor) and each.requires_grad for each in self.leaves]

    def detached(self, *, aliases: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs, cut off from the graph that made them; a tensor that is there twice stays one.

        As aliases they are no leaves of a graph, which may not be written to.
        """
        seen: dict[int, torch.Tensor] = {}
        leaves = list(self.leaves)
        with torch.enable_grad():
            for place, (leaf, required) in enumerate(zip(leaves, self._required, strict=True)):
                if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
                    continue
                if id(leaf) not in seen:
                    cut = leaf.detach().requires_grad_(required)
                    seen[id(leaf)] = _Alias.apply(cut) if aliases and required else cut
                leaves[place] = seen[id(leaf)]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs


class _Alias(torch.autograd.Function):
    """Autograd function that returns its input as another tensor of the same storage."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        return args[0].detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class _RestoredBuffers:
    """Puts the buffers of a module back to what they were."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: Any) -> None:
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


# -- Samples: whether a recompute makes what the forward made ---------------------------------------------------------
#
# Note [Samples]: a recomputation is put back to the generators, inputs and buffers that the forward had. What else a
# forward may read (a generator that no module holds, a counter, a file) cannot be known, and would give wrong
# gradients without a word. So some values of each dropped tensor are kept and compared: in every run that compiles,
# and in the 1st, 2nd, 4th, 8th... run of a unit. Kernels that sum in any order make results that differ by rounding;
# other values differ by more.


_MOST_SAMPLES = 64
_PRIME = 2654435761
"""Larger than any tensor has elements per sample, and no multiple of a row: samples lie in all rows and columns."""


@functools.lru_cache(maxsize=1024)
def _places(shape: torch.Size) -> tuple[list[int], ...]:
    """Return the same places for each tensor of a shape, one list for each dimension."""
    count = shape.numel()
    flat = range(count) if count <= _MOST_SAMPLES else sorted({each * _PRIME % count for each in range(_MOST_SAMPLES)})
    found: list[list[int]] = []
    for size in reversed(shape):
        found.insert(0, [place % size for place in flat])
        flat = [place // size for place in flat]
    return tuple(found)


def sample(tensor: torch.Tensor) -> list[float] | None:
    """Return some values of a tensor, of what this rank holds; None where they cannot be read or compared."""
    if not has_arrived(tensor):
        return None
    tensor = local_tensor(tensor)
    if not plain(tensor) or tensor.is_complex() or tensor.is_meta or not tensor.numel():
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    guard = DisableTorchDispatch()
    try:
        with torch.no_grad():
            values = tensor.detach()[_places(tensor.shape)] if tensor.dim() else tensor.detach().reshape(1)
            return list(values.to(torch.float64).tolist())
    finally:
        del guard


def difference(
    before: list[float], after: list[float], dtype: torch.dtype, *, exactly: bool = False
) -> tuple[float, float] | None:
    """Return the first two values that differ by more than rounding, or at all, None when there are none."""
    relative = max(4 * torch.finfo(dtype).eps, 1e-3) if dtype.is_floating_point and not exactly else 0.0
    scale = max((abs(each) for each in before if math.isfinite(each)), default=0.0)
    for one, other in zip(before, after, strict=True):
        if one == other or (math.isnan(one) and math.isnan(other)):
            continue
        if not abs(one - other) <= relative * (scale + abs(one)):  # not: NaN is no number to compare with
            return one, other
    return None
