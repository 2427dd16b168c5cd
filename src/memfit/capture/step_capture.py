"""One pass over a training step: the model's stand-ins, the modes that see every op, the phases, and the trace."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit._version import __version__
from memfit.capture.arguments import tensor_leaves, tensors_of, visit_tensors
from memfit.capture.blas_workspaces import blas_workspaces
from memfit.capture.call_stack import CallTracker, SourceTable, is_container, module_calls
from memfit.capture.emulation import Emulation, python_functions_open
from memfit.capture.environment import (
    capturing,
    compiled_functions_eager,
    cuda_present,
    same_attributes,
    unoptimized_scripts,
)
from memfit.capture.errors import Advice
from memfit.capture.meta_tensors import MetaTensors, on_meta, optimizer_on_meta
from memfit.capture.optimizers import LeftState, OptimizerStates, optimizers_by_key
from memfit.capture.parameter_cast import ParameterCast
from memfit.capture.patches import TorchPatches
from memfit.capture.pipelines import pipeline_notes
from memfit.capture.random_numbers import HostGenerator
from memfit.capture.random_paths import RandomDraws
from memfit.capture.recorder import Recorder
from memfit.capture.repeated_blocks import FIRST, LAST, NotRepeated, Row, RowCapture, find_row
from memfit.capture.replication import replicate as replicate_blocks
from memfit.capture.rules import RuleContext, rules_for
from memfit.capture.step import Companions, Step
from memfit.capture.step_checks import refuse_sharded_module
from memfit.capture.storages import HOST, StorageDraft, StorageTable
from memfit.capture.trace_types import (
    BEFORE_STEP,
    NO_INDEX,
    SCHEMA,
    Category,
    ModelCall,
    Module,
    ModuleCall,
    Op,
    Parameter,
    Phase,
    Storage,
    Trace,
)
from memfit.capture.wrapped_models import innermost, names_of_wrappers
from memfit.errors import MemfitError
from memfit.hardware import Device
from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes
from memfit.torch_private.functorch import unwrap
from memfit.torch_private.modules import buffer_table, modules_by_path, parameter_table
from memfit.torch_private.wrappers import own_class

if TYPE_CHECKING:
    from memfit.capture.parallel import ParallelCapture


class StepCapture:
    """One pass over the step: the model's stand-ins, the modes, and the phases."""

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        device: Device,
        gradients: dict[str, torch.Tensor],
        state: LeftState,
        draws: RandomDraws,
        held: list[HostGenerator],
        *,
        compiled: bool,
        mesh: dict[str, int] | None = None,
        rank: int = 0,
        cast: ParameterCast | None = None,
        replicate: bool = False,
    ) -> None:
        self.step = step
        self.replicate = replicate
        self.row: Row | None = None
        self.cast = cast
        self.mesh, self.rank = mesh or {}, rank
        self.compiled = compiled
        self.draws = draws
        self.held = held
        self.model = model
        self.root = innermost(model)
        self.device = device
        dtype = None if cast is None else getattr(torch, cast.dtype)
        self.meta_tensors = MetaTensors(compact=device.type != "cpu", param_dtype=dtype)
        self.companions = Companions.of(step, model)
        self.first_gradients = gradients
        self.left_gradients: dict[str, torch.Tensor] = {}
        self.first_state = state
        self.left_state: LeftState = {}
        self.leftovers: list[weakref.ref[Any]] = []
        """Storages that the step made and that somebody may hold when the capture is over."""
        self._begin()

    def _begin(self) -> None:
        """Begin a record."""
        self.context = context = RuleContext.of(self.device, compiled=self.compiled, several_ranks=bool(self.mesh))
        self.calls = CallTracker(self.model)
        self.sources = SourceTable()
        self.advice = Advice()
        rules = rules_for(context.device_type)
        self.recorder = Recorder(context=context, rules=rules, calls=self.calls, sources=self.sources, draws=self.draws)
        self.emulation = Emulation(self.recorder, context, rules.functions)
        self.parallel: ParallelCapture | None = None
        if self.mesh:
            from memfit.capture import parallel  # loads DTensor, which takes a second

            self.parallel = parallel.ParallelCapture(self.recorder, self.model, context.note, self.mesh)
        self.row_capture: RowCapture | None = None
        self.parameters: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self.parameter_storages: dict[int, int] = {}
        self.modules: list[Module] = []
        self.gradients: dict[int, int] = {}
        self.states = OptimizerStates(self.recorder, self.meta_tensors, self.parameters)
        self._model_inputs: list[tuple[tuple[tuple[int, ...], str], ...]] = []
        self._model_calls: list[ModelCall] = []
        self._more_batches: list[torch.Tensor] = []

    def run(self) -> None:
        """Run the step on stand-ins and under the modes; everything that must be undone is undone.

        A step that leaves tensors behind (a mask that is made once, a position table that has grown), or turns a switch
        (`self.initialized = True`), is run a second time, which finds them: that is what all later steps do.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(same_attributes(self.companions.all))
            if not self.mesh:
                stack.enter_context(on_meta(self.model, self.meta_tensors))
            for optimizer in self.companions.optimizers:
                stack.enter_context(optimizer_on_meta(optimizer, self.meta_tensors))
            if self.replicate:
                self.row = find_row(self.calls.modules)
            step = self.step.with_batch(self.meta_tensors.batch(self.step.batch))
            switches = self._switches()
            made = self._pass(step, None, None)
            if self.mesh or self._left_tensors() or switches != self._switches():
                unsettled = True
                while unsettled:
                    before = self.recorder.table
                    self._begin()
                    self._pass(step, made, before)
                    before.close()
                    unsettled = self.parallel is not None and self.parallel.rebuilt
            self.recorder.table.close()
            self._drop_made_state(made)
            with DisableTorchFunction():
                left = {names[0]: parameter.grad for parameter, names in self.parameters.values()}
                self.left_gradients = {name: gradient for name, gradient in left.items() if gradient is not None}

    def _drop_made_state(self, made: torch.optim.Optimizer | None) -> None:
        """Free the state of an optimizer that was made for the capture, which may be in a cycle with its optimizer."""
        for optimizer in optimizers_by_key((), made).values():
            for parameter in [each for each in optimizer.state if id(each) in self.parameters]:
                del optimizer.state[parameter]

    def _pass(
        self, step: Step, made: torch.optim.Optimizer | None, before: StorageTable | None
    ) -> torch.optim.Optimizer | None:
        """Record the step once; `made` and `before` are the optimizer and the storages of an earlier pass."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.recorder.put_generators_back)
            if self.row is not None:
                self.row_capture = RowCapture(self.row, self.recorder)
            self._register(step)
            if before is not None:
                for optimizer in optimizers_by_key(self.companions.optimizers, made).values():
                    self.states.register(optimizer)
                self.recorder.table.inherit(before)
            self.meta_tensors.settle()
            if step.run is not None:
                self.emulation.stand_ins = self.meta_tensors.of
            self._enter_modes(stack)
            place = "the making of the optimizer"
            seeded = self.draws.seed(self.held)
            try:
                if before is None:
                    with self.recorder.table.pause(Category.OPTIMIZER_STATE):
                        made = step.build_optimizer(self.model)
                place = ""
                optimizers = optimizers_by_key(self.companions.optimizers, made)
                if self.first_state and before is None:
                    with DisableTorchFunction(), disable_current_modes():
                        self.states.begin_with(self.first_state, optimizers)
                step.execute(self.model, made, self.context.device_type)
            except MemfitError:
                raise
            except Exception as error:
                raise self.recorder.explain(error, place) from error
            finally:
                self.draws.note_host(seeded, self.held)
                self.leftovers += self.recorder.table.outliving()
            if self.row_capture is not None:
                self.row_capture.end_pass()
            if not self.mesh:  # a second pass finds all of it, and there is no second capture
                with DisableTorchFunction(), disable_current_modes():
                    self.left_state = self.states.left(optimizers)
        return made

    def _left_tensors(self) -> bool:
        """Return whether the step left tensors on the device that are neither gradients nor optimizer state."""
        if not self._outliving():
            return False
        gc.collect()  # the graph of a step may be a cycle, which nobody holds
        return bool(self._outliving())

    def _outliving(self) -> set[int]:
        table = self.recorder.table
        outliving = {ref.number for ref in table.outliving() if ref.number != HOST}
        if not outliving:
            return outliving
        known: set[int] = set()
        with DisableTorchFunction():
            for parameter, _ in self.parameters.values():
                known.add(table.number_of(parameter))
                if parameter.grad is not None:
                    known.add(table.number_of(parameter.grad))
        for numbers in self.states.numbers.values():
            known.update(numbers)
        for entries in self.left_state.values():
            if entries:  # state that is made anew in every step; a second capture begins with it
                return set()
        return outliving - known

    def _switches(self) -> list[Any]:
        """Return the switches among the attributes of the model's modules, which a first step may turn."""
        found: list[Any] = []
        for _, module in modules_by_path(self.model):
            found += [
                (name, each) for name, each in vars(module).items() if each is None or each is True or each is False
            ]
            for name, buffer in buffer_table(module).items():
                if buffer is not None and buffer.numel() == 1 and buffer.dtype in _SWITCHES and not buffer.is_meta:
                    found.append((name, int(buffer)))
        return found

    def _enter_modes(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(capturing())
        stack.enter_context(unoptimized_scripts())
        for hook in (
            register_optimizer_step_pre_hook(self.states.before_step),
            register_optimizer_step_post_hook(self.states.after_step),
        ):
            stack.callback(hook.remove)
        if self.context.device_type == "cuda":
            stack.enter_context(cuda_present(self.device, self.context.note))
        patches = TorchPatches(
            recorder=self.recorder,
            emulation=self.emulation,
            advice=self.advice,
            note=self.context.note,
            after_backward=self._note_gradients,
        )
        stack.enter_context(patches.applied())
        if self.parallel is not None:
            self.parallel.name_parts()
            stack.enter_context(self.parallel.applied())
        stack.enter_context(compiled_functions_eager())
        if self.cast is not None:  # a module's call begins after the casts, which are not part of what it computes
            began = self.recorder
            stack.enter_context(self.cast.applied(self.model, lambda: began.calls.begin_at(len(began.ops))))
        around = None if self.row_capture is None else self.row_capture.call
        stack.enter_context(module_calls(self._enter, self._leave, self._failed, around))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.recorder.pack, _same))
        stack.enter_context(python_functions_open())
        stack.enter_context(self.emulation)
        stack.enter_context(self.recorder)

    # -- what exists before the step --------------------------------------------------------------------------------

    def _register(self, step: Step) -> None:
        table = self.recorder.table
        for path, module in self.calls.modules.items():
            owned: list[int] = []
            for name, parameter in parameter_table(module).items():
                if parameter is None:
                    continue
                full_name = f"{path}.{name}" if path else name
                known = self.parameters.setdefault(id(parameter), (parameter, []))
                known[1].append(full_name)
                owned.append(table.adopt(parameter, Category.PARAMETER, module=path, name=full_name))
                self.parameter_storages[id(parameter)] = owned[-1]  # an optimizer may give it another
                gradient = self.first_gradients.get(full_name)
                if gradient is not None and parameter.grad is None:
                    parameter.grad = torch.empty_strided(
                        gradient.size(), gradient.stride(), dtype=gradient.dtype, device="meta"
                    )
                if parameter.grad is not None:
                    number = table.adopt(parameter.grad, Category.GRADIENT, module=path, name=full_name)
                    self.gradients[id(parameter)] = number
            buffers = [
                table.adopt(buffer, Category.BUFFER, module=path, name=f"{path}.{name}" if path else name)
                for name, buffer in buffer_table(module).items()
                if buffer is not None
            ]
            self.modules.append(
                Module(path=path, kind=own_class(module).__name__, parameters=tuple(owned), buffers=tuple(buffers))
            )
        for path, wrapper in self.calls.wrappers:
            self._register_buckets(path, wrapper)
        visit_tensors(step.batch, table.adopt_batch)
        held: dict[int, int] = {}
        visit_tensors(
            step.batch, lambda tensor: held.update({table.number_of(tensor): tensor.untyped_storage().nbytes()})
        )
        for _ in range(step.resident_batches - 1):
            for size_bytes in held.values():
                self._more_batches.append(torch.empty(size_bytes, dtype=torch.uint8, device="meta"))
                table.adopt(self._more_batches[-1], Category.INPUT, name="batch")
        for tensor in self.meta_tensors.attributes:  # last, like those that a first step makes: `inherit`
            table.adopt(tensor, Category.BUFFER)

    def _register_buckets(self, path: str, module: nn.Module) -> None:
        """Count the buckets in which `DistributedDataParallel` keeps a copy of all gradients from step to step."""
        if self.mesh or not isinstance(module, DistributedDataParallel):
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        draft = StorageDraft(n_bytes, BEFORE_STEP, NO_INDEX, Phase.FORWARD, category=Category.COMMUNICATION)
        draft.module, draft.name = path, "buckets of DistributedDataParallel"
        self.recorder.table.drafts.append(draft)
        own = " (gradients are views of them, and are counted as well)" if module.gradient_as_bucket_view else ""
        self.context.note(
            f"the model is wrapped in DistributedDataParallel: its buckets, {n_bytes:,} bytes, are counted as resident"
            f"{own}; what the backend takes to reduce them is not"
        )

    # -- phases -----------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder
        if not self.calls.owns(module):  # a teacher or a reference model beside the model: its hooks must not begin
            refuse_sharded_module(module, f"a {type(module).__name__} that the step calls")
        if recorder.table.paused:
            return
        if not self.calls.in_model and recorder.phase is not Phase.BACKWARD:
            recorder.phase = Phase.FORWARD if self.calls.owns(module) else Phase.LOSS
        if self.calls.is_wrapper(module):
            self.calls.enter_wrapper(module)
            return
        given = (recorder.table.number_of(unwrap(tensor)) for tensor in tensors_of((*args, *kwargs.values())))
        inputs = tuple(dict.fromkeys(number for number in given if number != HOST))
        outermost = self.calls.current == NO_INDEX
        if (module is self.root or (outermost and is_container(self.model))) and recorder.phase is Phase.FORWARD:
            leaves = tensor_leaves((args, kwargs))
            self._model_inputs.append(tuple((tuple(each.shape), str(each.dtype)[6:]) for each in leaves))
        self.calls.enter(module, recorder.phase, len(recorder.ops), inputs)
        self.draws.force_host(self.held)
        if outermost and recorder.phase is Phase.BACKWARD:
            self.advice.recompute(self.calls.path)

    def _leave(self, module: nn.Module, result: Any) -> None:
        recorder = self.recorder
        if recorder.table.paused:
            return
        if self.calls.is_wrapper(module):
            self.calls.exit_wrapper()
            self._leave_model()
            return
        outermost = self.calls.calls[self.calls.current].parent == NO_INDEX
        called = module is self.root or (outermost and is_container(self.model))
        if called and recorder.phase is Phase.FORWARD and self._model_inputs:
            numbers = (recorder.table.number_of(unwrap(each)) for each in tensor_leaves(result))
            outputs = tuple(NO_INDEX if number == HOST else number for number in numbers)
            self._model_calls.append(ModelCall(inputs=self._model_inputs.pop(), outputs=outputs))
        self.calls.exit(len(recorder.ops))
        self._leave_model()

    def _leave_model(self) -> None:
        """Begin the loss where the model's forward, and what wraps it, has ended."""
        if not self.calls.in_model and self.recorder.phase is Phase.FORWARD:
            self.recorder.phase = Phase.LOSS

    def _failed(self, error: Exception) -> None:
        self.recorder.note_failure(error, "")

    def _note_gradients(self) -> None:
        if self.row_capture is not None:
            with DisableTorchFunction(), disable_current_modes():
                self.row_capture.put_gradients()
        with DisableTorchFunction():
            for key, (parameter, names) in self.parameters.items():
                number = HOST if parameter.grad is None else self.recorder.table.number_of(parameter.grad)
                if number != HOST:
                    draft = self.recorder.table.drafts[number]
                    draft.category, draft.name = Category.GRADIENT, names[0]
                    draft.module = names[0].rpartition(".")[0]
                    self.gradients[key] = number

    # -- the result -------------------------------------------------------------------------------------------------

    def result(self, notes: list[str]) -> Trace:
        """Return the finished trace; `NotRepeated` where a row of blocks turns out not to do the same."""
        recorder = self.recorder
        ops, storages, calls = recorder.frozen_ops(), recorder.frozen_storages(), self.calls.freeze()
        number_of: Callable[[int], int] = int
        if self.row_capture is not None:
            ops, storages, calls, number_of = self._replicated(self.row_capture, ops, storages, calls)
        parameters = tuple(
            Parameter(
                names=tuple(names),
                storage=number_of(self.parameter_storages[key]),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype)[6:],
                trainable=parameter.requires_grad,
                gradient=number_of(self.gradients.get(key, NO_INDEX)),
                state=tuple(map(number_of, self.states.numbers.get(key, ()))),
            )
            for key, (parameter, names) in self.parameters.items()
        )
        pipelines = () if self.parallel is None else self.parallel.pipelines.runs()
        notes = [*notes, *pipeline_notes(pipelines, self.mesh, self.rank)]
        return Trace(
            schema=SCHEMA,
            memfit=__version__,
            torch=str(torch.__version__),
            device=self.device.name,
            device_type=self.context.device_type,
            hardware=self.device,
            threads=self.context.threads if self.context.device_type == "cpu" else 0,
            autocast=str(self.step.autocast)[6:] if self.step.autocast is not None else None,
            optimizer=", ".join(self.states.names),
            ops=ops,
            storages=(*storages, *blas_workspaces(ops, self.device)),
            calls=calls,
            modules=tuple(self.modules),
            parameters=parameters,
            sources=tuple(self.sources.sources),
            model_calls=tuple(self._model_calls),
            notes=(*notes, *sorted(recorder.notes), *recorder.batch_notes(), *self.advice.notes(), *self.context.notes),
            shared=self.calls.shared,
            in_eval=tuple(sorted(self.calls.in_eval)),
            no_grad_calls=self.calls.no_grad_calls,
            warm_up=self.step.warm_up,
            cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
            mesh=self.mesh,
            streams={} if self.parallel is None else self.parallel.streams(),
            op_streams={} if self.parallel is None else self.parallel.op_streams(),
            collectives=() if self.parallel is None else self.parallel.collectives(),
            rank=self.rank,
            pipelines=pipelines,
            wrappers=() if self.parallel is None else names_of_wrappers(self.model),
            cast=self.cast,
        )

    def _replicated(
        self, capture: RowCapture, ops: tuple[Op, ...], storages: tuple[Storage, ...], calls: tuple[ModuleCall, ...]
    ) -> tuple[tuple[Op, ...], tuple[Storage, ...], tuple[ModuleCall, ...], Callable[[int], int]]:
        """Write down what the blocks of a row that did not run would have done, in the rest of the capture too."""
        capture.finish()
        row = capture.row
        inside: dict[str, list[Module]] = {path: [] for path in row.paths}
        depth = row.paths[0].count(".") + 1
        for module in self.modules:
            block = ".".join(module.path.split(".")[:depth])
            if block in inside:
                inside[block].append(module)
        kept = {
            names[0]: self.gradients[key]
            for key, (_, names) in self.parameters.items()
            if key in self.gradients and storages[self.gradients[key]].alloc_at == BEFORE_STEP
        }
        own: list[list[int]] = []
        for path in row.paths:
            numbers = [number for each in inside[path] for number in (*each.parameters, *each.buffers)]
            numbers += [number for name, number in kept.items() if name.startswith(f"{path}.")]
            own.append(list(dict.fromkeys(numbers)))
        found = replicate_blocks(ops, storages, calls, paths=row.paths, own=own, stand_ins=capture.stand_ins)
        notes = (*self.recorder.notes, *self.context.notes)
        if any(re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", note) for path in row.paths for note in notes):
            raise NotRepeated("a note is about one block")
        template = row.paths[FIRST - 1]
        others = row.paths[FIRST:-LAST]
        self.calls.replicate(template, others)
        if template in self.advice.recomputed:
            after = list(self.advice.recomputed)
            place = after.index(template)
            self.advice.recomputed = dict.fromkeys((*after[:place], *others[::-1], *after[place:]))
        number_of = found.number_of
        self.modules = [
            msgspec.structs.replace(
                each, parameters=tuple(map(number_of, each.parameters)), buffers=tuple(map(number_of, each.buffers))
            )
            if each.parameters or each.buffers
            else each
            for each in self.modules
        ]
        self._model_calls = [
            msgspec.structs.replace(each, outputs=tuple(map(number_of, each.outputs))) for each in self._model_calls
        ]
        return found.ops, found.storages, found.calls, number_of


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_SWITCHES = (torch.bool, torch.uint8)
