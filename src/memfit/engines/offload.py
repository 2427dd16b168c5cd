"""Results of units that leave for the host between forward and backward.

Note [Offload]: what a unit offloads is sent when its forward ends, freed when the forward of the next unit ends,
brought back when the backward of that unit begins and awaited when the unit's own begins. A unit without a next one
frees at its own end and brings back at its own backward. Waits are at these points and nowhere else, so what is alive
when depends on the plan and not on the link. Backwards begin with the first saved tensor that autograd asks for.

What leaves is the content of storages. Whoever holds one, a tensor that autograd packed or a saved result that a
recompute answers with, is noted as a place: places are emptied when the storage is freed, and filled with views of the
new one. The graph owns all of it: when it goes, so does what is on the host. A graph that is kept after its backward
(`retain_graph`) keeps what came back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.engines.offload_store import OffloadedStorage, OffloadStore, bytes_of
from memfit.engines.tensors import StridedView, detached, is_strided, strided_view_of
from memfit.errors import OffloadError, StateError
from memfit.torch_private.autograd import saved_tensor_hooks_enabled, top_saved_tensor_hooks, version_of
from memfit.torch_private.dispatch import DisableTorchDispatch
from memfit.torch_private.distributed_tensors import local_tensor, wrapping_like
from memfit.torch_private.pytree import tree_flatten, tree_unflatten
from memfit.torch_private.storages import key_of


class Place(Protocol):
    """Who holds a tensor of a storage that leaves."""

    def empty(self) -> None:
        """Let go of the tensor."""

    def fill(self, tensor: torch.Tensor) -> None:
        """Take it back."""

    @property
    def wanted(self) -> bool:
        """Whether anybody will ask for it."""


class Saved(Protocol):
    """What autograd holds for a tensor that it packed."""

    tensor: torch.Tensor | None


class _SavedPlace:
    """A tensor that autograd packed, for as long as the graph has it."""

    def __init__(self, saved: Saved) -> None:
        self._saved = weakref.ref(saved)

    def empty(self) -> None:
        saved = self._saved()
        if saved is not None:
            saved.tensor = None

    def fill(self, tensor: torch.Tensor) -> None:
        saved = self._saved()
        if saved is not None:
            saved.tensor = tensor

    @property
    def wanted(self) -> bool:
        return self._saved() is not None


class _EntryPlace:
    """A tensor in an entry of a dictionary, which may be inside a tuple of several."""

    def __init__(self, entries: dict[Any, Any], key: Any, number: int) -> None:
        self._entries, self._key, self._number = entries, key, number

    def _put(self, tensor: torch.Tensor | None) -> None:
        if self._key in self._entries:
            leaves, tree = tree_flatten(self._entries[self._key])
            leaves[self._number] = tensor
            self._entries[self._key] = tree_unflatten(leaves, tree)

    def empty(self) -> None:
        self._put(None)

    def fill(self, tensor: torch.Tensor) -> None:
        self._put(tensor)

    @property
    def wanted(self) -> bool:
        return self._key in self._entries


class _StoragePlace:
    """A storage in an entry of a dictionary."""

    def __init__(self, entries: dict[int, torch.UntypedStorage], key: int) -> None:
        self._entries, self._key = entries, key

    def empty(self) -> None:
        self._entries.pop(self._key, None)

    def fill(self, tensor: torch.Tensor) -> None:
        self._entries[self._key] = tensor.untyped_storage()

    @property
    def wanted(self) -> bool:
        return True


@dataclass(slots=True)
class _Part:
    """One storage that leaves, and who holds it: how to make the tensor of each place from it."""

    storage: torch.UntypedStorage | None
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    places: list[tuple[Place, StridedView, Callable[[torch.Tensor], torch.Tensor]]] = field(default_factory=list)
    away: OffloadedStorage | None = None


class OffloadedCall:
    """What one call of a unit offloads."""

    __slots__ = ("__weakref__", "_coming", "_freed", "_parts", "_unit")

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._parts: dict[int, _Part] = {}
        self._freed = False
        self._coming = False

    def add_saved(self, saved: Saved) -> None:
        """Have a tensor that autograd packed leave."""
        if saved.tensor is not None:
            self._add(saved.tensor, _SavedPlace(saved))

    def add_entry(self, entries: dict[Any, Any], key: Any) -> None:
        """Have the tensors in an entry of a dictionary leave."""
        for number, leaf in enumerate(tree_flatten(entries[key])[0]):
            if is_strided(leaf):
                self._add(leaf, _EntryPlace(entries, key, number))

    def add_storage(self, entries: dict[int, torch.UntypedStorage], key: int) -> None:
        """Have a storage in an entry of a dictionary leave."""
        self._add(bytes_of(entries[key]), _StoragePlace(entries, key))

    def _add(self, tensor: torch.Tensor, place: Place) -> None:
        storage = local_tensor(tensor).untyped_storage()
        if not storage.nbytes():
            return
        part = self._parts.setdefault(key_of(storage), _Part(storage))
        part.places.append((place, strided_view_of(tensor), wrapping_like(tensor)))
        if not tensor.is_inference():
            local = local_tensor(tensor)
            part.versions.append((local, version_of(local)))

    def begin(self, store: OffloadStore) -> None:
        """Begin to send everything."""
        for part in self._parts.values():
            assert part.storage is not None
            part.away = store.send(self._unit, part.storage)

    def free(self) -> None:
        """Wait until everything has been sent, and let go of it."""
        if self._freed:
            return
        for part in self._parts.values():
            assert part.away is not None
            part.away.wait_sent()
        for part in self._parts.values():
            if any(version_of(tensor) != version for tensor, version in part.versions):
                raise StateError(
                    f"a result of unit {self._unit!r} was written to in place while it was being offloaded: what "
                    "backward would get is neither the old nor the new one. Plan without offloading it"
                )
        for part in self._parts.values():
            part.versions.clear()
            for place, _, _ in part.places:
                place.empty()
            part.storage = None
        self._freed = True

    def fetch(self) -> None:
        """Allocate and begin to bring back what anybody still wants."""
        if not self._freed or self._coming:
            return
        self._coming = True
        for key, part in list(self._parts.items()):
            if any(place.wanted for place, _, _ in part.places):
                assert part.away is not None
                part.away.fetch()
            else:
                del self._parts[key]

    def restore(self) -> None:
        """Wait for everything, and give it to those who held it."""
        if self._freed:
            self.fetch()
            found: list[tuple[_Part, torch.UntypedStorage]] = []
            for part in self._parts.values():
                assert part.away is not None
                found.append((part, part.away.wait_fetched()))
            guard = DisableTorchDispatch()
            try:
                with torch.no_grad():
                    for part, storage in found:
                        for place, view, wrap in part.places:
                            place.fill(wrap(view.of(storage)))
            finally:
                del guard
        else:  # the next unit was not called: nothing has left
            for part in self._parts.values():
                if part.away is not None:
                    part.away.wait_sent()
        self._parts.clear()


class UnitCall:
    """One call of a unit, or of a module that a unit before it waits for: what its backward brings back."""

    __slots__ = ("_outer", "_waiting")

    def __init__(self, outer: UnitCall | None) -> None:
        self._outer = outer
        self._waiting: list[weakref.ref[OffloadedCall]] = []

    def wait_for(self, offloaded: OffloadedCall) -> None:
        """Bring this back when the backward of the call begins."""
        self._waiting.append(weakref.ref(offloaded))

    def begin_backward(self) -> None:
        """Begin to bring back what waits for this."""
        if self._outer is not None:
            self._outer.begin_backward()
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            offloaded = reference()
            if offloaded is not None:
                offloaded.fetch()


@dataclass(slots=True)
class _InFlight:
    """What was sent and is not freed yet. The graph owns it."""

    offloaded: weakref.ref[OffloadedCall]
    next_module: weakref.ref[nn.Module]


class Offloads:
    """What a model offloads: which calls are under way, and what waits for the end of the next one."""

    def __init__(self, store: OffloadStore, on_error: Callable[[], None]) -> None:
        self.store = store
        self._on_error = on_error
        self._in_flight: list[_InFlight] = []
        self._open: list[UnitCall] = []

    def reset(self) -> None:
        """Forget a forward that did not end."""
        self._in_flight.clear()
        self._open.clear()

    @contextlib.contextmanager
    def call(self) -> Iterator[UnitCall]:
        """Note a call for as long as its forward runs."""
        depth = len(self._open)
        made = UnitCall(self._open[-1] if self._open else None)
        self._open.append(made)
        try:
            yield made
        finally:
            del self._open[depth:]

    def end_call(
        self,
        call: UnitCall,
        module: nn.Module,
        offloaded: OffloadedCall | None = None,
        next_module: weakref.ref[nn.Module] | None = None,
    ) -> None:
        """Free what waited for the end of this module's call, and send what the call offloads."""
        arrived = [each for each in self._in_flight if each.next_module() is module]
        others = (each for each in self._in_flight if each.next_module() is not module)
        self._in_flight = [each for each in others if each.offloaded() is not None]
        try:
            for each in arrived:
                before = each.offloaded()
                if before is not None:
                    before.free()
                    call.wait_for(before)
            if offloaded is not None:
                offloaded.begin(self.store)
                if next_module is None:
                    offloaded.free()
                else:
                    self._in_flight.append(_InFlight(weakref.ref(offloaded), next_module))
        except (OffloadError, StateError):
            self._on_error()  # the step begins anew
            raise


# -- A module without a policy whose forward ends, and backward begins, at a point that others wait for ----------------


class _Watched:
    """What autograd holds for a tensor of such a module. Hooks end autograd's own check of the version."""

    __slots__ = ("_call", "_saved_at", "_tensor")

    def __init__(self, tensor: torch.Tensor, call: UnitCall) -> None:
        self._call: UnitCall | None = call
        self._tensor = detached(tensor) if tensor.grad_fn is not None else tensor
        self._saved_at = None if tensor.is_inference() else version_of(tensor)

    @staticmethod
    def unpack(watched: _Watched) -> torch.Tensor:
        """Note that the backward has begun, and return the tensor."""
        call, watched._call = watched._call, None
        if call is not None:
            call.begin_backward()
        tensor = watched._tensor
        if watched._saved_at is not None and version_of(tensor) != watched._saved_at:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.dtype}, {tuple(tensor.shape)}] is at version {version_of(tensor)}; expected version "
                f"{watched._saved_at} instead"
            )
        return tensor


def run_watched(call: UnitCall, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward so that its backward is noted when it begins."""
    open_hooks = top_saved_tensor_hooks()
    if (open_hooks is not None and open_hooks[1] is not _Watched.unpack) or not saved_tensor_hooks_enabled():
        return forward(*args, **kwargs)  # hooks of the user's, or of torch.utils.checkpoint, get every tensor
    with saved_tensors_hooks(lambda tensor: _Watched(tensor, call), _Watched.unpack):
        return forward(*args, **kwargs)
