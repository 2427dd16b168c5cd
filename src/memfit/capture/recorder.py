"""The dispatch mode that sees every aten call of a step and writes down what it did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from memfit.capture.arguments import (
    GENERATOR,
    ArgumentTable,
    TensorRefTable,
    generators_of,
    is_wrapper,
    map_tensors,
    tensors_of,
)
from memfit.capture.autograd_engine import SEEN_DIFFERENTLY, adds_in_place, in_place_in_backward, sole_owner_counts
from memfit.capture.call_stack import CallTracker, SourceTable
from memfit.capture.errors import CaptureError, explain_failure, is_of_an_op, refusal_of
from memfit.capture.execution import INDEXING, Executor, OpInfo, OpResult, takes_random_numbers, written_by
from memfit.capture.kernels import inexact
from memfit.capture.random_paths import RandomDraws
from memfit.capture.rules import RuleContext, Rules
from memfit.capture.saved_numbers import end_unread_numbers
from memfit.capture.storages import BATCH, HOST, StorageDraft, StorageTable
from memfit.capture.trace_types import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Op, Phase, Storage, TensorRef
from memfit.torch_private.autograd import current_autograd_node, next_sequence_number, sequence_number
from memfit.torch_private.dispatch import DisableTorchFunction, DispatchMode, disable_current_modes, schema_of
from memfit.torch_private.storages import storage_key

if TYPE_CHECKING:
    from memfit.capture.parallel import ParallelCapture

_aten = torch.ops.aten
_META = torch.device("meta")
_CPU = torch.device("cpu")
_PLACE = "_memfit_place"
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default)


class Recorder(DispatchMode):
    """Runs every op through the executor and keeps the record."""

    def __init__(
        self, *, context: RuleContext, rules: Rules, calls: CallTracker, sources: SourceTable, draws: RandomDraws
    ) -> None:
        super().__init__()
        self.draws = draws
        sole_owner_counts()
        self.device_type = context.device_type
        self.table = StorageTable(context.device_type)
        self.executor = Executor(context, rules, self.table)
        self.calls = calls
        self.sources = sources
        self.ops: list[Op] = []
        self.saved_ops: set[int] = set()
        self.notes: set[str] = set()
        self.reads_of_batch: dict[str, None] = {}
        """The lines that take a size or a decision from values of the batch."""
        self.forced_device: str | None = None
        self.finite_tests: dict[int, bool] = {}
        self._optimizer_source: int | None = None
        self.backward_began: list[int] = []
        self._producers: dict[int, int] = {}
        self._last_producer: dict[int, int] = {}
        self._first_use: dict[int, int] = {}
        self._op_of_sequence: dict[int, int] = {}
        self._saved_numbers: dict[int, int] = {}
        self._last_of_node: dict[int, int] = {}
        self._refs = TensorRefTable()
        self._arguments = ArgumentTable()
        self._inexact = inexact() if context.device_type == "cpu" else {}
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self.parallel: ParallelCapture | None = None

    @property
    def phase(self) -> Phase:
        """The part of the step that runs now."""
        return self.table.phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.table.phase = phase

    @property
    def in_optimizer(self) -> bool:
        """Whether an optimizer's `step` is running."""
        return self.table.in_optimizer

    @in_optimizer.setter
    def in_optimizer(self, running: bool) -> None:
        self.table.in_optimizer = running
        self._optimizer_source = None

    def adopt_fresh(self, tensor: torch.Tensor) -> None:
        """Register a tensor that torch has just made outside the dispatcher, such as `torch.tensor` does."""
        on_device = self.device_type == "cpu" or (self.forced_device or "cpu") != "cpu"
        self.table.made(tensor.untyped_storage(), self.calls.current, on_device=on_device)

    def adopt(self, tensor: torch.Tensor) -> int:
        """Number a tensor that stands for one which ops that did not run would have made."""
        return self.table.new(tensor.untyped_storage(), max(0, self.table.now - 1), NO_INDEX)

    def producers(self, tensor: torch.Tensor) -> tuple[int | None, int | None]:
        """Return the op of forward or backward that made a tensor or saw it as a view, and the last on its storage."""
        number = self.table.number_of(tensor)
        made, last = self._producers.get(id(self._refs.ref(tensor, number))), self._last_producer.get(number)
        return self._unless_optimizer(made), self._unless_optimizer(last)

    def set_producers(self, tensor: torch.Tensor, producers: tuple[int | None, int | None]) -> None:
        """Let a tensor be made by the ops that made another, which stands for it."""
        made, last = producers
        if made is None and last is None:
            return
        number = self.table.number_of(tensor)
        if made is not None:
            self._producers[id(self._refs.ref(tensor, number))] = made
        if last is not None:
            self._last_producer[number] = last

    def _unless_optimizer(self, op: int | None) -> int | None:
        return None if op is None or self.ops[op].phase is Phase.OPTIMIZER else op

    # -- errors -----------------------------------------------------------------------------------------------------

    def note_failure(self, error: BaseException, op: str) -> None:
        """Remember the op or, without one, the module in which an exception was raised, in case nobody catches it."""
        if not hasattr(error, _PLACE):
            with contextlib.suppress(AttributeError, TypeError):  # some exceptions take no attributes
                setattr(error, _PLACE, (op, self._place(), self.sources.here(2)))

    def _place(self) -> str:
        """Say which part of the step runs now: a module or, outside of all, the phase."""
        if self.calls.current != NO_INDEX:
            return self.calls.path
        if self.in_optimizer:
            return "the optimizer's step"
        outside = {Phase.LOSS: "the loss", Phase.BACKWARD: "the backward"}
        return outside.get(self.phase, "")

    def explain(self, error: Exception, place: str = "") -> CaptureError:
        """Return the exception as an error about the user's step: an op that failed, or what their code raised."""
        op, module, source = getattr(error, _PLACE, ("", place or self._place(), 0))
        if op and not is_of_an_op(error):
            op = ""
        if not op:
            source = self.sources.raised(error)
        return explain_failure(error, op=op, module=module, source=self.sources.sources[source])

    def _refusal(self, func: Any, error: Exception) -> CaptureError | None:
        """Return the error to raise instead of a meta kernel's, where the reason is plain."""
        reason = refusal_of(func, error)
        if reason is None:
            return None
        source = self.sources.sources[self.sources.here(3)]
        return CaptureError(reason[0], op=str(func), module=self.calls.path, source=source, advice=reason[1])

    def _refuse_strangers(self, tensors: list[torch.Tensor], op: str) -> None:
        """Refuse a leaf that takes gradients and is not the model's; its gradient could not be told from the user's."""
        for tensor in tensors:
            takes_gradient = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
            if takes_gradient and storage_key(tensor) in self.table.foreign:
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} takes gradients but is no parameter of the model",
                    op=op,
                    module=self.calls.path,
                    source=self.sources.sources[self.sources.here(2)],
                    advice="register it as a parameter of the model, or detach it",
                )

    # -- recording --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = self.executor.describe(func)
        if info.ignored:
            return func(*args, **kwargs)
        if types and any(map(is_wrapper, types)):
            return NotImplemented  # the wrapper comes first: the ops on the tensors inside are the ones that run
        if self.parallel is not None:
            if (waited := self.parallel.waited(func, args)) is not None:
                return waited
            if self.parallel.used_maps and self.parallel.is_of_used_map(args):
                return self.parallel.run_on_used_map(func, args)
        with DisableTorchFunction():
            if func is _aten._local_scalar_dense.default and self.is_host_number(args[0]):
                return func(*args, **kwargs)
            if id(func) in SEEN_DIFFERENTLY and self.table.phase is Phase.BACKWARD:
                if adds_in_place(func, args, kwargs, 1):
                    func = _aten.add_.Tensor
                else:
                    func, args = in_place_in_backward(func, args, self._made_in_backward)
                    if func is _aten.mul_.Tensor and args[1].is_meta:  # a gradient has no known values
                        args = (self.executor.lift(args[0], self.calls.path), args[1])
                info = self.executor.describe(func)
            parallel = self.parallel
            collective = parallel is not None and func.namespace == "c10d"
            tensors, arguments = self._arguments.split(parallel.described(args) if collective else args, kwargs)  # type: ignore[union-attr]
            if GENERATOR in arguments:
                self._keep_generators(args, kwargs)
            if self.table.paused:
                return self._run_paused(func, info, args, kwargs, tensors, arguments)
            if func is _aten.lift_fresh.default:
                self.adopt_fresh(tensors[0])
            elif func is _aten._local_scalar_dense.default and self._is_unread(tensors[0]):
                return 1.0 if tensors[0].is_floating_point() else 1
            elif func is _aten._local_scalar_dense.default and (answer := self._answer(tensors[0])) is not None:
                return answer
            elif func is _aten._to_copy.default and tensors and self._stays_in_place(tensors[0], kwargs):
                with disable_current_modes():
                    return self.executor.lift(tensors[0], self.calls.path).detach()
            leaves = _leaves_device(func, tensors, kwargs)
            inputs = self._inputs(tensors)
            if self.table.foreign and self.table.phase is not Phase.OPTIMIZER:
                self._refuse_strangers(tensors, info.name)
            if self.device_type != "cpu" and func not in _COPIES and self._parted(inputs):
                args, kwargs = self._meet_on_device(args, kwargs, inputs)
                tensors, _ = self._arguments.split(args, kwargs)
                inputs = self._inputs(tensors)
            try:
                geometry = self._call_geometry(func, inputs, arguments)
                outcome = self.executor.run(func, info, args, kwargs, tensors, geometry)
            except Exception as error:
                refusal = self._refusal(func, error)
                if refusal is not None:
                    raise refusal from error
                self.note_failure(error, info.name)
                raise
            written = written_by(info, args, kwargs) if info.writes else []
            needs_grad = bool(tensors) and tensors[0].requires_grad
            random = info.random and takes_random_numbers(func, args, kwargs)
            if random or self.table.origins:
                results = tensors_of((outcome.result, *written))
                self._follow_values(func, info, args, kwargs, tensors, results, random)
            try:
                self._record(info, kwargs, inputs, arguments, outcome, written, needs_grad, leaves, random)
                if parallel is not None:
                    parallel.note_op(func, args, kwargs, outcome.result)
            except (NotImplementedError, RuntimeError) as error:  # a sparse result has no storage
                self.note_failure(error, info.name)
                raise
            if len(written) == 1 and info.returns_written:
                return written[0]
            return outcome.result

    def _made_in_backward(self, tensor: torch.Tensor) -> bool:
        number = self.table.number_of(tensor)
        return number != HOST and self.table.drafts[number].alloc_at >= self.backward_began[-1]

    # -- Note [Random paths] ----------------------------------------------------------------------------------------

    def _follow_values(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        results: list[torch.Tensor],
        drawn: bool,
    ) -> None:
        """Follow values that random numbers or the batch gave, to results that have their shape from some."""
        origins = self.table.origins
        lines = frozenset[str]().union(*(origins.get(storage_key(each), ()) for each in tensors))
        known = [each for each in results if not each.is_meta]
        if drawn and known:
            line = self.sources.sources[self.sources.here(3)]
            with disable_current_modes():  # an op in place also returns what it has written to
                once = {storage_key(each): each for each in known}
                self.draws.force(func, args, kwargs, list(once.values()), line)
            lines |= {line}
        if not lines:
            return
        for each in known:
            pointer = storage_key(each)
            origins[pointer] = origins.get(pointer, frozenset()) | lines
        if info.name in INDEXING:  # positions only choose; masks also say how many
            self.note_read(*(each for each in tensors if each.dtype is torch.bool))
        elif func is _aten._local_scalar_dense.default or torch.Tag.dynamic_output_shape in func.tags:
            self.note_read(*tensors)

    def note_read(self, *tensors: torch.Tensor) -> None:
        """Remember that the step has read these values, if they come from random numbers or the batch."""
        for tensor in tensors:
            lines = self.table.origins.get(storage_key(tensor))
            if lines:
                here = self.sources.sources[self.sources.here(2)]
                self.draws.note_read(sorted(lines - {BATCH}), here)
                if BATCH in lines:
                    self.reads_of_batch[here] = None

    def batch_notes(self) -> list[str]:
        """Say that other batches may need more, where a size or a decision comes from values of this one."""
        if not self.reads_of_batch:
            return []
        first, *more = self.reads_of_batch
        where = f"{first}, and {len(more)} more" if more else first
        return [
            f"values of the batch decide what is computed, or how large it is ({where}): a batch with other values may "
            "need more memory than this one; plan with the largest that you expect"
        ]

    def _run_paused(
        self, func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], arguments: str
    ) -> Any:
        """Run an op that is not recorded; writing to meta tensors is not even done."""
        if func is _aten.lift_fresh.default:
            self.adopt_fresh(tensors[0])
        if func is _aten._local_scalar_dense.default and self._is_unread(tensors[0]):
            return 1.0 if tensors[0].is_floating_point() else 1
        written = written_by(info, args, kwargs) if info.writes else []
        if info.in_place and all(tensor.is_meta for tensor in tensors):
            return written[0] if schema_of(func).returns else None
        inputs = self._inputs(tensors)
        geometry = self._call_geometry(func, inputs, arguments)
        leaves = _leaves_device(func, tensors, kwargs)
        # what was made while paused has no number yet, so the table is asked where it is
        on_device = self._on_device(map(self.table.on_device, tensors), kwargs, leaves)
        result = self.executor.run(func, info, args, kwargs, tensors, geometry).result
        for output in tensors_of((result,)):
            self.table.made(output.untyped_storage(), BEFORE_STEP, on_device=on_device)
        return written[0] if len(written) == 1 and info.returns_written else result

    def _keep_generators(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember what the step's own generators were before they were first used."""
        for generator in generators_of((*args, *kwargs.values())):
            if generator not in self._generators:
                with disable_current_modes():
                    self._generators[generator] = generator.get_state()

    def put_generators_back(self) -> None:
        """Leave the step's own generators as they were found."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _call_geometry(self, func: Any, inputs: list[TensorRef], arguments: str) -> tuple[Any, ...]:
        """Return all that an op's results depend on, short enough to be looked up quickly."""
        geometry_of = self._refs.geometry_of
        return (id(func), arguments, *[id(geometry_of[id(ref)]) for ref in inputs])

    def _inputs(self, tensors: list[torch.Tensor]) -> list[TensorRef]:
        return list(map(self._refs.ref, tensors, self.table.numbers_of_inputs(tensors, self.calls.path)))

    def _parted(self, inputs: list[TensorRef]) -> bool:
        """Return whether an op is given tensors in host memory, scalars aside, together with some on the device."""
        host = [ref for ref in inputs if ref.storage == HOST and ref.shape]
        return bool(host) and any(ref.storage != HOST for ref in inputs)

    def _meet_on_device(self, args: Any, kwargs: dict[str, Any], inputs: list[TensorRef]) -> tuple[Any, dict[str, Any]]:
        """Copy the step's tensors in host memory to the device where they meet some there; count others as resident.

        A hook that brings a saved tensor back asks for a meta tensor's device, and its copy on the host is one.
        """
        line = self.sources.sources[self.sources.here(3)]

        def meet(tensor: torch.Tensor) -> torch.Tensor:
            pointer = storage_key(tensor)
            if tensor.dim() == 0 or self.table.known.get(pointer) != HOST:
                return tensor
            if tensor.is_meta and pointer not in self.table.foreign:
                return self.__torch_dispatch__(_aten._to_copy.default, (), (tensor,), {"device": torch.device("cuda")})
            shape = tuple(tensor.shape)
            self.notes.add(f"a tensor of shape {shape} in host memory is used on the device at {line}: counted there")
            self.table.move_to_device(tensor, self.calls.path)
            return tensor

        return map_tensors(args, meet), map_tensors(kwargs, meet)

    def _stays_in_place(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether C++, or a hook, moves a tensor to where the real run would find it already."""
        elsewhere = kwargs.get("device") == _CPU if tensor.is_meta else kwargs.get("device") == _META
        return (
            elsewhere
            and (self.device_type == "cpu" or not tensor.is_meta)
            and kwargs.get("memory_format") is None
            and self.forced_device is None
            and kwargs.get("dtype") in (None, tensor.dtype)
            and self.table.on_device(tensor)
        )

    def is_host_number(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in host memory and its values follow from nothing: to read it leaves no record."""
        table = self.table
        return (
            self.device_type != "cpu"
            and not table.origins
            and type(tensor) is torch.Tensor
            and self.executor.has_value(tensor)
            and table.known.get(storage_key(tensor)) == HOST
        )

    def _is_unread(self, tensor: torch.Tensor) -> bool:
        """Return whether an optimizer asks for a value that is not known; it only scales an update with it."""
        if not self.table.in_optimizer or self.executor.has_value(tensor):
            return False
        self.notes.add("the optimizer reads values of tensors; no allocation was seen to depend on them")
        return True

    def _answer(self, tensor: torch.Tensor) -> float | bool | None:
        """Return the value that a step reads of a tensor without one; None when it may not ask.

        A step may log its loss outside any module, and test for numbers that are not finite anywhere.
        """
        if self.table.phase is Phase.BACKWARD or self.executor.has_value(tensor):
            return None
        answer: float | bool | None
        if tensor.is_floating_point():
            answer = 1.0 if self.calls.current == NO_INDEX else None  # finite, as in any step that goes on
        else:
            number = self.table.number_of(tensor)
            producer = self._last_producer.get(number, NO_INDEX)
            if producer != NO_INDEX and self.ops[producer].name.startswith(("aten.all.", "aten.any.")):
                number = self.ops[producer].inputs[0].storage
            answer = self.finite_tests.get(number)
        if answer is not None:
            line = self.sources.sources[self.sources.here(3)]
            self.notes.add(f"the value of a tensor is read at {line}: it was answered with {answer}")
        return answer

    def _record(
        self,
        info: OpInfo,
        kwargs: dict[str, Any],
        inputs: Sequence[TensorRef],
        arguments: str,
        outcome: OpResult,
        written: list[torch.Tensor],
        needs_grad: bool,
        leaves: bool,
        random: bool,
    ) -> None:
        outputs = tensors_of((outcome.result,))
        index = len(self.ops)
        geometry_of = self._refs.geometry_of
        phase = self.table.phase
        call, forward_op = self._attribute(index)
        numbers = [ref.storage for ref in inputs]
        on_device = self._on_device([number != HOST for number in numbers], kwargs, leaves)
        made = [
            self._refs.ref(output, self.table.made(output.untyped_storage(), call, on_device=on_device))
            for output in outputs
        ]
        if not on_device and all(number == HOST for number in numbers):
            return
        mutates: tuple[int, ...] = ()
        mutated_op = NO_INDEX
        if written:
            targets = self.table.numbers_of(written)
            mutates = tuple(dict.fromkeys(targets))
            mutated_op = self._producer(self._refs.ref(written[0], targets[0]))
        view = bool(made) and not mutates
        for number in numbers:
            self._first_use.setdefault(number, index)
        for ref in made:
            self._producers[id(ref)] = index
            self._last_producer[ref.storage] = index
            view = view and ref.storage in numbers
        if info.saves_number and self.device_type == "cpu":
            self._save_number(index, call, inputs, needs_grad)
        self.ops.append(
            Op(
                name=info.name,
                phase=phase,
                call=call,
                inputs=tuple(inputs),
                outputs=tuple(made),
                arguments=arguments,
                flops=outcome.flops,
                read_bytes=0 if view else sum([geometry_of[id(ref)].touched_bytes for ref in inputs]),
                written_bytes=0 if view else sum([geometry_of[id(ref)].touched_bytes for ref in made]),
                workspace_bytes=outcome.workspace_bytes,
                view=view,
                random=random,
                saved=False,
                mutates=mutates,
                mutated_op=mutated_op,
                forward_op=forward_op,
                source=self._source(forward_op),
            )
        )
        self.table.now = len(self.ops)

    def _source(self, forward_op: int) -> int:
        """Return the user's line: the forward op's in backward, the call of `step` in the optimizer, else this op's."""
        if forward_op != NO_INDEX:
            return self.ops[forward_op].source
        if not self.table.in_optimizer:
            return self.sources.here(4)
        if self._optimizer_source is None:
            self._optimizer_source = self.sources.here(4)
        return self._optimizer_source

    def _on_device(self, inputs: Iterable[bool], kwargs: dict[str, Any], leaves: bool) -> bool:
        """Return whether an op's results are on the device.

        `inputs` says for each of its tensors whether that is; `leaves` that the op copies from the device to the host.
        """
        if self.device_type == "cpu":
            return True
        if self.forced_device is not None:
            return self.forced_device != "cpu"
        if leaves:
            return False
        places = tuple(inputs)
        if places:
            return any(places)
        device = kwargs.get("device")
        return device is not None and torch.device(device).type != "cpu"

    def _attribute(self, index: int) -> tuple[int, int]:
        """Return the module call an op belongs to and, in backward, the forward op whose gradient it computes."""
        current = self.calls.current
        phase = self.table.phase
        if phase is not Phase.BACKWARD or current != NO_INDEX:
            if torch.is_grad_enabled() or phase is not Phase.BACKWARD:
                self._op_of_sequence.setdefault(next_sequence_number() - 1, index)
            return current, NO_INDEX
        forward_op = NO_INDEX
        node = current_autograd_node()
        if node is not None:
            if self._inexact and (note := self._inexact.get(node.name())) is not None:
                self.notes.add(note)
            variable = getattr(node, "variable", None)
            if variable is not None:
                forward_op = self._first_use.get(self.table.number_of(variable), NO_INDEX)
            else:
                forward_op = self._op_of_sequence.get(sequence_number(node), NO_INDEX)
        if forward_op == NO_INDEX or forward_op >= index:
            return (self.ops[-1].call if self.ops and self.ops[-1].phase is Phase.BACKWARD else NO_INDEX), NO_INDEX
        number = self._saved_numbers.get(forward_op)
        if number is not None:
            self.table.drafts[number].free_after = index
        call = self.ops[forward_op].call
        self.calls.backward(call, index)
        return call, forward_op

    def _producer(self, ref: TensorRef) -> int:
        producer = self._producers.get(id(ref))
        return self._last_producer.get(ref.storage, NO_INDEX) if producer is None else producer

    # -- what autograd keeps ----------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook for tensors that autograd saves."""
        if self.table.paused:
            return tensor
        if self.parallel is not None and (local := self.parallel.local(tensor)) is not tensor:
            return self.parallel.around(tensor, self.pack(local))
        with DisableTorchFunction():
            (ref,) = self._inputs([tensor])
            number = ref.storage
            if number == HOST:
                return tensor
            sequence = next_sequence_number() - 1
            self.table.drafts[number].save(sequence)
            self._note_node(sequence, number)
            producer = self._producer(ref)
            if producer != NO_INDEX:
                self.saved_ops.add(producer)
            with disable_current_modes():  # kept as it is, a node's own result would hold the node in a cycle
                if self.table.phase is not Phase.BACKWARD:
                    return self.table.saved(tensor)
                node = tensor.grad_fn
                return tensor if node is None or sequence_number(node) != sequence else tensor.detach()

    def _note_node(self, sequence: int, number: int) -> None:
        """Remember a node that packs a storage later than a single op would, as a custom autograd function does.

        An op packs its inputs before it is seen here, and its results when it has just been.
        """
        first, last = self._op_of_sequence.get(sequence, len(self.ops)), len(self.ops) - 1
        if first > last or self.table.phase is Phase.BACKWARD:
            return
        if first < last or all(ref.storage != number for ref in self.ops[first].outputs):
            self._last_of_node[first] = last

    def _save_number(self, index: int, call: int, inputs: Sequence[TensorRef], needs_grad: bool) -> None:
        """Count the number that `x * 2.0` saves for its backward: a tensor of eight bytes that no hook sees."""
        if len(inputs) == 1 and needs_grad and torch.is_grad_enabled():
            self._saved_numbers[index] = len(self.table.drafts)
            saved_by = {next_sequence_number() - 1}
            self.table.drafts.append(StorageDraft(8, index, call, self.phase, saved_by=saved_by))

    # -- the result -------------------------------------------------------------------------------------------------

    def frozen_ops(self) -> tuple[Op, ...]:
        """Return the ops, with what was learnt about them after they ran."""
        replace = msgspec.structs.replace
        ops = [replace(op, saved=True) if i in self.saved_ops else op for i, op in enumerate(self.ops)]
        for first, last in self._last_of_node.items():
            for i in range(first, last + 1):
                if ops[i].phase is not Phase.BACKWARD:
                    ops[i] = replace(ops[i], forward_op=first)
        return tuple(ops)

    def frozen_storages(self) -> tuple[Storage, ...]:
        """Return the storages with their final categories."""
        end_unread_numbers(self.ops, self.table.drafts, self._saved_numbers.items())
        return tuple(
            Storage(
                bytes=draft.bytes,
                category=draft.category or self._category_of(draft),
                alloc_at=draft.alloc_at,
                free_after=draft.free_after,
                released=draft.released,
                call=draft.call,
                module=draft.module or (self.calls.calls[draft.call].module if draft.call != NO_INDEX else ""),
                name=draft.name,
                saved_by=tuple(
                    sorted(
                        {self._op_of_sequence.get(sequence, NO_INDEX) for sequence in draft.saved_by or ()} - {NO_INDEX}
                    )
                ),
            )
            for draft in self.table.drafts
        )

    def _category_of(self, draft: StorageDraft) -> Category:
        if draft.phase is Phase.BACKWARD and draft.call != NO_INDEX:
            call = self.calls.calls[draft.call]
            recomputed = call.phase is Phase.BACKWARD and (
                draft.free_after >= call.end or draft.free_after == AFTER_STEP
            )
            return Category.ACTIVATION if recomputed else Category.TEMPORARY
        if draft.phase not in (Phase.FORWARD, Phase.LOSS):
            return Category.TEMPORARY
        held = any(
            draft.alloc_at < began and (draft.free_after >= began or draft.free_after == AFTER_STEP)
            for began in self.backward_began
        )
        return Category.ACTIVATION if held or draft.saved_by else Category.TEMPORARY


def _leaves_device(func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Return whether an op copies from the device to the host. Under `torch.vmap` a number may be what is copied."""
    moves = func is _aten._to_copy.default and kwargs.get("device") == _CPU
    return moves and bool(tensors) and tensors[0].is_meta
