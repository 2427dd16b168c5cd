"""The dispatch mode that sees every aten call of a step and the life of every storage.

Note [Values]: tensors of the capture are meta tensors, except small ones whose values are known (constants, a batch
of real tensors and what is computed from these alone). Those stay real until they meet a meta tensor, so that a model
may branch on them as it would in a real run. A real tensor that existed before the capture is never written to.

Note [Place]: on a CUDA target a real tensor may stand for a tensor on the device or for one in host memory. Every
storage seen is in `_known`: with its number when it is on the device, with `HOST` when it is not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from memfit.trace.arguments import encode_arguments, map_tensors, tensors_of
from memfit.trace.calls import CallTracker
from memfit.trace.engine import adds_in_place, sole_owner_counts
from memfit.trace.errors import BAD_SHAPES, DATA_DEPENDENT, NO_META_KERNEL, CaptureError
from memfit.trace.record import NEVER, Category, Op, Phase, Storage, TensorRef
from memfit.trace.rules import Rule, RuleContext, Rules
from memfit.trace.source import SourceTable

HOST = -1
KNOWN_VALUE_LIMIT = 1 << 16
"""Tensors of more elements than this lose their values."""

_META = torch.device("meta")
_aten = torch.ops.aten


@dataclass(slots=True)
class StorageDraft:
    """A storage while the capture runs."""

    bytes: int
    birth: int
    call: int
    phase: Phase
    death: int = NEVER
    category: Category | None = None
    module: str = ""
    name: str = ""
    saved_by: set[int] = field(default_factory=set)
    lives: int = 1


@dataclass(frozen=True, slots=True)
class _OpInfo:
    name: str
    random: bool
    writes: tuple[int | str, ...]
    aliases: bool
    factory: bool
    flops: Callable[..., int] | None
    saves_number: bool
    kernel: Rule | None
    workspace: Rule | None


class _StorageRef(weakref.ref):
    __slots__ = ("number", "pointer")
    number: int
    pointer: int


class Recorder(TorchDispatchMode):
    """Runs every op on meta tensors and writes down what it did."""

    def __init__(
        self, *, context: RuleContext, rules: Rules, calls: CallTracker, sources: SourceTable
    ) -> None:
        super().__init__()
        sole_owner_counts()
        self.context = context
        self.device_type = context.device_type
        self.rules = rules
        self.calls = calls
        self.sources = sources
        self.phase = Phase.FORWARD
        self.ops: list[Op] = []
        self.storages: list[StorageDraft] = []
        self.saved_ops: set[int] = set()
        self.failure: tuple[int, str, str, int] | None = None
        self.placing: str | None = None
        self.in_optimizer = False
        self.notes: set[str] = set()
        self.backward_began: list[int] = []
        self._known: dict[int, int] = {}
        self._refs: dict[int, _StorageRef] = {}
        self._foreign: dict[int, torch.Tensor] = {}
        self._valueless: set[int] = set()
        self._twins: dict[int, torch.UntypedStorage] = {}
        self._producers: dict[TensorRef, int] = {}
        self._last_producer: dict[int, int] = {}
        self._first_use: dict[int, int] = {}
        self._op_of_sequence: dict[int, int] = {}
        self._infos: dict[Any, _OpInfo] = {}
        self._paused: dict[int, _StorageRef] | None = None
        self._interned: dict[Any, Any] = {}
        self._saved_numbers: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo is never near a capture; its guard would cost every op some microseconds."""
        return False

    # -- storages ---------------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor, category: Category, *, module: str = "", name: str = "") -> int:
        """Register a storage that exists before the step; gives its number."""
        storage = tensor.untyped_storage()
        number = self._known.get(storage._cdata)
        if number is None:
            number = self._new(storage, NEVER, NEVER)
            draft = self.storages[number]
            draft.category, draft.module, draft.name = category, module, name
        return number

    def hold_host(self, tensor: torch.Tensor) -> None:
        """Register a tensor in host memory that the capture may write to."""
        self._known[tensor.untyped_storage()._cdata] = HOST
        self._watch(tensor.untyped_storage(), HOST)

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, or `HOST`."""
        return self._known.get(tensor.untyped_storage()._cdata, HOST)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is, or stands for, one on the target device."""
        if self.device_type == "cpu":
            return True
        if tensor.device.type != "cpu":
            return True
        return self._known.get(tensor.untyped_storage()._cdata, HOST) != HOST

    def _new(self, storage: torch.UntypedStorage, birth: int, call: int) -> int:
        number = len(self.storages)
        self.storages.append(StorageDraft(storage.nbytes(), birth, call, self.phase))
        self._known[storage._cdata] = number
        self._watch(storage, number)
        return number

    def _watch(self, storage: torch.UntypedStorage, number: int) -> None:
        ref = _StorageRef(storage, self._on_death)
        ref.number, ref.pointer = number, storage._cdata
        self._refs[ref.pointer] = ref

    def _on_death(self, ref: weakref.ref) -> None:
        assert isinstance(ref, _StorageRef)
        pointer, number = ref.pointer, ref.number
        if self._refs.get(pointer) is ref:
            del self._refs[pointer]
            self._known.pop(pointer, None)
            self._valueless.discard(pointer)
            self._twins.pop(pointer, None)
        if number == HOST:
            return
        draft = self.storages[number]
        draft.lives -= 1
        if draft.lives == 0:
            draft.death = len(self.ops) - 1

    def _classify(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._known.get(storage._cdata)
        if number is not None:
            return number
        self._foreign[storage._cdata] = tensor
        if self.device_type != "cpu" and tensor.device.type == "cpu":
            self._known[storage._cdata] = HOST
            return HOST
        number = self._new(storage, NEVER, NEVER)
        self.storages[number].category = Category.BUFFER
        self.storages[number].module = self.calls.path
        return number

    def adopt_fresh(self, tensor: torch.Tensor) -> None:
        """Register a tensor that torch has just made outside the dispatcher, such as `torch.tensor` does."""
        storage = tensor.untyped_storage()
        if self.device_type == "cpu" or (self.placing or "cpu") != "cpu":
            self._new(storage, len(self.ops), self.calls.current)
        else:
            self.hold_host(tensor)

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for a real one from now on; its values are no longer known."""
        if tensor.is_meta:
            return tensor
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._classify(tensor)
            return self._twin(tensor, aliasing=True)

    # -- values (Note [Values]) -------------------------------------------------------------------------------------

    def _has_value(self, tensor: torch.Tensor) -> bool:
        return (
            not tensor.is_meta
            and tensor.device.type == "cpu"
            and tensor.numel() <= KNOWN_VALUE_LIMIT
            and tensor.untyped_storage()._cdata not in self._valueless
        )

    def _twin(self, tensor: torch.Tensor, aliasing: bool) -> torch.Tensor:
        """A meta tensor of the same geometry; with `aliasing` one whose storage stands for the tensor's own."""
        if tensor.is_meta:
            return tensor
        if not aliasing:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        storage = tensor.untyped_storage()
        twin = self._twins.get(storage._cdata)
        if twin is None:
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
            self._twins[storage._cdata] = twin
            number = self._known[storage._cdata]
            self._known[twin._cdata] = number
            if number != HOST:
                self.storages[number].lives += 1
            self._watch(twin, number)
        empty = torch.empty(0, dtype=tensor.dtype, device=_META)
        return empty.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _run(self, func: Any, info: _OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        if info.factory and not tensors:
            return self._make(func, info, args, kwargs)
        if func is _aten._local_scalar_dense.default and self.in_optimizer and not self._has_value(tensors[0]):
            self.notes.add("the optimizer reads values of tensors; no allocation depends on them")
            return 1.0 if tensors[0].is_floating_point() else 1
        if all(tensor.is_meta for tensor in tensors):
            return self._call(func, info, args, kwargs)
        if func is _aten._local_scalar_dense.default and self._has_value(tensors[0]):
            return func(*args, **kwargs)
        written = _written(info, args, kwargs)
        keeps_values = (
            all(self._has_value(tensor) for tensor in tensors)
            and not any(tensor.untyped_storage()._cdata in self._foreign for tensor in written)
        )
        aliasing = bool(written) or info.aliases
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        meta_args = map_tensors(args, lambda tensor: self._twin(tensor, aliasing))
        meta_kwargs = map_tensors(kwargs, lambda tensor: self._twin(tensor, aliasing))
        if keeps_values:
            real_kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            if func is _aten.lift_fresh.default or written or self._is_small(func, meta_args, meta_kwargs):
                return func(*args, **real_kwargs)
        result = self._call(func, info, meta_args, meta_kwargs)
        if written:
            self._valueless.update(tensor.untyped_storage()._cdata for tensor in written if not tensor.is_meta)
        return result

    def _make(self, func: Any, info: _OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        on_meta = {**kwargs, "device": _META}
        result = self._call(func, info, args, on_meta)
        if not isinstance(result, torch.Tensor) or result.numel() > KNOWN_VALUE_LIMIT:
            return result
        return func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})

    def _is_small(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        try:
            outputs = tensors_of((func(*args, **kwargs),))
        except (NotImplementedError, RuntimeError):
            return True
        return all(output.numel() <= KNOWN_VALUE_LIMIT for output in outputs)

    def _call(self, func: Any, info: _OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            if info.kernel is not None:
                return info.kernel(self.context, func, args, kwargs)
            return func(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            self.note_failure(error, str(func))
            tags = func.tags
            if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
                raise self.error("the step depends on the values of a tensor", str(func), DATA_DEPENDENT) from error
            if isinstance(error, NotImplementedError):
                raise self.error("this op has no meta kernel", str(func), NO_META_KERNEL) from error
            raise

    # -- errors -----------------------------------------------------------------------------------------------------

    def error(self, problem: str, op: str, advice: str) -> CaptureError:
        """An error that names the op, the running module and the user's line."""
        source = self.sources.sources[self.sources.here(2)]
        return CaptureError(problem, op=op, module=self.calls.path, source=source, advice=advice)

    def note_failure(self, error: BaseException, op: str) -> None:
        """Remember where an exception came from, in case nobody catches it."""
        if self.failure is None or self.failure[0] != id(error):  # the exception itself would keep its frames alive
            self.failure = (id(error), op, self.calls.path, self.sources.here(2))

    def explain(self, error: BaseException) -> CaptureError | None:
        """The exception as an error about the user's step, when it came from an op."""
        if self.failure is None or self.failure[0] != id(error):
            return None
        _, op, module, source = self.failure
        return CaptureError(
            str(error).split("\n")[0], op=op, module=module, source=self.sources.sources[source], advice=BAD_SHAPES
        )

    # -- recording --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if self.phase is Phase.BACKWARD and adds_in_place(func, args, kwargs, 1):
                func = _aten.add_.Tensor
            info = self._infos.get(func) or self._describe(func)
            tensors = tensors_of(args)
            if kwargs:
                tensors += tensors_of(kwargs.values())
            if func is _aten.lift_fresh.default:
                self.adopt_fresh(tensors[0])
            numbers = [self._classify(tensor) for tensor in tensors]
            result = self._run(func, info, args, kwargs, tensors)
            self._record(func, info, args, kwargs, tensors, numbers, result)
            if info.writes:
                written = _written(info, args, kwargs)
                if len(written) == 1 and isinstance(result, torch.Tensor):
                    return written[0]
            return result

    def _record(
        self,
        func: Any,
        info: _OpInfo,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        numbers: list[int],
        result: Any,
    ) -> None:
        outputs = tensors_of((result,))
        index = len(self.ops)
        call, forward_op = self._attribute(index)
        if self.device_type == "cpu":
            on_device = True
        elif self.placing is not None:
            on_device = self.placing != "cpu"
        elif tensors:
            on_device = any(number != HOST for number in numbers)
        else:
            device = kwargs.get("device")
            on_device = device is not None and torch.device(device).type != "cpu"
        known = self._known
        output_numbers = []
        fresh_bytes = 0
        for output in outputs:
            storage = output.untyped_storage()
            number = known.get(storage._cdata)
            if number is None:
                if self._paused is not None:
                    number = self._hold(storage, on_device)
                elif on_device:
                    number = self._new(storage, index, call)
                    fresh_bytes += storage.nbytes()
                else:
                    number = known[storage._cdata] = HOST
                    self._watch(storage, HOST)
            output_numbers.append(number)
        if self._paused is not None or (not on_device and all(number == HOST for number in numbers)):
            return
        inputs = tuple(map(self._ref, tensors, numbers))
        made = tuple(map(self._ref, outputs, output_numbers))
        mutates: tuple[int, ...] = ()
        mutated_op = NEVER
        if info.writes:
            written = _written(info, args, kwargs)
            mutates = tuple(dict.fromkeys(known[tensor.untyped_storage()._cdata] for tensor in written))
            if written:
                target = written[0]
                mutated_op = self._producer(self._ref(target, mutates[0]))
        view = bool(outputs) and not mutates and all(number in numbers for number in output_numbers)
        for number in numbers:
            self._first_use.setdefault(number, index)
        for ref in made:
            self._producers[ref] = index
            self._last_producer[ref.storage] = index
        read_bytes = written_bytes = 0
        if not view:
            read_bytes = sum(_touched_bytes(tensor) for tensor in tensors)
            written_bytes = sum(_touched_bytes(output) for output in outputs)
        if self.device_type == "cpu" and info.saves_number:
            self._save_number(index, call, args)
        self.ops.append(
            Op(
                name=info.name,
                phase=self.phase,
                call=call,
                inputs=inputs,
                outputs=made,
                arguments=encode_arguments(args, kwargs),
                flops=info.flops(*args, **kwargs, out_val=result) if info.flops is not None else 0,
                read_bytes=read_bytes,
                written_bytes=written_bytes,
                workspace_bytes=info.workspace(self.context, func, args, kwargs, result) if info.workspace is not None else 0,
                view=view,
                random=info.random,
                saved=False,
                mutates=mutates,
                mutated_op=mutated_op,
                forward_op=forward_op,
                source=self.ops[forward_op].source if forward_op != NEVER else self.sources.here(3),
            )
        )

    def _save_number(self, index: int, call: int, args: Any) -> None:
        """`x * 2.0` keeps the number for its backward, as a tensor of eight bytes that no hook sees."""
        if torch.is_grad_enabled() and args[0].requires_grad and not isinstance(args[1], torch.Tensor):
            self._saved_numbers[index] = len(self.storages)
            self.storages.append(StorageDraft(8, index, call, self.phase, saved_by={torch.autograd._get_sequence_nr() - 1}))

    def _attribute(self, index: int) -> tuple[int, int]:
        """The module call an op belongs to and, in backward, the forward op whose gradient it computes."""
        current = self.calls.current
        if self.phase is not Phase.BACKWARD or current != NEVER:
            if torch.is_grad_enabled() or self.phase is not Phase.BACKWARD:
                self._op_of_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, index)
            return current, NEVER
        forward_op = NEVER
        node = torch._C._current_autograd_node()
        if node is not None:
            variable = getattr(node, "variable", None)
            if variable is not None:
                forward_op = self._first_use.get(self.number_of(variable), NEVER)
            else:
                forward_op = self._op_of_sequence.get(node._sequence_nr(), NEVER)
        if forward_op == NEVER or forward_op >= index:
            return (self.ops[-1].call if self.ops and self.ops[-1].phase is Phase.BACKWARD else NEVER), NEVER
        number = self._saved_numbers.get(forward_op)
        if number is not None:
            self.storages[number].death = index
        call = self.ops[forward_op].call
        self.calls.backward(call, index)
        return call, forward_op

    def _ref(self, tensor: torch.Tensor, number: int) -> TensorRef:
        ref = TensorRef(
            storage=number,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
            dtype=str(tensor.dtype)[6:],
        )
        return self._interned.setdefault(ref, ref)

    def _producer(self, ref: TensorRef) -> int:
        producer = self._producers.get(ref)
        return self._last_producer.get(ref.storage, NEVER) if producer is None else producer

    def _describe(self, func: Any) -> _OpInfo:
        schema = func._schema
        writes: list[int | str] = []
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes.append(argument.name if argument.kwarg_only else position)
        aliases = not writes and any(r.alias_info is not None for r in schema.returns)
        factory = any(argument.name == "device" for argument in schema.arguments)
        flops = flop_registry.get(func._overloadpacket)
        info = _OpInfo(
            name=str(func),
            random=torch.Tag.nondeterministic_seeded in func.tags,
            writes=tuple(writes),
            aliases=aliases or func._overloadpacket in (_aten._unsafe_view, _aten._reshape_alias),
            factory=factory,
            flops=flops,
            saves_number=func in (_aten.mul.Tensor, _aten.div.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor),
            kernel=self.rules.kernels.get(str(func)),
            workspace=self.rules.workspaces.get(str(func)),
        )
        self._infos[func] = info
        return info

    # -- what autograd keeps ----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook for tensors that autograd saves."""
        if self._paused is not None:
            return tensor
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            number = self._known.get(storage._cdata)
            if number is None:
                if self.device_type != "cpu" and tensor.device.type == "cpu":
                    return tensor
                number = self._new(storage, len(self.ops), self.calls.current)
            elif number == HOST:
                return tensor
            self.storages[number].saved_by.add(torch.autograd._get_sequence_nr() - 1)
            producer = self._producer(self._ref(tensor, number))
            if producer != NEVER:
                self.saved_ops.add(producer)
            if tensor.is_leaf:
                return tensor
            with _disable_current_modes():  # kept as it is, a node's own result would hold the node in a cycle
                return tensor.detach()

    # -- pausing ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self, category: Category) -> Iterator[None]:
        """Run ops without recording them; what they leave alive counts as having existed before the step."""
        self._paused = {}
        try:
            yield
        finally:
            held, self._paused = self._paused, None
            for ref in held.values():
                storage = ref()
                if storage is not None:
                    number = self._new(storage, NEVER, NEVER)
                    self.storages[number].category = category

    def _hold(self, storage: torch.UntypedStorage, on_device: bool) -> int:
        """A storage made while paused: watched as host memory until it turns out to outlive the pause."""
        assert self._paused is not None
        self._known[storage._cdata] = HOST
        self._watch(storage, HOST)
        if on_device:
            self._paused[storage._cdata] = self._refs[storage._cdata]
        return HOST

    # -- the result -------------------------------------------------------------------------------------------------

    def frozen_ops(self) -> tuple[Op, ...]:
        """The ops, with what was learnt about them after they ran."""
        replace = msgspec.structs.replace
        return tuple(replace(op, saved=True) if i in self.saved_ops else op for i, op in enumerate(self.ops))

    def frozen_storages(self) -> tuple[Storage, ...]:
        """The storages with their final categories."""
        return tuple(
            Storage(
                bytes=draft.bytes,
                category=draft.category or self._category_of(draft),
                birth=draft.birth,
                death=draft.death,
                call=draft.call,
                module=draft.module or (self.calls.calls[draft.call].module if draft.call != NEVER else ""),
                name=draft.name,
                saved_by=tuple(
                    sorted({self._op_of_sequence.get(sequence, NEVER) for sequence in draft.saved_by} - {NEVER})
                ),
            )
            for draft in self.storages
        )

    def _category_of(self, draft: StorageDraft) -> Category:
        if draft.phase not in (Phase.FORWARD, Phase.LOSS):
            return Category.TEMPORARY
        held = any(draft.birth < began and (draft.death >= began or draft.death == NEVER) for began in self.backward_began)
        return Category.ACTIVATION if held or draft.saved_by else Category.TEMPORARY


def _written(info: _OpInfo, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    values = []
    for where in info.writes:
        if isinstance(where, int):
            if where < len(args):
                values.append(args[where])
        elif where in kwargs:
            values.append(kwargs[where])
    return tensors_of(values)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor, counting an expanded one once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
