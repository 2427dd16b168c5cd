"""The problems of settings: variants of the step are captured and timed once, and sharded in every way asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from memfit.capture import (
    ChunkedLoss,
    Step,
    Trace,
    chunked_losses,
    divide_step,
    find_softmaxes,
    is_chunked,
    step_with,
    trace,
)
from memfit.cost import Cost, Runtime
from memfit.errors import InputError
from memfit.plans.settings import Setting, StepVariant, describe
from memfit.solve import Problem
from memfit.tradeoff import find_units

EarlyChunks = Callable[[ChunkedLoss], Trace | None]
"""Gives a trace with a chunked loss that was captured before, None where there is none."""


class SettingProblems:
    """Problems by setting, of the step of one problem; `left_out` says what could not be captured or built."""

    def __init__(self, first: Problem, step: Step | None, cost: Cost, early: EarlyChunks | None = None) -> None:
        self.first = first
        self.left_out: list[str] = []
        self._step, self._cost, self._early = step, cost, early
        self._traces: dict[StepVariant, Trace | None] = {StepVariant(): first.trace}
        self._runtimes: dict[StepVariant, Runtime] = {}
        self._problems: dict[Setting, Problem | None] = {Setting(): first}

    def is_captured(self, variant: StepVariant) -> bool:
        """Return whether a variant was captured, or found not to run so."""
        return variant in self._traces

    @property
    def captured(self) -> list[StepVariant]:
        """The variants that were captured and run."""
        return [variant for variant, found in self._traces.items() if found is not None]

    def known(self, setting: Setting) -> Problem | None:
        """Return the problem of a setting that was built before."""
        return self._problems.get(setting)

    def of(self, setting: Setting) -> Problem | None:
        """Return the problem of a setting; None, and why, where the step does not run so."""
        if setting not in self._problems:
            self._problems[setting] = self._build(setting)
        return self._problems[setting]

    def _build(self, setting: Setting) -> Problem | None:
        variant = setting.variant
        if setting.shard is not None:
            plain = self.of(Setting(variant=variant))
            return None if plain is None else self._sharded(plain, setting)
        if variant not in self._traces:
            self._traces[variant] = self._capture(variant)
        captured = self._traces[variant]
        if captured is None:
            return None
        options = self.first.options
        if variant.chunked is not None:
            options = replace(options, forbid=(*options.forbid, *units_with_loss(captured, variant.chunked)))
        try:
            return Problem.of(self._runtime(variant), self.first.target, options)
        except InputError as error:  # names of units that this step does not have, or that must be checkpointed
            self.left_out.append(f"{describe(setting)}: {error}")
            return None

    def _sharded(self, plain: Problem, setting: Setting) -> Problem | None:
        assert setting.shard is not None
        try:
            return plain.with_sharding(self._runtime(setting.variant), setting.shard)
        except InputError as error:
            self.left_out.append(f"{describe(setting)}: {error}")
            return None

    def _runtime(self, variant: StepVariant) -> Runtime:
        if variant not in self._runtimes:
            captured = self._traces[variant]
            assert captured is not None
            self._runtimes[variant] = Runtime.of(captured, self._cost)
        return self._runtimes[variant]

    def _capture(self, variant: StepVariant) -> Trace | None:
        plain, chunked = self.first.trace, variant.chunked
        try:
            found = None
            if self._early is not None and chunked is not None and variant == StepVariant(chunked=chunked):
                found = self._early(chunked)
            captured = found or self._capture_now(variant)
        except Exception as error:  # the user's own code meets what it was not written for
            what = describe(Setting(variant=variant))
            self.left_out.append(f"{what}: the step cannot run so ({type(error).__name__}: {error})")
            return None
        if chunked is not None and not is_chunked(captured, self._whole(variant), chunked):
            return None  # the loss does not call torch's function, or has fewer rows
        return None if captured.fingerprint == plain.fingerprint else captured

    def _whole(self, variant: StepVariant) -> Trace:
        """Return the step in as many micro-batches with its loss whole."""
        whole = StepVariant(parts=variant.parts)
        problem = self.of(Setting(variant=whole))
        return self.first.trace if problem is None else problem.trace

    def _capture_now(self, variant: StepVariant) -> Trace:
        plain, step = self.first.trace, self._step
        assert step is not None
        with contextlib.ExitStack() as stack:
            if variant.chunked is not None:
                stack.enter_context(chunked_losses(variant.chunked))
            if variant.implementation is not None:
                step = stack.enter_context(step_with(step, variant.implementation))
            if variant.parts > 1:
                step = divide_step(step, variant.parts)
            target = replace(self.first.target, device=plain.hardware)  # whether segments grow or not
            return trace(step, target=target, **plain.captured_on)


def units_with_loss(captured: Trace, chunked: ChunkedLoss) -> list[str]:
    """Name the units that compute chunks of the loss, which recompute themselves: no plan recomputes them again."""
    ops = [index for index, _ in find_softmaxes(captured, chunked.classes)]
    return [
        unit.name
        for unit in find_units(captured)
        if unit.kind == "loss" or any(unit.begin <= op < unit.end for op in ops)
    ]
