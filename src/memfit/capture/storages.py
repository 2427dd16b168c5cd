"""The lifetime of every storage: allocated where it was first seen, freed when the last reference went.

Note [Host and device]: on a CUDA target a real tensor may stand for a tensor on the device or for one in host memory.
Every storage seen is known: by its number when it is on the device, as `HOST` when it is not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.trace_types import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase
from memfit.torch_private.storages import key_of, storage_key, storage_keys

BATCH = "the batch"
HOST = -1
_LISTED = 16
"""As many integers are taken for a list that somebody wrote as an index."""


@dataclass(slots=True)
class StorageDraft:
    """A storage while the capture runs; `references` counts the C++ storages that stand for it.

    Of these, `saved` counts the one that autograd holds.
    """

    bytes: int
    alloc_at: int
    call: int
    phase: Phase
    free_after: int = AFTER_STEP
    category: Category | None = None
    module: str = ""
    name: str = ""
    saved_by: set[int] | None = None
    references: int = 1
    saved: int = 0
    released: int = AFTER_STEP
    stream: Any = None
    resized: bool = False

    def save(self, sequence: int) -> None:
        """Note the autograd node, by its sequence number, that holds the storage for its backward."""
        if self.saved_by is None:
            self.saved_by = set()
        self.saved_by.add(sequence)


class _StorageRef(weakref.ref):
    __slots__ = ("number", "pointer", "saved")
    number: int
    pointer: int
    saved: bool


class StorageTable:
    """All storages of a capture. `now` is the number of ops recorded so far."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.drafts: list[StorageDraft] = []
        self.now = 0
        self.phase = Phase.FORWARD
        self.known: dict[int, int] = {}
        self.foreign: dict[int, Category] = {}
        self.valueless: set[int] = set()
        self.origins: dict[int, frozenset[str]] = {}
        """Storages with values that other steps do not have: the lines that drew them, and `BATCH`."""
        self.twins: dict[int, torch.UntypedStorage] = {}
        self._refs: dict[int, _StorageRef] = {}
        self._closed = False
        self.paused = False
        self.in_optimizer = False
        self._held: dict[int, _StorageRef] = {}
        self._saved: dict[int, _StorageRef] = {}
        self.emptied: set[int] = set()
        """Storages without bytes that `resize_` may give some again (Note [Parallel capture])."""
        self.homes: dict[int, tuple[str, Category]] = {}
        """The module that a storage gets bytes for, and what they are, where that is known."""
        self._homes: dict[int, str] = {}
        """The module in whose call each of these last got bytes; in the backward there is no call."""
        self.local: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Gives the part of a distributed tensor that this rank holds; None where there are no others."""
        self.current_stream: Callable[[], Any] | None = None

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's storage, or `HOST`."""
        return self.known.get(storage_key(tensor if self.local is None else self.local(tensor)), HOST)

    def numbers_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the tensors' storages, or `HOST` for each of them."""
        if self.local is not None:
            return list(map(self.number_of, tensors))
        known = self.known
        return [known.get(key, HOST) for key in storage_keys(tensors)]

    def numbers_of_inputs(self, tensors: Sequence[torch.Tensor], module: str) -> list[int]:
        """Return the numbers of an op's inputs; those never seen before are classified."""
        known = self.known
        numbers = [known.get(key) for key in storage_keys(tensors)]
        if None not in numbers:
            return numbers  # type: ignore[return-value]
        return [
            self.classify(tensor, module) if number is None else number
            for tensor, number in zip(tensors, numbers, strict=True)
        ]

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is, or stands for, one on the target device."""
        if self.device_type == "cpu":
            return True
        pointer = storage_key(tensor if self.local is None else self.local(tensor))
        number = self.known.get(pointer)
        if number is None:
            return tensor.device.type != "cpu"
        return number != HOST or pointer in self._held or pointer in self.emptied

    def adopt(self, tensor: torch.Tensor, category: Category, *, module: str = "", name: str = "") -> int:
        """Register a storage that exists before the step; gives its number."""
        storage = (tensor if self.local is None else self.local(tensor)).untyped_storage()
        number = self.known.get(key_of(storage))
        if number is None:
            number = self.new(storage, BEFORE_STEP, NO_INDEX)
            draft = self.drafts[number]
            draft.category, draft.module, draft.name = category, module, name
        return number

    def adopt_emptied(self, tensor: torch.Tensor) -> None:
        """Register a storage without bytes that exists before the step and that `resize_` gives some in it."""
        storage = tensor.untyped_storage()
        self.hold_host(storage)
        self.emptied.add(key_of(storage))

    def adopt_batch(self, tensor: torch.Tensor) -> None:
        """Register a tensor of the batch, whose values other steps do not have."""
        self.adopt(tensor, Category.INPUT, name="batch")
        if not tensor.is_meta:
            self.origins[storage_key(tensor)] = frozenset({BATCH})

    def in_host_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor was seen, and is not on the target device."""
        return self.known.get(storage_key(tensor)) == HOST and not self.on_device(tensor)

    def hold_host(self, storage: torch.UntypedStorage) -> int:
        """Register a storage in host memory that the capture may write to."""
        self.known[key_of(storage)] = HOST
        self._watch(storage, HOST)
        return HOST

    def move_to_device(self, tensor: torch.Tensor, module: str) -> int:
        """Count a tensor in host memory as resident on the device from the start."""
        storage = tensor.untyped_storage()
        del self.known[key_of(storage)]
        return self.adopt(tensor, self.foreign.get(key_of(storage), Category.INPUT), module=module)

    def classify(self, tensor: torch.Tensor, module: str) -> int:
        """Return the number of an op's input. One never seen before is not the capture's own.

        It existed before the step, unless it is a scalar or a short list of indices (`x[:, [-1]]`): those are made
        outside the dispatcher.
        """
        storage = tensor.untyped_storage()
        number = self.known.get(key_of(storage))
        if number is not None:
            return number
        self.foreign[key_of(storage)] = Category.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Category.INPUT
        if self.device_type != "cpu" and tensor.device.type == "cpu":
            return self.hold_host(storage)
        if self.paused:  # counted if it outlives the pause
            return self._hold(storage)
        if tensor.dim() == 0 or (tensor.dtype == torch.int64 and tensor.numel() <= _LISTED):
            return self.new(storage, self.now, NO_INDEX)
        number = self.new(storage, BEFORE_STEP, NO_INDEX)
        self.drafts[number].category = Category.OPTIMIZER_STATE if self.in_optimizer else Category.BUFFER
        self.drafts[number].module = module
        return number

    def made(self, storage: torch.UntypedStorage, call: int, *, on_device: bool) -> int:
        """Return the number of an op's result."""
        number = self.known.get(key_of(storage))
        if number is not None:
            return number
        if not on_device:
            return self.hold_host(storage)
        return self._hold(storage) if self.paused else self.new(storage, self.now, call)

    def _hold(self, storage: torch.UntypedStorage) -> int:
        """Register a storage of the device while paused: it gets its number at the end of the pause, if it lives."""
        self.hold_host(storage)
        self._held[key_of(storage)] = self._refs[key_of(storage)]
        return HOST

    def new(self, storage: torch.UntypedStorage, alloc_at: int, call: int) -> int:
        """Number a storage of the device."""
        number = len(self.drafts)
        stream = None if self.current_stream is None or alloc_at == BEFORE_STEP else self.current_stream()
        self.drafts.append(StorageDraft(storage.nbytes(), alloc_at, call, self.phase, stream=stream))
        self.known[key_of(storage)] = number
        self._watch(storage, number)
        return number

    def resized(self, storage: torch.UntypedStorage, call: int, module: str) -> None:
        """Free what a storage was, and number it anew if it has bytes again (Note [Parallel capture])."""
        pointer = key_of(storage)
        number = self.known.get(pointer)
        if number is None or (number == HOST and pointer not in self.emptied):
            return
        if number != HOST:
            self.drafts[number].free_after = self.drafts[number].released = max(0, self.now - 1)
        self.emptied.discard(pointer)
        if storage.nbytes() == 0:
            self.hold_host(storage)  # its old weak reference goes, and does not free the draft once more
            self.emptied.add(pointer)
            return
        draft = self.drafts[self.new(storage, self.now, call)]
        draft.resized, draft.category = True, Category.GATHERED_PARAMETER
        if pointer in self.homes:
            draft.module, draft.category = self.homes[pointer]
            return
        draft.module = self._homes[pointer] = module or self._homes.get(pointer, "")

    def stand_in(self, storage: torch.UntypedStorage, twin: torch.UntypedStorage) -> None:
        """Let a second storage stand for one already known: that one lives as long as either."""
        number = self.known[key_of(storage)]
        self.twins[key_of(storage)] = twin
        self.known[key_of(twin)] = number
        if number != HOST:
            self.drafts[number].references += 1
        ref = self._watch(twin, number)
        if key_of(storage) in self._held:
            self._held[key_of(twin)] = ref

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what autograd holds in the place of a tensor.

        It is on a storage of its own, so that it is seen when nobody else holds the tensor any more.
        """
        storage = tensor.untyped_storage()
        number = self.known[key_of(storage)]
        draft = self.drafts[number]
        if draft.alloc_at == BEFORE_STEP or draft.resized or tensor.is_conj() or tensor.is_neg():
            return tensor.detach()
        ref = self._saved.get(number)
        twin = None if ref is None else ref()
        if twin is not None and twin.device != storage.device:  # its values are known in one place and not in another
            return tensor.detach()
        if twin is None:
            if tensor.is_meta:
                twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            else:
                twin = storage.clone()
                if key_of(storage) in self.valueless:
                    self.valueless.add(key_of(twin))
                if key_of(storage) in self.origins:
                    self.origins[key_of(twin)] = self.origins[key_of(storage)]
            self.known[key_of(twin)] = number
            self.drafts[number].references += 1
            self.drafts[number].saved += 1
            self._saved[number] = self._watch(twin, number, saved=True)
        made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return made.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]

    @contextlib.contextmanager
    def pause(self, category: Category) -> Iterator[None]:
        """Count what is made in the block and outlives it as having existed before the step."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
            held, self._held = self._held, {}
            for pointer, ref in held.items():
                storage = ref()
                if storage is None or self.known.get(pointer) != HOST:  # freed, or the twin of one just numbered
                    continue
                number = self.new(storage, BEFORE_STEP, NO_INDEX)
                self.drafts[number].category = category
                if pointer in self.twins:
                    self.stand_in(storage, self.twins[pointer])

    def outliving(self) -> list[_StorageRef]:
        """Return the storages that the step made and that are alive, without gradients and optimizer state."""
        kept = (Category.GRADIENT, Category.OPTIMIZER_STATE)
        found = []
        for pointer, ref in self._refs.items():
            draft = self.drafts[ref.number] if ref.number != HOST else None
            if pointer in self.foreign or (
                draft is not None and (draft.alloc_at == BEFORE_STEP or draft.category in kept)
            ):
                continue
            found.append(ref)
        return found

    def inherit(self, before: StorageTable) -> None:
        """Begin with what is alive of an earlier pass and not yet known here."""
        numbers: dict[int, int] = {}
        for pointer, ref in before._refs.items():
            storage = ref()
            if storage is None or pointer in before.foreign:
                continue
            if pointer in self.known:  # a batch is new in every step: its values are known again
                if ref.number != HOST:
                    numbers[ref.number] = self.known[pointer]
                continue
            if pointer in before.valueless:
                self.valueless.add(pointer)
            if ref.number == HOST:
                self.hold_host(storage)
                if pointer in before.emptied:
                    self.emptied.add(pointer)
            elif ref.number in numbers:
                number = self.known[pointer] = numbers[ref.number]
                self.drafts[number].references += 1
                self._watch(storage, number)
            else:
                draft = before.drafts[ref.number]
                number = numbers[ref.number] = self.new(storage, BEFORE_STEP, NO_INDEX)
                self.drafts[number].category = draft.category or Category.BUFFER
                self.drafts[number].module, self.drafts[number].name = draft.module, draft.name
        self.twins.update({pointer: twin for pointer, twin in before.twins.items() if pointer in self.known})

    def close(self) -> None:
        """End the step: what is freed from now on was alive at its end."""
        self._refs.clear()
        self._closed = True  # whoever looks for leftovers holds the references, whose callbacks go on

    def _watch(self, storage: torch.UntypedStorage, number: int, *, saved: bool = False) -> _StorageRef:
        ref = _StorageRef(storage, self._on_death)
        ref.number, ref.pointer, ref.saved = number, key_of(storage), saved
        self._refs[ref.pointer] = ref
        return ref

    def _on_death(self, ref: weakref.ref) -> None:
        assert isinstance(ref, _StorageRef)
        if self._closed:
            return
        pointer, number = ref.pointer, ref.number
        if self._refs.get(pointer) is ref:
            del self._refs[pointer]
            self.known.pop(pointer, None)
            self.foreign.pop(pointer, None)
            self.valueless.discard(pointer)
            self.origins.pop(pointer, None)
            self.twins.pop(pointer, None)
            self.emptied.discard(pointer)
            self._homes.pop(pointer, None)
            self._held.pop(pointer, None)  # the next storage at this address may be in host memory
        if number == HOST:
            return
        draft = self.drafts[number]
        draft.references -= 1
        draft.saved -= ref.saved
        if draft.references == draft.saved and not ref.saved:
            draft.released = max(0, self.now - 1)
        if draft.references == 0:
            draft.free_after = max(0, self.now - 1)
