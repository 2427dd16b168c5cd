"""`verify`: run the real step with a plan and without it, and compare both with the prediction.

Note [Runs]: with the plan, two steps whose losses and gradients are written down (in the first the engine learns, and
optimizer state appears), then one whose memory is measured, together with the step before it (Note [Second of two]);
the same without the plan, from the same state; then steps by turns whose times are taken, between two that time the
forward of each module. Where the plan changes how the optimizer does its step, values are compared with that change in
both, because it rounds differently; without the plan, memory and time are those of the optimizer's own way, with one
step more before the measured one. Under a plan that computes the loss in chunks, sums are in another order: losses and
gradients of the first step are compared with a tolerance, and later values, which follow from them, are not.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture import (
    BEFORE_STEP,
    SEVERAL_PATHS,
    Category,
    Step,
    Trace,
    cheap_collections,
    neutral_modes,
    set_flags,
)
from memfit.engines import plan_of_model, resolve_engine, unplanned
from memfit.errors import InputError
from memfit.plans import Engine, Plan
from memfit.torch_private.storages import storage_key
from memfit.units import display_bytes
from memfit.verify.align_events import Filling, Places, find_filling
from memfit.verify.exactness import (
    Difference,
    Exactness,
    Outcome,
    beyond_tolerance,
    compare_outcomes,
    compare_tensors,
    host_copy,
    record_outcome,
)
from memfit.verify.faults import is_out_of_memory
from memfit.verify.measure import Rise, free_bytes, measure_forward_ms, measure_rise, predict_forward_ms, step_ms
from memfit.verify.prediction import capture_for_plan, replay_plan
from memfit.verify.resolve import check_plan, real_step, resolve_step
from memfit.verify.state import Found, same_generators, tensors_in
from memfit.verify.verification import MEMORY_TOLERANCE, TIME_TOLERANCE, BytesCheck, MsCheck, Verification

_HALVES = ("bfloat16", "float16")
_FLOAT_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2
"""Sums in another order differ in their last bits; a rounding to bfloat16 on the way may make that one of 256."""
_COMPARED = 2
"""Steps whose losses and gradients are compared: the engine learns in the first and knows in the second."""


def verify(
    plan: Plan,
    step: Step | Callable[[], Any],
    steps: int = 3,
    *,
    memory_tolerance: float = MEMORY_TOLERANCE,
    time_tolerance: float | None = TIME_TOLERANCE,
    engine: Engine | None = None,
) -> Verification:
    """Run the step with the plan and without it; the model, its optimizer and all else are left as they were found.

    The median of `steps` steps is the time. A `time_tolerance` of None keeps times out of the verdict. A plan for
    several ranks is verified by all of them at once, on the engine that `Plan.apply` would take.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}; give 1 or more, whose median is the measured time")
    if plan.shard is not None:
        # Imported here: it loads DTensor, which takes longer than all of memfit, and most plans are for one device.
        from memfit.verify.rank_verifying import verify_on_ranks

        return verify_on_ranks(
            plan, step, steps, memory_tolerance=memory_tolerance, time_tolerance=time_tolerance, engine=engine
        )
    check_plan(plan)
    resolve_engine(plan, engine, ())
    with same_generators(), neutral_modes():
        real, model = real_step(plan, resolve_step(step))
        verifier = _Verifier(plan, real, model)
        return verifier.verification(steps, memory_tolerance, time_tolerance)


@dataclass(slots=True)
class _Observed:
    """Steps of one kind: what they computed, what they left, how high they rose from what was resident."""

    outcomes: list[Outcome]
    left: dict[str, dict[str, torch.Tensor]]
    rise: Rise
    resident: Filling

    @property
    def peak_bytes(self) -> int:
        return sum(self.resident.by_category.values()) + self.rise.rise_bytes


class _Verifier:
    """One verification, from the capture to the last step."""

    def __init__(self, plan: Plan, step: Step, model: nn.Module) -> None:
        assert plan.predicted is not None
        self.plan, self.step, self.model = plan, step, model
        self.predicted = plan.predicted
        self.device_type = plan.trace.device_type
        first = next(iter(model.parameters()), None)
        self.device = torch.device(self.device_type) if first is None else first.device
        self.found = Found(step, model)
        self._own_flags = _flags(step.optimizer)
        with self.found.kept(), unplanned(model):
            self.trace: Trace = capture_for_plan(plan, step)
        self.places = Places(replay_plan(plan, self.trace))
        self.planned_step = step if step.loss is None else replace(step, loss=plan.loss(step.loss))

    def run(self) -> None:
        """Run one step."""
        optimizer = self.step.optimizer
        assert optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
        self.planned_step.execute(self.model, optimizer, self.device_type)

    def verification(self, steps: int, memory_tolerance: float, time_tolerance: float | None) -> Verification:
        """Run everything (Note [Runs])."""
        if self.device_type == "cuda":  # what the user's garbage holds there may be what the plain step needs
            gc.collect()
        with cheap_collections(), self.found.kept(), self._applied():
            planned = self._observed(_COMPARED)
            plain, skipped = self._plain()
            exactness = None if plain is None else self._exactness(planned, plain)
            with self.found.kept():
                plain_ms, planned_ms, forward_ms = self._times(steps, without=plain is not None)
        timeline = self.places.timeline
        predicted = self.places.at(timeline.peak_instant)
        by_category: tuple[BytesCheck, ...] = ()
        by_module: tuple[BytesCheck, ...] = ()
        if planned.rise.events:
            at_peak = find_filling(self.places, planned.rise, planned.resident)
            categories = self.predicted.peak_by_category or predicted.by_category
            by_category = _beside({c.value: n for c, n in categories.items()}, _values(at_peak))
            by_module = _beside(predicted.by_module, at_peak.by_module)
        baseline = self.plan.baseline
        return Verification(
            device=self.plan.target.title,
            steps=steps,
            budget_bytes=self.plan.budget_bytes,
            peak=_bytes("peak", self.predicted.peak_bytes, planned.peak_bytes),
            replayed_peak_bytes=timeline.peak_bytes,
            peak_module=timeline.module_of(timeline.peak_instant),
            by_category=by_category,
            by_module=by_module,
            step=MsCheck(name="step", predicted_ms=self.predicted.step_ms, measured_ms=statistics.median(planned_ms)),
            forward_by_module=self._forwards(forward_ms),
            baseline_peak=None if plain is None else _bytes("peak", baseline.peak_bytes, plain.peak_bytes),
            baseline_step=(
                MsCheck(name="step", predicted_ms=baseline.step_ms, measured_ms=statistics.median(plain_ms))
                if plain_ms
                else None
            ),
            exactness=exactness,
            skipped=skipped,
            memory_tolerance=memory_tolerance,
            time_tolerance=time_tolerance,
            random_path=any(note.startswith(SEVERAL_PATHS) for note in self.plan.notes),
        )

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        """Apply the plan inside the block; one that the user has applied stays so."""
        if plan_of_model(self.model) is not None:
            yield
            return
        optimizer = self.step.optimizer
        self.plan.apply(self.model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
        try:
            yield
        finally:
            self.plan.remove(self.model)

    @contextlib.contextmanager
    def _own_optimizer(self) -> Iterator[None]:
        """Let the optimizer step inside the block as it did before the plan was applied."""
        optimizer = self.step.optimizer
        if self.plan.optimizer is None or not isinstance(optimizer, torch.optim.Optimizer):
            yield
            return
        planned = _flags(optimizer)
        set_flags(optimizer, self._own_flags)
        try:
            yield
        finally:
            set_flags(optimizer, planned)

    def _observed(self, steps: int, *, plain: bool = False, measure: bool = True) -> _Observed:
        """Run some steps from the state that was found, then measure."""
        outcomes: list[Outcome] = []
        left: dict[str, dict[str, torch.Tensor]] = {}

        def compared() -> None:
            with record_outcome(self.model) as outcome:
                self.run()
            outcomes.append(outcome)

        def last_compared() -> None:
            compared()
            left.update(self._left())

        with self.found.kept():
            for _ in range(steps - 1):
                compared()
            rise = Rise(rise_bytes=0)
            if not measure:
                last_compared()
            elif plain and self.plan.optimizer is not None:
                last_compared()
                with self._own_optimizer():
                    rise = measure_rise(self.run, self.device)
            else:
                rise = measure_rise(self.run, self.device, first=last_compared)
            return _Observed(outcomes, left, rise, self._resident())

    def _left(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copy what a step leaves behind."""
        return {
            "parameter": {name: host_copy(each) for name, each in self.model.named_parameters()},
            "buffer": {name: host_copy(each) for name, each in self.model.named_buffers()},
            "random state": {"torch": host_copy(torch.get_rng_state())},
        }

    def _resident(self) -> Filling:
        """Return what is there when a step begins: as the trace has it, but counted where it can be."""
        resident = self.places.at(BEFORE_STEP)
        counted: dict[Category, list[torch.Tensor]] = {
            Category.PARAMETER: list(self.model.parameters()),
            Category.GRADIENT: [each.grad for each in self.model.parameters() if each.grad is not None],
            Category.OPTIMIZER_STATE: [
                each for optimizer in self.found.optimizers for each in tensors_in(list(optimizer.state.values()))
            ],
        }
        for category, tensors in counted.items():
            n_bytes = self._allocated_bytes(tensors)
            resident.add((category, ""), n_bytes - resident.by_category[category])
        return resident

    def _allocated_bytes(self, tensors: list[torch.Tensor]) -> int:
        rounding = self.places.timeline.rounding_bytes
        here = [each for each in tensors if each.device.type == self.device_type and each.layout is torch.strided]
        storages = {storage_key(each): each.untyped_storage().nbytes() for each in here}
        return sum(-(-n_bytes // rounding) * rounding for n_bytes in storages.values())

    def _plain(self) -> tuple[_Observed | None, str | None]:
        """Run the step without the plan where that fits; otherwise say why not."""
        start = self.places.at(BEFORE_STEP).by_category
        there = start[Category.PARAMETER] + start[Category.BUFFER] + start[Category.INPUT]
        needed, free = self.plan.baseline.peak_bytes - there, free_bytes(self.device)
        if self.device_type == "cpu":  # where copies of gradients are beside what the step needs
            needed += (_COMPARED + 1) * start[Category.PARAMETER]
        if free is not None and needed > free:
            return None, f"it needs {display_bytes(needed)} more than is there, and {display_bytes(free)} are free"
        try:
            with unplanned(self.model):
                return self._observed(_COMPARED, plain=True), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None, f"it ran out of memory; it was thought to need {display_bytes(needed)} more than is there"

    def _exactness(self, planned: _Observed, plain: _Observed) -> Exactness:
        """Compare bit for bit; where something differs, whether the step without the plan repeats itself."""
        found = _differences(planned, plain)
        tolerance = _tolerance(self.plan)
        if tolerance is not None:
            found = beyond_tolerance(found, tolerance)
        reproducible = None
        if found:
            with unplanned(self.model):
                reproducible = not _differences(self._observed(_COMPARED, measure=False), plain)
        return Exactness(
            steps=_COMPARED,
            gradients=len(plain.outcomes[0].gradients),
            differences=tuple(found),
            reproducible=reproducible,
            tolerance=tolerance,
        )

    def _times(self, steps: int, *, without: bool) -> tuple[list[float], list[float], dict[str, float]]:
        """Time steps without and with the plan by turns, and the forward of each module, as the lower of two."""
        plain, planned = [], []
        first = self._module_ms(without=without)  # also makes the optimizer's state
        for _ in range(steps):
            if without:
                with unplanned(self.model), self._own_optimizer():
                    plain.append(step_ms(self.run, self.device))
            planned.append(step_ms(self.run, self.device))
        second = self._module_ms(without=without)
        return plain, planned, {name: min(first[name], second[name]) for name in first if name in second}

    def _module_ms(self, *, without: bool) -> dict[str, float]:
        with unplanned(self.model) if without else contextlib.nullcontext():
            return measure_forward_ms(self.run, self.model, self.device)

    def _forwards(self, measured: dict[str, float]) -> tuple[MsCheck, ...]:
        predicted = predict_forward_ms(self.trace, self.plan.baseline.step_ms)
        return tuple(
            MsCheck(name=name, predicted_ms=predicted.get(name, 0.0), measured_ms=measured[name])
            for name in sorted(measured, key=lambda name: -measured[name])
        )


def _tolerance(plan: Plan) -> float | None:
    """Return by how much a plan may change a loss or gradient, as a part of its largest value; None for not at all."""
    if not plan.chunked_loss:
        return None
    halves = plan.trace.autocast in _HALVES or any(each.dtype in _HALVES for each in plan.trace.parameters)
    return _HALF_TOLERANCE if halves else _FLOAT_TOLERANCE


def _flags(optimizer: Any) -> list[dict[str, Any]]:
    """Return how an optimizer does its step, by group."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    return [{name: group[name] for name in ("foreach", "fused") if name in group} for group in optimizer.param_groups]


def _differences(planned: _Observed, plain: _Observed) -> list[Difference]:
    found = [
        each
        for number, (one, other) in enumerate(zip(planned.outcomes, plain.outcomes, strict=True))
        for each in compare_outcomes(one, other, number)
    ]
    for kind, tensors in planned.left.items():
        found += compare_tensors(kind, tensors, plain.left[kind], len(planned.outcomes) - 1)
    return sorted(found, key=lambda each: -each.largest)


def _values(filling: Filling) -> dict[str, int]:
    return {category.value: n_bytes for category, n_bytes in filling.by_category.items()}


def _beside(predicted: dict[str, int], measured: dict[str, int]) -> tuple[BytesCheck, ...]:
    """Return what either side has, the largest first."""
    rows = [_bytes(name, predicted.get(name, 0), measured.get(name, 0)) for name in {**predicted, **measured}]
    rows = [each for each in rows if each.predicted_bytes or each.measured_bytes]
    return tuple(sorted(rows, key=lambda each: (-max(each.predicted_bytes, each.measured_bytes), each.name)))


def _bytes(name: str, predicted_bytes: int, measured_bytes: int) -> BytesCheck:
    return BytesCheck(name=name, predicted_bytes=predicted_bytes, measured_bytes=measured_bytes)
