"""`compile`: torch.compile with a budget in bytes, planned on the joint graph, measured, and corrected.

Note [Rounds]: the first round plans with the estimate as it is. A step is then run and measured. Where its peak is over
the budget, or so far below that a faster saved set may fit, the budget of the next round is moved by what the estimate
was off. Rounds end when the choice would not change, and after `rounds` of them. Where none was within the budget, the
sets that torch's own solver finds are measured too, the smallest by the estimate first, until one is or none can be by
as much as the estimate was off. Where rounds are left, the ones of these that fit and are nearly as fast by the
estimate are compiled as well: times of fused kernels are estimates, so of all that were measured within the budget
steps are timed, by turns, and the fastest is kept.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture import Phase, Step, Trace, neutral_modes, trace
from memfit.compiled.op_times import OpTimes
from memfit.compiled.partitioning import Splitter
from memfit.compiled.program import Choice, Outside
from memfit.engines import plan_of_model
from memfit.errors import InputError, MissingFeatureError
from memfit.memory import Timeline
from memfit.progress import Progress
from memfit.torch_private.partitioner import (
    CUSTOM_PARTITIONER,
    graph_break_errors,
    has_cpp_compiler,
    make_partitioner,
    missing_names,
    recompiles_of_its_own,
    unlimited_recompiles,
)
from memfit.units import display_bytes, display_ms, parse_bytes
from memfit.verify import Found, measure_rise, step_ms, tensors_in

_WARM_UPS = 2
"""Steps before the measured one: the first compiles, and makes the optimizer's state."""
_ROUNDS = 4
_CONTENDERS = 2
_NEARLY = 1.1
"""So many saved sets of torch's are timed beside memfit's, of those that the estimate has at most so much slower."""
_TURNS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One compilation: the saved set's estimated peak and time, and the peak that was measured.

    `measured_ms` is the median of a step's time where several were timed by turns.
    """

    found_by: str
    estimated_peak_bytes: int
    measured_peak_bytes: int
    estimated_ms: float
    saved_bytes: int
    measured_ms: float | None = None

    @property
    def error_bytes(self) -> int:
        """By how much the measured peak is above the estimate."""
        return self.measured_peak_bytes - self.estimated_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled model whose training step was measured within the budget.

    `chosen` is what `model` runs, `rounds` all that were compiled. `default` is torch's own choice without a budget, as
    estimated: peak and milliseconds of its two graphs. `eager_peak_bytes` is the peak of the step without
    torch.compile. `planned` is False where torch made several graphs of the model, each split as torch does.
    """

    model: Any
    budget_bytes: int
    chosen: Round
    rounds: tuple[Round, ...]
    default_peak_bytes: int
    default_ms: float
    eager_peak_bytes: int
    planned: bool
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The measured peak of the step."""
        return self.chosen.measured_peak_bytes

    def __str__(self) -> str:
        chosen = self.chosen
        first = (
            f"compiled for a budget of {display_bytes(self.budget_bytes)}: measured peak "
            f"{display_bytes(chosen.measured_peak_bytes)}"
        )
        if not self.planned:
            return "\n".join([first, *self.notes])
        lines = [
            f"{first}, estimated {display_bytes(chosen.estimated_peak_bytes)}",
            f"saved for the backward: {display_bytes(chosen.saved_bytes)} (found by {chosen.found_by}); recomputing is "
            f"estimated to add {max(0.0, chosen.estimated_ms / self.default_ms - 1.0):.1%} to a step",
            f"without a budget the peak is estimated at {display_bytes(self.default_peak_bytes)} compiled and "
            f"{display_bytes(self.eager_peak_bytes)} eager",
        ]
        timed = [each.measured_ms for each in self.rounds if each.measured_ms is not None]
        if chosen.measured_ms is not None:
            slowest = display_ms(max(timed))
            lines.append(
                f"measured step {display_ms(chosen.measured_ms)}, the fastest of {len(timed)} that fit; the slowest of "
                f"them {slowest}"
            )
        if len(self.rounds) > 1:
            errors = ", ".join(f"{each.error_bytes / 2**20:+.2f}" for each in self.rounds)
            lines.append(f"compiled {len(self.rounds)} times; MiB measured above the estimate: {errors}")
        return "\n".join(lines)


def compile(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    budget: str | int,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    rounds: int = _ROUNDS,
    options: dict[str, Any] | None = None,
    progress: bool = True,
) -> Compiled:
    """Compile a model so that the real peak of its training step is within the budget, as fast as that allows.

    The budget is bytes of everything that the step allocates: parameters, gradients, optimizer state, batch,
    activations and temporaries. The step is run on the model's device with the batch given, compiled at most `rounds`
    times, and where nothing fits then, once for each of the up to eleven sets that torch's own solvers find, and
    measured; values of the model, the optimizer and the batch are as before afterwards. `options` are those of
    torch.compile. Where none of the saved sets that were measured is within the budget, that is an `InputError` that
    names the smallest peak measured.
    """
    step = model if isinstance(model, Step) else Step(model, batch, loss=loss, optimizer=optimizer, autocast=autocast)
    budget_bytes = parse_bytes(budget)
    if rounds < 1:
        raise InputError(f"rounds is {rounds}; give 1 or more")
    device = _check(step)
    with neutral_modes():
        return _Compiler(step, device, budget_bytes, dict(options or {}), progress=progress).compiled(rounds)


def _check(step: Step) -> torch.device:
    """Refuse what cannot be compiled and measured here, before anything is done; return the model's device."""
    missing = missing_names()
    if missing:
        raise MissingFeatureError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which planning a compiled model needs; use torch "
            "2.10 or later, or plan the eager model with memfit.plan"
        )
    model = step.model
    if not isinstance(model, nn.Module) or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise InputError("compile takes the nn.Module itself, on its device and not compiled yet")
    if plan_of_model(model) is not None:
        raise InputError("this model runs a plan of memfit.plan, which is for eager training; call plan.remove first")
    tensors = [*model.parameters(), *tensors_in(step.batch)]
    if any(tensor.is_meta for tensor in tensors):
        raise InputError("compile runs the step: give a model and a batch with values, not on meta or by memfit.spec")
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise MissingFeatureError(f"the model is on {device.type}; peaks are measured on cpu and cuda only")
    if device.type == "cpu" and not has_cpp_compiler():
        raise InputError("torch.compile needs a C++ compiler for CPU kernels and finds none; install g++, or set CXX")
    return device


_Attempt = tuple[Round, Any, Splitter]
"""A compilation, the compiled model, and what split its graph."""


class _Compiler:
    """One call of `compile`."""

    def __init__(
        self, step: Step, device: torch.device, budget_bytes: int, options: dict[str, Any], *, progress: bool
    ) -> None:
        assert isinstance(step.model, nn.Module)
        self.module = step.model
        self.step = replace(step, optimizer=step.build_optimizer(step.model))
        self.device, self.budget_bytes, self.options, self.progress = device, budget_bytes, options, progress
        self.found = Found(self.step, self.module)
        with self.found.kept():
            captured = trace(self.step, target="cpu" if device.type == "cpu" else None)
        timeline = Timeline.of(captured)
        self.eager_peak_bytes = timeline.peak_bytes
        self.outside = _outside(captured, timeline)
        self.times = OpTimes(captured.hardware)

    def compiled(self, most_rounds: int) -> Compiled:
        """Compile, measure and correct (Note [Rounds])."""
        try:
            return self._in_rounds(most_rounds)
        except graph_break_errors() as error:
            return self._as_torch_does(str(error).strip().splitlines()[0])

    def _in_rounds(self, most_rounds: int) -> Compiled:
        made: list[_Attempt] = []
        splitter = self._splitter()
        for _ in range(most_rounds):
            made.append(self._try(splitter))
            following = self._next_choice([each for each, _, _ in made], splitter)
            if following is None:
                break
            splitter = self._splitter(earlier=splitter, wanted=following)
        self._try_sets_of_torch(made)
        for other in self._contenders(made, most_rounds):
            with contextlib.suppress(torch.OutOfMemoryError):  # what fits is there already
                made.append(self._try(self._splitter(earlier=made[-1][2], wanted=other)))
        made = self._timed(made)
        fitting = [each for each in made if each[0].measured_peak_bytes <= self.budget_bytes]
        if not fitting:
            self._refuse([each for each, _, _ in made])
        chosen, model, splitter = min(
            fitting, key=lambda each: each[0].estimated_ms if each[0].measured_ms is None else each[0].measured_ms
        )
        return Compiled(
            model=model,
            budget_bytes=self.budget_bytes,
            chosen=chosen,
            rounds=tuple(each for each, _, _ in made),
            default_peak_bytes=splitter.own_choice.peak_bytes,
            default_ms=splitter.own_choice.ms,
            eager_peak_bytes=self.eager_peak_bytes,
            planned=True,
            notes=(),
        )

    def _splitter(self, *, earlier: Splitter | None = None, wanted: Choice | None = None) -> Splitter:
        return Splitter(self.outside, self.budget_bytes, self.times, earlier=earlier, wanted=wanted)

    def _try_sets_of_torch(self, made: list[_Attempt]) -> None:
        """Where nothing fits, compile what torch's own solvers save until something does (Note [Rounds])."""
        splitter = made[-1][2]
        by_torch = {each.saved: each for each in splitter.others}
        for other in sorted(by_torch.values(), key=lambda each: each.peak_bytes):
            if any(each.measured_peak_bytes <= self.budget_bytes for each, _, _ in made):
                return
            if other.peak_bytes - max(abs(each.error_bytes) for each, _, _ in made) > self.budget_bytes:
                return
            if all(each.choice is None or each.choice.saved != other.saved for _, _, each in made):
                made.append(self._try(self._splitter(earlier=splitter, wanted=other)))

    def _contenders(self, made: list[_Attempt], most_rounds: int) -> list[Choice]:
        """Return torch's own sets that are worth a compilation beside what fits already (Note [Rounds])."""
        splitter = made[-1][2]
        compiled = {each.choice.saved: found for found, _, each in made if each.choice is not None}
        fitting = {saved: each for saved, each in compiled.items() if each.measured_peak_bytes <= self.budget_bytes}
        if not fitting or splitter.own_choice.saved in fitting:
            return []
        error = max(each.error_bytes for each in fitting.values())
        most_ms = _NEARLY * min(each.estimated_ms for each in fitting.values())
        by_torch = {each.saved: each for each in splitter.others if each.saved not in compiled}
        worth = [
            each for each in by_torch.values() if each.peak_bytes + error <= self.budget_bytes and each.ms <= most_ms
        ]
        return sorted(worth, key=lambda each: each.ms)[: max(0, min(_CONTENDERS, most_rounds - len(made)))]

    def _timed(self, made: list[_Attempt]) -> list[_Attempt]:
        """Time steps of all that fit, by turns; nothing where that is one alone."""
        fitting = [place for place, each in enumerate(made) if each[0].measured_peak_bytes <= self.budget_bytes]
        if len(fitting) < 2:
            return made
        found: dict[int, list[float]] = {place: [] for place in fitting}
        with self.found.kept():
            for turn in range(_TURNS):
                for place in fitting[:: -1 if turn % 2 else 1]:
                    found[place].append(step_ms(lambda model=made[place][1]: self._run(model), self.device))
        return [
            (replace(each, measured_ms=statistics.median(found[place])) if place in found else each, model, splitter)
            for place, (each, model, splitter) in enumerate(made)
        ]

    def _try(self, splitter: Splitter) -> _Attempt:
        """Compile the model with a splitter, and measure its step."""
        with Progress("compiling and measuring a step", show=self.progress):
            model = self._torch_compile(splitter, fullgraph=True)
            return _round(splitter, self._measure(model)), model, splitter

    def _next_choice(self, made: list[Round], splitter: Splitter) -> Choice | None:
        """Return what to compile in another round, None where that was compiled already or would be no faster."""
        assert splitter.problem is not None
        fitting = [each for each in made if each.measured_peak_bytes <= self.budget_bytes]
        error = made[-1].error_bytes if fitting else max(each.error_bytes for each in made)
        allowed = self.budget_bytes - error
        choice = splitter.problem.choose(allowed, splitter.others)
        known = {(each.estimated_peak_bytes, each.estimated_ms) for each in made}
        if (choice.peak_bytes, choice.ms) in known:
            return None
        if fitting and (choice.peak_bytes > allowed or choice.ms >= min(each.estimated_ms for each in fitting)):
            return None
        return choice  # where nothing fits, by the estimate: the smallest, before the budget is refused

    def _refuse(self, made: list[Round]) -> None:
        lowest = min(made, key=lambda each: each.measured_peak_bytes)
        shown = {
            "budget": self.budget_bytes,
            "measured": lowest.measured_peak_bytes,
            "estimated": lowest.estimated_peak_bytes,
            "resident": self.outside.resident_bytes,
            "stepping": self.outside.optimizer_bytes,
        }
        raise InputError(
            "found no saved set that keeps the compiled step within {budget}: the smallest peak measured is {measured} "
            "(estimated {estimated}), {resident} of it before the step begins; the optimizer reaches {stepping}; give "
            "a larger budget or a smaller batch, or plan the eager model (memfit.plan), which may go lower".format(
                **{name: display_bytes(n) for name, n in shown.items()}
            )
        )

    def _as_torch_does(self, why: str) -> Compiled:
        """Compile a model of several graphs without a plan, and say how far its eager peak is from the measured one."""
        model = self._torch_compile(None, fullgraph=False)
        peak = self._measure(model)
        over = self.eager_peak_bytes - peak
        note = (
            f"not planned: torch makes several graphs of this model ({why}), and each saves what torch chooses; the "
            f"step measures {display_bytes(peak)} compiled and {display_bytes(self.eager_peak_bytes)} eager, which "
            f"{'overestimates' if over >= 0 else 'underestimates'} it by {display_bytes(abs(over))} "
            f"({abs(over) / peak:.0%})"
        )
        if peak > self.budget_bytes:
            raise InputError(
                f"{note}; that is over the budget of {display_bytes(self.budget_bytes)}: remove the graph break, or "
                "plan the eager model with memfit.plan"
            )
        only = Round(
            found_by="torch",
            estimated_peak_bytes=self.eager_peak_bytes,
            measured_peak_bytes=peak,
            estimated_ms=0.0,
            saved_bytes=0,
        )
        return Compiled(
            model=model,
            budget_bytes=self.budget_bytes,
            chosen=only,
            rounds=(only,),
            default_peak_bytes=peak,
            default_ms=0.0,
            eager_peak_bytes=self.eager_peak_bytes,
            planned=False,
            notes=(note,),
        )

    def _torch_compile(self, splitter: Splitter | None, *, fullgraph: bool) -> Any:
        own = {} if splitter is None else {CUSTOM_PARTITIONER: make_partitioner(splitter)}
        return torch.compile(
            self.module,
            fullgraph=fullgraph,
            dynamic=False,
            options={**self.options, **own} or None,
            **recompiles_of_its_own(),
        )

    def _measure(self, model: Any) -> int:
        """Run the step until it is steady, and return its measured peak."""
        with self.found.kept():
            with unlimited_recompiles():
                for _ in range(_WARM_UPS):
                    self._run(model)
            return self.outside.resident_bytes + measure_rise(lambda: self._run(model), self.device).rise_bytes

    def _run(self, model: Any) -> None:
        optimizer = self.step.optimizer
        assert optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
        self.step.execute(model, optimizer, self.device.type)


def _round(splitter: Splitter, peak: int) -> Round:
    if splitter.choice is None:
        raise MissingFeatureError(
            f"torch split {splitter.graphs} graphs of this model and none could be planned: it has no backward, or its "
            "own checkpointing decides what is saved; remove torch.utils.checkpoint, or compile without a budget"
        )
    return Round(
        found_by=splitter.choice.found_by,
        estimated_peak_bytes=splitter.choice.peak_bytes,
        measured_peak_bytes=peak,
        estimated_ms=splitter.choice.ms,
        saved_bytes=splitter.choice.saved_bytes,
    )


def _outside(captured: Trace, timeline: Timeline) -> Outside:
    """Read from the eager step what is not in the compiled graphs: residents, a loss outside the model, optimizer."""
    ops, before, during = captured.ops, timeline.before_bytes, timeline.during_bytes
    loss = [index for index, op in enumerate(ops) if op.phase is Phase.LOSS]
    of_loss = set(loss)
    loss_backward = [i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD and op.forward_op in of_loss]
    between = held = 0
    if loss:
        between = max(int(during[index] - before[loss[0]]) for index in [*loss, *loss_backward])
        after = max([*loss, *loss_backward]) + 1
        held = max(0, min(int(before[after] - before[loss[0]]), between))
    stepping = [int(during[index]) for index, op in enumerate(ops) if op.phase is Phase.OPTIMIZER]
    return Outside(
        resident_bytes=int(before[0]),
        between_bytes=between,
        held_bytes=0 if not loss_backward else held,
        optimizer_bytes=max(stepping, default=0),
    )
