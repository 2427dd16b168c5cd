"""`verify` on several ranks: the step with the plan on its engine, and sharded by it without checkpointing.

Note [Copies]: both run on copies of the model and its optimizer, so that what the user holds is never sharded, whatever
fails on the way. From the same state and random numbers each takes two steps whose losses, gradients and parameters are
written down, some whose memory is measured (Note [By address]), and some whose time is. Every element of a sharded
tensor is on one rank of a replica, and both are sharded alike: each rank compares its shards bit for bit, and the ranks
exchange what differs instead of whole gradients, which one rank may have no room for.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from memfit.capture import SEVERAL_PATHS, Step, Trace, cheap_collections, find_variables, neutral_modes, set_flags
from memfit.engines import check_ranks, plan_of_model, resolve_engine
from memfit.errors import InputError, StateError
from memfit.plans import Engine, Plan, wrappers_of
from memfit.units import display_bytes
from memfit.verify.exactness import (
    Difference,
    Exactness,
    Outcome,
    compare_outcomes,
    compare_tensors,
    host_copy,
    record_outcome,
)
from memfit.verify.faults import is_out_of_memory
from memfit.verify.measure import free_bytes, step_ms
from memfit.verify.prediction import capture_for_plan, replay_on_ranks
from memfit.verify.rank_group import RankGroup
from memfit.verify.rank_memory import measure_rank_rise, resident_bytes
from memfit.verify.resolve import check_plan, real_step, resolve_step
from memfit.verify.state import Found, same_generators
from memfit.verify.verification import BytesCheck, MsCheck, RankCheck, Verification

_COMPARED = 2


def verify_on_ranks(
    plan: Plan,
    step: Step | Callable[[], Any],
    steps: int,
    *,
    memory_tolerance: float,
    time_tolerance: float | None,
    engine: Engine | None,
) -> Verification:
    """Verify a plan for several ranks, on all of them at once; every rank returns the same record but for its trace."""
    check_ranks(plan, None)
    assert plan.shard is not None
    group = RankGroup(plan.trace.device_type, plan.shard.replicas)
    with same_generators(), neutral_modes(), cheap_collections():
        verifier = group.run("verify", lambda: _RankVerifier(plan, step, engine, group), sends=False)
        return verifier.verification(steps, memory_tolerance, time_tolerance)


@dataclass(slots=True)
class _Observed:
    """What one rank saw of the steps of one kind."""

    outcomes: list[Outcome]
    left: dict[str, dict[str, torch.Tensor]]
    peak_bytes: int = 0
    step_ms: float = 0.0


class _RankVerifier:
    """One rank's part of a verification."""

    def __init__(self, plan: Plan, step: Step | Callable[[], Any], engine: Engine | None, group: RankGroup) -> None:
        check_plan(plan)
        assert plan.predicted is not None
        self.plan, self.group = plan, group
        self.device_type = plan.trace.device_type
        self.step, self.model = real_step(plan, resolve_step(step))
        check_whole(self.step, self.model)
        self.engine = resolve_engine(plan, engine, ())
        self.device = next(self.model.parameters()).device
        with Found(self.step, self.model).kept():
            self.trace: Trace = capture_for_plan(plan, self.step)
        self.timeline = replay_on_ranks(plan, self.trace, self.engine)
        self.replayed_bytes = self.timeline.peak_bytes
        self.predicted_bytes, self.baseline_bytes = plan.predicted.peak_bytes, plan.baseline.peak_bytes
        if self.engine != (plan.engine or "fsdp2"):  # the plan predicts the buffers of the other
            self.replayed_bytes = replay_on_ranks(plan, self.trace, plan.engine or "fsdp2").peak_bytes
            self.predicted_bytes = self.timeline.peak_bytes
            self.baseline_bytes = replay_on_ranks(plan, self.trace, self.engine, planned=False).peak_bytes
        if group.rank:  # the plan predicts the first rank, which has most
            self.predicted_bytes -= self._less_bytes(planned=True)
            self.baseline_bytes -= self._less_bytes(planned=False)

    def _less_bytes(self, *, planned: bool) -> int:
        """Return how much lower the peak of this rank is than that of the first."""
        first, own = (
            replay_on_ranks(self.plan, self.trace, self.engine, planned=planned, rank=rank).peak_bytes
            for rank in (0, self.group.rank)
        )
        return first - own

    def verification(self, steps: int, memory_tolerance: float, time_tolerance: float | None) -> Verification:
        """Run everything (Note [Copies])."""
        plan = self.plan
        assert plan.predicted is not None
        planned = self.group.run("the step with the plan", lambda: self._observed(plan, steps))
        plain, skipped = self._plain(steps)
        exactness = None if plain is None else self._exactness(planned, plain)
        own = RankCheck(
            rank=self.group.rank,
            peak=self._bytes(self.predicted_bytes, planned),
            step=self._ms(plan.predicted.step_ms, planned),
            baseline_peak=None if plain is None else self._bytes(self.baseline_bytes, plain),
            baseline_step=None if plain is None else self._ms(plan.baseline.step_ms, plain),
        )
        ranks = tuple(self.group.gather(own))
        largest = max(ranks, key=lambda each: each.peak.measured_bytes)
        slowest = max(ranks, key=lambda each: each.step.measured_ms)
        plain_peaks = [each.baseline_peak for each in ranks if each.baseline_peak is not None]
        plain_steps = [each.baseline_step for each in ranks if each.baseline_step is not None]
        return Verification(
            device=plan.target.title,
            steps=steps,
            budget_bytes=plan.budget_bytes,
            peak=largest.peak,
            replayed_peak_bytes=self.replayed_bytes,
            peak_module=self.timeline.module_of(self.timeline.peak_instant),
            by_category=(),
            by_module=(),
            step=slowest.step,
            forward_by_module=(),
            baseline_peak=max(plain_peaks, key=lambda each: each.measured_bytes, default=None),
            baseline_step=max(plain_steps, key=lambda each: each.measured_ms, default=None),
            exactness=exactness,
            skipped=skipped,
            memory_tolerance=memory_tolerance,
            time_tolerance=time_tolerance,
            random_path=any(note.startswith(SEVERAL_PATHS) for note in plan.notes),
            engine=self.engine,
            planned_peak_bytes=plan.predicted.peak_bytes,
            ranks=ranks,
        )

    def _observed(self, plan: Plan, steps: int, *, plain: bool = False) -> _Observed:
        """Run the steps of one kind on a copy of the model from the state that was found; no time without steps."""
        gc.collect()  # the copies of the steps before
        with same_generators():
            model, optimizer = copy_trained(self.model, self.step.optimizer)
            flags = _flags(optimizer)
            plan.apply(model, optimizer, mesh=self.group.mesh, engine=self.engine)
            step = self.step if self.step.loss is None else replace(self.step, loss=plan.loss(self.step.loss))

            def run() -> None:
                step.execute(model, optimizer, self.device_type)

            found = _Observed(outcomes=[], left={})
            for _ in range(_COMPARED):
                with record_outcome(model) as outcome:
                    run()
                found.outcomes.append(outcome)
            found.left = _left(model)
            if not steps:
                return found
            if plain and plan.optimizer is not None and optimizer is not None:
                set_flags(optimizer, flags)  # memory and time without the plan are those of the optimizer's own way
            rise = measure_rank_rise(run, self.device)
            held = resident_bytes(self.trace, model, optimizer, self.device_type, self.timeline.rounding_bytes)
            found.peak_bytes = held + rise
            found.step_ms = statistics.median(step_ms(run, self.device) for _ in range(steps))
            return found

    def _plain(self, steps: int) -> tuple[_Observed | None, str | None]:
        """Run the step without checkpointing where that fits on every rank; otherwise say why not."""
        needed, free = self.plan.baseline.peak_bytes, free_bytes(self.device)
        short = None
        if free is not None and needed > free:
            short = f"it needs {display_bytes(needed)}, and {display_bytes(free)} are free"
        for rank, why in enumerate(self.group.gather(short)):
            if why is not None:
                return None, f"{why} on rank {rank}"
        failed: list[str] = []

        def observed() -> _Observed:
            try:
                return self._observed(self._without_checkpoints(), steps, plain=True)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    failed.append(f"rank {self.group.rank} ran out of memory")
                raise

        try:
            return self.group.run("the step without the plan", observed), None
        except Exception:
            # Every rank is here. Where one had no room, the step is left out; any other error is one.
            told = [each for rank in self.group.gather(failed) for each in rank]
            if not told:
                raise
        return None, told[0]

    def _without_checkpoints(self) -> Plan:
        return msgspec.structs.replace(self.plan, checkpoint=())

    def _exactness(self, planned: _Observed, plain: _Observed) -> Exactness:
        """Compare bit for bit on every rank; where something differs, whether the step without the plan repeats."""
        merged = self._merged(_differences(planned, plain))
        reproducible = None
        if merged:
            again = self.group.run(
                "the step without the plan", lambda: self._observed(self._without_checkpoints(), 0, plain=True)
            )
            reproducible = not self._merged(_differences(again, plain))
        return Exactness(
            steps=_COMPARED,
            gradients=len(plain.outcomes[0].gradients),
            differences=merged,
            reproducible=reproducible,
            chunked_in_both=bool(self.plan.chunked_loss),
        )

    def _merged(self, own: Sequence[Difference]) -> tuple[Difference, ...]:
        """Return the differences of all ranks, of each tensor that of the rank where it is largest."""
        found: dict[tuple[str, str, int], Difference] = {}
        for rank, every in enumerate(self.group.gather(list(own))):
            for each in every:
                key = (each.kind, each.name, each.step)
                if key not in found or each.largest > found[key].largest:
                    found[key] = replace(each, rank=rank)
        return tuple(sorted(found.values(), key=lambda each: -each.largest))

    def _bytes(self, predicted_bytes: int, found: _Observed) -> BytesCheck:
        return BytesCheck(name="peak", predicted_bytes=predicted_bytes, measured_bytes=found.peak_bytes)

    def _ms(self, predicted_ms: float, found: _Observed) -> MsCheck:
        return MsCheck(name="step", predicted_ms=predicted_ms, measured_ms=found.step_ms)


def copy_trained(model: nn.Module, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return copies of a model and of its optimizer, which steps the copy."""
    memo: dict[int, Any] = {}
    return copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)


def check_whole(step: Step, model: nn.Module, verb: str = "verify") -> None:
    """Refuse models that are sharded or planned already, and steps that reach them other than as arguments."""
    wrappers = wrappers_of(model)
    if wrappers:
        raise InputError(
            f"the model is in {', '.join(wrappers)} already; {verb} shards copies of it by itself: give the plain model"
        )
    if plan_of_model(model) is not None:
        raise StateError(f"the model runs a plan already, sharded; {verb} before apply, or give another model")
    if next(model.parameters(), None) is None:
        raise InputError("the model has no parameters that ranks could shard")
    own = {id(each) for each in (*model.modules(), step.optimizer) if each is not None}
    for name, function in (("run", step.run), ("loss", step.loss)):
        if any(id(each) in own for each in find_variables(function)):
            raise InputError(
                f"the step's {name} uses the model or the optimizer as a variable, and on several ranks {verb} runs "
                "copies of both; take them as arguments: memfit.Step(model, batch, optimizer=..., run=function) calls "
                "function(model, optimizer, batch)"
            )


def _left(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Copy what steps left behind on this rank."""
    return {
        "parameter": {name: host_copy(each) for name, each in model.named_parameters()},
        "buffer": {name: host_copy(each) for name, each in model.named_buffers()},
        "random state": {"torch": host_copy(torch.get_rng_state())},
    }


def _flags(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return how an optimizer does its step, by group."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [{name: group[name] for name in ("foreach", "fused") if name in group} for group in groups]


def _differences(planned: _Observed, plain: _Observed) -> list[Difference]:
    found = [
        each
        for number, (one, other) in enumerate(zip(planned.outcomes, plain.outcomes, strict=True))
        for each in compare_outcomes(one, other, number)
    ]
    for kind, tensors in planned.left.items():
        found += compare_tensors(kind, tensors, plain.left[kind], _COMPARED - 1)
    return found
