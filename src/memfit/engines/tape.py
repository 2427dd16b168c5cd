"""A region whose ops are recorded as they run, so that they can be replayed without the code that ran them.

Note [Tape]: for regions that are no module (the loss), and for modules whose inputs change while they run (a cache of
keys and values), recomputing from the code is impossible or wrong. The tape sees every op through a dispatch mode and
keeps its arguments: storages made inside the region by number, everything else as it is. What autograd packs is
dropped when the plan says so, and a replay of the tape, below autograd and without views, makes it once more. A tape
replays what really ran: when that is not what the plan knows, or cannot be replayed, it drops nothing from then on, and
is right all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.engines.compiled_policy import RunPolicy, not_counted, same_op
from memfit.engines.forward_context import Generators, generators_of, with_generators
from memfit.engines.offload import OffloadedCall
from memfit.engines.tensors import (
    StridedView,
    detached,
    is_outer,
    is_strided,
    local_key,
    plain,
    strided_view_of,
    written,
)
from memfit.torch_private.dispatch import DisableAutocast, DisableTorchDispatch, DispatchMode
from memfit.torch_private.distributed_tensors import is_begun, local_tensor, wait_for, wrapping_like
from memfit.torch_private.pytree import tree_flatten, tree_unflatten
from memfit.torch_private.storages import storage_key

_aten = torch.ops.aten
EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_permuted.default,
}
"""What these make has no value until an op writes it; a kernel that no op stands for is not seen."""


class _Slot(NamedTuple):
    """A tensor that is a strided view of a storage made in the region."""

    number: int
    view: StridedView


class _Line(NamedTuple):
    """One op of the tape. `makes` are the numbers of its new storages, by the place of the tensor in its result."""

    func: Any
    leaves: list[Any]
    tree: Any
    makes: tuple[tuple[int, int], ...]
    kept: dict[int, torch.UntypedStorage] | None
    generators: Generators | None


class TapedTensor:
    """What autograd holds for a tensor it packed: the tensor, or where to find it once the region is replayed."""

    __slots__ = ("__weakref__", "number", "tape", "tensor", "view", "wrap")

    def __init__(
        self,
        tape: Tape | None,
        tensor: torch.Tensor | None,
        number: int = -1,
        view: StridedView | None = None,
        wrap: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.tape = tape
        self.tensor = tensor
        self.number = number
        self.view = view
        self.wrap = wrap


class Tape(DispatchMode):
    """One run of a region under a policy."""

    def __init__(self, policy: RunPolicy, device_type: str, on_backward: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.policy = policy
        self._on_backward = on_backward
        self.device_type = device_type
        self.followed = True
        """Whether the ops so far are those that the plan knows, and all of them can be replayed. Once they are not, or
        have been replayed, nothing is recorded."""
        self.differs: str | None = None
        """What ran where the plan has something else."""
        self._lines: list[_Line] = []
        self._ops = 0
        self._numbers: dict[int, int] = {}
        self._known: list[StorageWeakRef] = []  # as long as they are there, no other storage comes to an old address
        self._made_by: list[tuple[int, int]] = []
        self._unwritten: set[int] = set()
        self._needed = 0
        self._replayed: dict[int, torch.UntypedStorage] | None = None
        self._wanted: dict[int, int] = {}
        self.offloaded: OffloadedCall | None = None
        """What leaves for the host until the backward, known when `run` has ended."""
        self._leaving: list[TapedTensor] = []

    # -- recording --------------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a forward and record it."""
        with saved_tensors_hooks(self.pack, Tape.unpack), self:
            result = forward(*args, **kwargs)
        self._offload()
        return result

    def _offload(self) -> None:
        """Note what leaves for the host: tensors that autograd packed, and saved results."""
        kept = [
            (line.kept, number)
            for line in self._lines
            if line.kept is not None
            for number in line.kept
            if self._made_by[number][0] in self.policy.offload
        ]
        if self.followed and (self._leaving or kept):
            self.offloaded = OffloadedCall(self.policy.unit)
            for saved in self._leaving:
                self.offloaded.add_saved(saved)
            for entries, number in kept:
                self.offloaded.add_storage(entries, number)
        self._leaving.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_outer(types):
            return NotImplemented  # see tensors.py, Note [Distributed tensors]
        kwargs = kwargs or {}
        if not self.followed or not_counted(func, self.policy.names.get(self._ops)):
            return func(*args, **kwargs)
        offset = self._ops
        self._ops += 1
        if offset >= self.policy.ops or not same_op(str(func), self.policy.names.get(offset)):
            planned = self.policy.names.get(offset, "not there")
            self.differs = f"its op {offset} is {func} and {planned} in the plan"
            self.followed = False
            return func(*args, **kwargs)
        saved = offset in self.policy.saved
        leaves, tree = tree_flatten((args, kwargs))
        generators = None
        if not saved and torch.Tag.nondeterministic_seeded in func.tags:
            generators = self._generators(leaves)
        before = {storage_key(each) for each in leaves if is_strided(each)} if leaves else set()
        slots = [self._slot(leaf) for leaf in leaves]
        result = func(*args, **kwargs)
        outputs = tree_flatten(result)[0]
        makes = []
        places: dict[int, int] = {}
        for place, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                continue
            if not plain(output):
                self.followed = False
                continue
            key = storage_key(output)
            if key in before:
                continue
            if key not in places:
                places[key] = len(self._made_by)
                self._numbers[key] = places[key]
                self._known.append(StorageWeakRef(output.untyped_storage()))
                self._made_by.append((offset, len(places) - 1))
            makes.append((place, places[key]))
        targets = written(func, args, kwargs)
        self._note_writes(func, targets, saved, places)
        if self.followed and (targets or makes or not outputs):  # views are slots, not lines
            kept = None
            if saved:
                kept = {number: outputs[place].untyped_storage() for place, number in makes}
            self._lines.append(_Line(func, slots, tree, tuple(makes), kept, generators))
        return result

    def _slot(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not plain(leaf):
            self.followed = False
            return None
        number = self._numbers.get(storage_key(leaf))
        return leaf.detach() if number is None else _Slot(number, strided_view_of(leaf))

    def _generators(self, leaves: list[Any]) -> Generators:
        """Return the generator states of the devices that a random op is on, or is told to be on."""
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self.followed = False  # one of the user's own, of which nothing is known
        places = (torch.empty(0, device=leaf) for leaf in leaves if isinstance(leaf, torch.device))
        return generators_of(self.device_type, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *places)

    def _note_writes(self, func: Any, targets: list[torch.Tensor], saved: bool, made: dict[int, int]) -> None:
        """Note the storages that an op writes; a write to one from outside the region forbids a replay."""
        if func in EMPTY:
            self._unwritten.update(made.values())
            return
        for target in targets:
            number = self._numbers.get(storage_key(target))
            if number is not None:
                self._unwritten.discard(number)
            elif not saved:
                self.followed = False

    def pack(self, tensor: torch.Tensor) -> TapedTensor:
        """Pack what autograd saves."""
        guard = DisableTorchDispatch()
        try:
            number = self._numbers.get(local_key(tensor), -1) if plain(local_tensor(tensor)) else -1
            if (
                self.followed
                and number >= 0
                and number not in self._unwritten
                and self._made_by[number] in self.policy.dropped
            ):
                self._needed = len(self._lines)
                self._wanted[number] = self._wanted.get(number, 0) + 1
                return TapedTensor(self, None, number, strided_view_of(tensor), wrapping_like(tensor))
            saved = TapedTensor(self, detached(tensor) if tensor.grad_fn is not None else tensor)
            if self.followed and number >= 0 and self._made_by[number][0] in self.policy.offload:
                self._leaving.append(saved)
            return saved
        finally:
            del guard

    def end(self) -> None:
        """Record nothing more."""
        self.followed = False

    def end_region(self) -> str | None:
        """Record nothing more, and return how the region differs from the plan; ops after its end do not count."""
        last = max((op for op, _ in self.policy.dropped), default=-1)
        if self.followed and 0 < self._ops <= last:
            self.differs = f"it ran {self._ops} ops and has {self.policy.ops} in the plan"
        self.followed = False
        return None if self._ops > self.policy.ops else self.differs

    # -- the replay -------------------------------------------------------------------------------------------------

    @staticmethod
    def unpack(saved: TapedTensor) -> torch.Tensor:
        """Unpack what backward asks for; the first request replays the region."""
        tape = saved.tape
        if tape is not None:
            tape.end()
            if tape._replayed is None:
                if tape._on_backward is not None:
                    tape._on_backward()
                if tape.offloaded is not None:
                    tape.offloaded.restore()
                    tape.offloaded = None
                tape._replayed = tape._replay()
            saved.tape = None
            if saved.tensor is None:
                saved.tensor = tape._take(saved)
        assert saved.tensor is not None
        return saved.tensor

    def _take(self, saved: TapedTensor) -> torch.Tensor:
        assert self._replayed is not None and saved.view is not None
        tensor = saved.view.of(self._replayed[saved.number])
        self._wanted[saved.number] -= 1
        if not self._wanted[saved.number]:
            del self._replayed[saved.number]
        return tensor if saved.wrap is None else saved.wrap(tensor)

    def _replay(self) -> dict[int, torch.UntypedStorage]:
        """Run the recorded lines that are not saved, and return the storages that were dropped."""
        lines, self._lines = self._lines[: self._needed], []
        last = {
            leaf.number: index for index, line in enumerate(lines) for leaf in line.leaves if isinstance(leaf, _Slot)
        }
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), DisableAutocast():
            for index, line in enumerate(lines):
                if line.kept is not None:
                    storages.update(line.kept)
                else:
                    self._run(line, storages)
                for number in {leaf.number for leaf in line.leaves if isinstance(leaf, _Slot)}:
                    if last[number] == index and number not in self._wanted:
                        del storages[number]
                for _, number in line.makes:
                    if number not in last and number not in self._wanted:
                        storages.pop(number, None)
                lines[index] = None  # type: ignore[call-overload]
        return storages

    def _run(self, line: _Line, storages: dict[int, torch.UntypedStorage]) -> None:
        leaves = [leaf.view.of(storages[leaf.number]) if isinstance(leaf, _Slot) else leaf for leaf in line.leaves]
        args, kwargs = tree_unflatten(leaves, line.tree)
        if line.generators is None:
            result = line.func(*args, **kwargs)
        else:
            with with_generators(line.generators, self.device_type):
                result = line.func(*args, **kwargs)
        outputs = tree_flatten(result)[0]
        if is_begun(line.func):
            for output in outputs:
                wait_for(output)
        for place, number in line.makes:
            storages[number] = outputs[place].untyped_storage()
