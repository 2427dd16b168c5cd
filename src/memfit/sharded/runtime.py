"""The runtime of a sharded model: what happens before and after each unit's forward and backward.

Note [Determinism]
Collectives must be begun in the same order on every rank, also where ranks use different parameters. So a unit's
gradients are summed when the gradients of its inputs are there, not when its own are complete, and a unit whose inputs
need none waits for the end of the backward. A gradient that comes after that is summed once more at the end. Nothing
depends on when Python drops a graph.

Note [End of a backward]
Autograd takes the ready node that was made last. A unit's inputs pass through views that are made before anything in
it, so when the gradient of any of them is there, all that the unit did is done, its parameters' gradients included. A
view stays valid where a unit changes its input in place, and loses its hook; the input itself has one, too, and what it
is a view of, which run when all that read them are done.

Note [Several runs]
A parameter that is used in several runs gets its gradient once, after the last of them. So a unit is summed when the
backward of its last run has ended, or at the end of the backward where some run's never comes, which is then forgotten.
Which gradients came on a rank decides nothing: other ranks may have others.

Note [Groups]
A unit may be several modules. Its forward begins with the first call of any of them and ends when all were called, or
the outermost forward ends; in between the modules hold gathered parameters. All calls of a forward are one run: inputs
of the first call with gradients are marked, since whatever later calls do is done when those have their gradient, and
outputs of every call are hooked, since any of them may be what the backward comes to first. A second forward in the
backward is a run of its own, of one module. Where a call had no graph, as inside of a checkpoint that runs a backward
of its own (`use_reentrant=True`), nobody knows which run is the last: the unit is summed at the end of the backward,
once, since a sum for each module would tell `register_post_accumulate_grad_hook` of gradients several times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memfit.errors import StateError
from memfit.sharded.comm import CollectiveError, RankMismatch, ShardComm, check_agreement
from memfit.sharded.options import Schedule, UnitOptions
from memfit.sharded.order import Order
from memfit.sharded.reductions import Reductions
from memfit.sharded.unit import Run, RunHook, ShardedUnit, State
from memfit.sharded.values import map_values, tensors_in
from memfit.torch_private.autograd import base_of, current_graph_task_id, in_backward, queue_callback
from memfit.torch_private.frames import frame_above
from memfit.torch_private.modules import CALL_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run is between two steps: what all ranks of it have in common."""

    pass_number: int
    recorded: dict[tuple[ShardedUnit, bool], list[ShardedUnit]]
    trained: list[bool]


class ShardedRuntime:
    """All units of a model, and the pass that is under way."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        links: Sequence[ShardComm],
        device: torch.device,
        schedule: Schedule,
        mesh: DeviceMesh,
        options_inside: tuple[UnitOptions, UnitOptions],
    ) -> None:
        self.model = model
        self.units = list(units)
        for number, unit in enumerate(self.units):
            unit.number = number
        self.mesh = mesh
        self.options_inside = options_inside
        """The root's options, and those it has when a model around it is sharded, too."""
        self.links = list(links)
        self.device = device
        self.schedule = schedule
        self.communicates = True
        self.order = Order(self.units, self.links)
        self._active: list[ShardedUnit] = []
        self._open: list[ShardedUnit] = []
        """Groups of modules of which some, not all, were called in this forward."""
        self._caller: FrameType | None = None
        self._in_backward = False
        self._began: list[Run] = []
        self._reductions = Reductions(self.units, self.links, device)
        self._pass_number = 0
        self._trained = self._training()
        self._known: set[tuple[nn.Module, str]] | None = None

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a sharded model cannot be copied or pickled: its parts belong to one process; use its state dict instead"
        )

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that are sharded."""
        return {parameter for unit in self.units for flat in unit.flats for parameter in flat.parameters}

    def _places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the modules of the model and the names of the parameters that they hold themselves."""
        for module in self.model.modules():
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                yield module, name

    def remember_places(self) -> None:
        """Note where the model has parameters: one that comes elsewhere would be trained by each rank on its own."""
        self._known = set(self._places())

    def _check_places(self) -> None:
        """Refuse, in the first pass, parameters that came into the model after `shard`."""
        known, self._known = self._known, None
        if known is None:
            return
        for module, name in self._places():
            if (module, name) not in known and getattr(module, name).requires_grad:
                path = next(path for path, each in self.model.named_modules() if each is module)
                raise StateError(
                    f"parameter {f'{path}.{name}'!r} came into the model after shard, which does not know it: every "
                    "rank would train it on its own; change the model first, then shard it"
                )

    @property
    def data_links(self) -> list[ShardComm]:
        """The groups of the mesh that the model is sharded over, without those of tensor and expert parallel."""
        return self.links[: self.mesh.ndim]

    @property
    def idle(self) -> bool:
        """Whether no forward and no backward is running."""
        self.settle()
        return not self._active and not self._in_backward

    def is_running(self, unit: ShardedUnit) -> bool:
        """Return whether a forward of a unit's modules runs, or did when an interrupt came that nothing has settled."""
        return unit in self._active

    def before_forward(
        self, unit: ShardedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Run | None, tuple[Any, ...], dict[str, Any]]:
        """Unshard a unit, prefetch the next ones, and prepare its inputs; return the run that begins, too.

        The first call of a group's modules does it for all of them. See Note [Groups].
        """
        self.settle()
        if self._active and unit is self._active[0]:  # what was left by an interrupt
            self.recover()
        if unit.uncalled:
            self._active.append(unit)
        else:
            self._begin_forward(unit)
        args, kwargs = self._cast_inputs(unit, args, kwargs)
        if not torch.is_grad_enabled():
            unit.in_parts |= len(unit.modules) > 1
            return unit.run, args, kwargs
        if unit.run is not None:
            return unit.run, args, kwargs
        run = Run(unit)
        if unit.uncalled:
            unit.run = run
        return run, *self._mark_inputs(run, args, kwargs)

    def _begin_forward(self, unit: ShardedUnit) -> None:
        outermost = not self._active
        if outermost:
            self._caller = _module_call()
        self._active.append(unit)
        if self._in_backward:  # a checkpoint's second forward: the parameters stay until the backward has used them
            unit.unshard("backward")
            unit.wait()
            unit.to_unsharded()
            return
        unit.enter(State.FORWARD)
        unit.outermost = outermost
        if outermost:
            self._begin_pass(unit)
        self.order.enter(unit)
        unit.unshard("forward")
        following = unit.forward_prefetch
        if following is None:
            following = self.order.following(self.schedule.forward_prefetch)
        self._gather_ahead(unit, following, "forward")
        unit.wait()
        unit.to_unsharded()
        if len(unit.modules) > 1:
            unit.uncalled.update(unit.modules)
            self._open.append(unit)

    def _mark_inputs(
        self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace inputs that need gradients by views whose hook tells when these are there."""
        hook = RunHook(self.after_backward, run)

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            marked = tensor.view_as(tensor)
            marked.register_hook(hook)
            for each in (tensor, base_of(tensor)):
                if each is not None and each.requires_grad and not each.is_leaf:
                    each.register_hook(hook)
            return marked

        return map_values((args, kwargs), mark)

    def after_forward(self, unit: ShardedUnit, module: nn.Module, run: Run | None, inputs: Any, output: Any) -> Any:
        """Hook the outputs' gradients, and reshard what the backward gathers again."""
        self._leave(unit)
        output = map_values(output, lambda tensor: self._prepare_output(unit, tensor))
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if run is not None else []
        if run is not None and watched:
            run.watched = True
            self._watch(run, inputs, watched)
        if self._in_backward:
            if not watched and not unit.running:  # there is nothing to go back to
                unit.reset()
            return output
        if unit.uncalled:
            unit.uncalled.discard(module)
            if self._active and unit.uncalled:  # another module of the group is still to come
                return output
            run = unit.run
            self._open.remove(unit)
        if unit.outermost:
            for group in self._open:  # some of whose modules were not called
                self._end_forward(group, group.run)
            self._open.clear()
        self._end_forward(unit, run)
        if unit.outermost:
            for each in self.units:
                if each.in_flight:  # it was gathered ahead, and did not run
                    each.free()
            self.order.end()
            for link in self.links:
                link.notices.clear()
        return output

    def _end_forward(self, unit: ShardedUnit, run: Run | None) -> None:
        watched = run is not None and run.watched
        if run is not None and watched:
            before = self.order.leave(unit, self.schedule.backward_prefetch)
            run.before = before if unit.backward_prefetch is None else unit.backward_prefetch
            run.counted = True
            unit.pending += 1
        unit.uncalled.clear()
        unit.run = None
        unit.enter(State.IDLE)
        unit.to_sharded()
        unit.end_forward(backward=watched)

    def failed_forward(self, unit: ShardedUnit) -> None:
        """Handle an exception in a unit's forward, which somebody may catch and go on."""
        self._leave(unit)
        if self._in_backward:  # also how a checkpoint ends its second forward
            return
        if self._active:
            with suppress(CollectiveError):
                unit.wait()
            unit.reset()
            if unit in self._open:
                self._open.remove(unit)
        else:
            error = sys.exc_info()[1]
            for link in self.links:
                link.notices.say(
                    f"rank {link.global_rank(link.rank)} left the forward of {unit.title} with "
                    f"{type(error).__name__}: {error}"
                )
            self.recover()

    def before_backward(self, run: Run) -> None:
        """Unshard a unit again, and prefetch the unit whose backward comes next."""
        if not self._in_backward:
            if torch.is_grad_enabled():
                raise StateError(
                    "this backward makes a graph of its own (create_graph=True), whose backward would need parameters "
                    "that are not gathered any more; a sharded model cannot be differentiated twice"
                )
            if self._active:
                raise StateError(
                    f"a backward through {run.unit.title} runs inside of the forward of {self._active[-1].title}; call "
                    "backward() after the forward"
                )
            self._in_backward = True
            queue_callback(self._end_backward)
        if run.began:
            return
        unit = run.unit
        run.began = True
        self._began.append(run)
        self._reductions.expect(unit)
        unit.enter(State.PRE_BACKWARD)
        unit.running += 1
        if unit.options.backward_gather:
            unit.unshard("backward")
        if self.schedule.backward_prefetch_at == "before":
            self._gather_before(run)
        unit.wait()
        unit.check_unchanged(run.changes)
        if unit.gathered:
            unit.to_unsharded()
        unit.enter(State.BACKWARD)
        if run.passed == current_graph_task_id():  # an output that is an input
            self.after_backward(run)

    def after_backward(self, run: Run) -> None:
        """Begin to reduce a unit's gradients, and reshard it."""
        if run.ended:
            return
        if not run.began:
            run.passed = current_graph_task_id()
            return
        run.ended = True
        unit = run.unit
        unit.running -= 1
        unit.pending -= run.counted
        if unit.running:  # another run of it, side by side with this one, still reads them
            return
        unit.enter(State.POST_BACKWARD)
        unit.end_backward()
        if self._sums(unit) and unit.pending <= 0 and not unit.in_parts:
            self._reductions.begin(unit)
        if self.schedule.backward_prefetch_at == "after":
            self._gather_before(run)

    def settle(self) -> None:
        """Reset state after an interrupted forward or backward."""
        in_vain = self._in_backward and not in_backward()
        interrupted = bool(self._active) and self._caller is not None and not _runs(self._caller)
        if in_vain or interrupted:
            self.recover()

    def recover(self) -> None:
        """Reset state after a failed pass; collectives that other ranks take part in are waited for.

        Gradients of earlier passes that were not to be sent stay, unless the exception was in a backward. A collective
        that fails here is not told: its group is given up, which the next pass tells.
        """
        was_in_backward, self._in_backward = self._in_backward, False
        self._active.clear()
        self._open.clear()
        self._caller = None
        self._reductions.forget()
        self._end_runs()
        for unit in self.units:
            with suppress(CollectiveError):
                unit.wait()
            unit.reset()
            for gradients in unit.gradients if was_in_backward else ():
                with suppress(CollectiveError):
                    gradients.drop()

    def position(self) -> Position:
        """Return what ranks have in common between steps: how many passes there were, and in which order."""
        return Position(pass_number=self._pass_number, recorded=self.order.recorded, trained=list(self._trained))

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of earlier passes wait to be reduced (`no_sync`, `set_requires_all_reduce`)."""
        return any(each.waiting or each.partial for unit in self.units for each in unit.gradients)

    def rewind(self, position: Position) -> None:
        """Go back to between two steps, on all ranks, some of which did more of a step than others.

        Their groups were cut: what was under way is dropped, and so are gradients that were not reduced yet.
        """
        self.recover()
        for unit in self.units:
            for gradients in unit.gradients:
                with suppress(CollectiveError):
                    gradients.drop()
        self._pass_number, self._trained = position.pass_number, list(position.trained)
        self.order.rewind(position.recorded)

    def renewed(self) -> None:
        """Take up again the groups whose connections were made anew."""
        for link in (*self.links, *(each.reshard_comm for each in self.units if each.reshard_comm is not None)):
            link.renewed()

    def _end_backward(self) -> None:
        """Do all that is left when autograd has finished, also for units whose hooks did not run."""
        summed = [unit for unit in reversed(self.units) if self._sums(unit)]
        if summed:
            self._reductions.finish(summed)
        self._reductions.forget()
        self._end_runs()
        for unit in self.units:
            unit.reset(free=unit.reshard_after_backward or not unit.gathered)
        self._in_backward = False

    def _sums(self, unit: ShardedUnit) -> bool:
        """Return whether backwards sum the gradients of a unit over ranks now."""
        return self.communicates and unit.communicates

    def _end_runs(self) -> None:
        """Forget the backwards of this pass; a retained graph may have another."""
        for run in self._began:
            run.began = run.ended = run.counted = False
        self._began.clear()

    def _begin_pass(self, unit: ShardedUnit) -> None:
        for link in (*self.links, *(each.reshard_comm for each in self.units if each.reshard_comm is not None)):
            link.check(f"forward of {unit.title}")
        self._check_places()
        self._pass_number += 1
        for each in self.units:
            for flat in each.flats:
                flat.realign()
        self._check_training()
        self.order.begin(unit)
        for each in self.units:
            each.begin_pass(self._pass_number)

    def _training(self) -> list[bool]:
        return [parameter.requires_grad for unit in self.units for flat in unit.flats for parameter in flat.parameters]

    def _check_training(self) -> None:
        """Compare between ranks which parameters train, when that has changed: gradients are summed of all ranks."""
        trained = self._training()
        if trained == self._trained:
            return
        names = [slot.names[0] for unit in self.units for flat in unit.flats for slot in flat.layout.slots]
        described = [f"{name!r} {'trained' if each else 'frozen'}" for name, each in zip(names, trained, strict=True)]
        changed = next(each for each, new, old in zip(described, trained, self._trained, strict=True) if new != old)
        for link in self.links:
            said = f"rank {link.global_rank(link.rank)} has {changed} now, and asks whether all ranks have"
            link.notices.say(said)
            try:
                check_agreement(link, described)
            except CollectiveError as error:
                raise RankMismatch(f"{said}. Freeze the same parameters on every rank. {error}") from error
        self._trained = trained

    def _leave(self, unit: ShardedUnit) -> None:
        if unit in self._active:
            while self._active.pop() is not unit:
                pass
        if not self._active:
            self._caller = None

    def _watch(self, run: Run, inputs: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Hook outputs and what the unit made that they are views of: a view changed in place loses its hook."""
        hook = RunHook(self.before_backward, run)
        bases = [base for each in outputs if (base := base_of(each)) is not None and not base.is_leaf]
        given = {base_of(tensor) for tensor in tensors_in(inputs)} if bases else set()
        for tensor in (*outputs, *{base for base in bases if base.requires_grad and base not in given}):
            tensor.register_hook(hook)

    def _prepare_output(self, unit: ShardedUnit, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output in the root's dtype, in memory that stays, with a hook where it needs a gradient."""
        if unit.outermost or unit.was_root or unit.precision.cast_outputs == "units":
            tensor = _cast(tensor, unit.precision.output_dtype)
        if unit.holds_memory_of(tensor):
            return tensor.clone()
        if tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
            return tensor.view_as(tensor)
        return tensor

    def _gather_before(self, run: Run) -> None:
        self._gather_ahead(run.unit, [each for each in run.before if each.options.backward_gather], "backward")

    def _gather_ahead(self, now: ShardedUnit, ahead: Sequence[ShardedUnit], phase: str) -> None:
        """Prefetch units that come after the one that runs now, as far as the bound allows."""
        limit = self.schedule.in_flight_bytes
        taken = 0 if limit is None else sum(unit.bytes for unit in self.units if unit.in_flight and unit is not now)
        for unit in ahead:
            if unit.gathered or unit.in_flight:
                continue
            if limit is not None:
                taken += unit.bytes
                if taken > limit:
                    return
            unit.unshard(phase)

    def _cast_inputs(
        self, unit: ShardedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wanted, precision = unit.precision.param_dtype, unit.precision
        if wanted is None or precision.cast_inputs == "none":
            return args, kwargs
        if precision.cast_inputs == "root" and not (unit.outermost or unit.was_root):
            return args, kwargs
        if precision.full_in_eval and not unit.module.training:
            return args, kwargs
        return map_values((args, kwargs), lambda tensor: _cast(tensor, wanted))


def _module_call() -> FrameType | None:
    """Return the frame of the innermost call of a module; without one nothing is known."""
    here: FrameType | None = frame_above(1)
    while here is not None and here.f_code is not CALL_CODE:
        here = here.f_back
    return here


def _runs(frame: FrameType) -> bool:
    """Return whether a frame is among those that run in this thread."""
    here: FrameType | None = frame_above(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype is not None else tensor
