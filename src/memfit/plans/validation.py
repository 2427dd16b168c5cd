"""What must hold of every plan beyond the types of its fields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from memfit.errors import InputError
from memfit.plans.record import Blocker, Checkpoint, Estimate

if TYPE_CHECKING:
    from memfit.plans.document import Plan

_SLACK_MS = 1e-3
_SLACK = 1e-3
"""Times are rounded before they are compared."""
_ROUNDING_BYTES = 4096
"""An op's results are listed as they are and kept as the allocator rounds them: some blocks of 512 bytes to an op."""


def check_content(plan: Plan, where: str) -> None:
    """Raise `InputError` with the first rule that does not hold."""
    for problem in _problems(plan):
        raise InputError(f"{where} is inconsistent: {problem}; plan the step again")


def _problems(plan: Plan) -> Iterator[str]:
    if plan.target.device != plan.trace.device:
        yield f"target.device is {plan.target.device!r}, and the step was captured for {plan.trace.device!r}"
    for entry in plan.checkpoint:
        yield from _checkpoint_problems(entry, plan.trace.ops)
        yield from _offload_problems(entry)
    yield from _overlap_problems(plan)
    if plan.status == "infeasible":
        yield from _infeasible_problems(plan)
    else:
        yield from _answer_problems(plan)
    yield from _estimate_problems("baseline", plan.baseline)
    if plan.predicted is not None:
        yield from _estimate_problems("predicted", plan.predicted)
    if plan.blocker is not None:
        yield from _estimate_problems("blocker", plan.blocker)
    yield from _shard_problems(plan)
    yield from _decision_problems(plan)
    for name in _twice(name for parameter in plan.trace.parameters for name in parameter.names):
        yield f"parameter {name} is there twice"


def _infeasible_problems(plan: Plan) -> Iterator[str]:
    if plan.checkpoint:
        yield f"status is infeasible, and {len(plan.checkpoint)} units are checkpointed"
    for name in ("shard", "predicted", "gap", "bound_ms"):
        if getattr(plan, name) is not None:
            yield f"status is infeasible, and there is a value for {name}"
    if plan.minimum_budget_bytes is None or plan.minimum_budget_bytes <= plan.budget_bytes:
        yield (
            f"status is infeasible for a budget of {plan.budget_bytes} bytes, "
            f"and minimum_budget_bytes is {plan.minimum_budget_bytes}"
        )


def _answer_problems(plan: Plan) -> Iterator[str]:
    for name in ("predicted", "gap", "bound_ms"):
        if getattr(plan, name) is None:
            yield f"status is {plan.status}, and {name} is missing"
    if plan.blocker is not None:
        yield f"status is {plan.status}, and there is a value for blocker"
    if plan.predicted is None or plan.bound_ms is None:
        return
    if plan.predicted.peak_bytes > plan.budget_bytes:
        yield f"predicted.peak_bytes {plan.predicted.peak_bytes} is above budget_bytes {plan.budget_bytes}"
    if plan.minimum_budget_bytes is not None and plan.minimum_budget_bytes > plan.budget_bytes:
        yield f"minimum_budget_bytes {plan.minimum_budget_bytes} is above budget_bytes {plan.budget_bytes}"
    if plan.bound_ms > plan.predicted.step_ms * (1 + _SLACK) + _SLACK_MS:
        yield f"bound_ms {plan.bound_ms} is above predicted.step_ms {plan.predicted.step_ms}"
    summed_ms, recompute_ms = sum(entry.recompute_ms for entry in plan.checkpoint), plan.predicted.recompute_ms
    if abs(summed_ms - recompute_ms) > _SLACK * recompute_ms + _SLACK_MS:
        yield f"predicted.recompute_ms is {recompute_ms}, and that of the units adds up to {summed_ms:.6f}"
    exposed_ms, waited_ms = (
        plan.predicted.exposed_offload_ms or 0.0,
        sum(entry.exposed_ms or 0.0 for entry in plan.checkpoint),
    )
    if abs(exposed_ms - waited_ms) > _SLACK * waited_ms + _SLACK_MS:
        yield f"predicted.exposed_offload_ms is {exposed_ms}, and that of the units adds up to {waited_ms:.6f}"


def _estimate_problems(name: str, estimate: Estimate | Blocker) -> Iterator[str]:
    categories = estimate.peak_by_category
    if categories and sum(categories.values()) != estimate.peak_bytes:
        yield (
            f"{name}.peak_by_category adds up to {sum(categories.values())}, "
            f"and {name}.peak_bytes is {estimate.peak_bytes}"
        )


def _checkpoint_problems(entry: Checkpoint, ops: int) -> Iterator[str]:
    if not entry.is_loss and entry.unit != entry.module and not entry.unit.startswith(f"{entry.module}#"):
        yield f"unit {entry.unit!r} is a call of the module {entry.module!r}"
    if not entry.begin < entry.end <= ops:
        yield f"unit {entry.unit!r} is ops {entry.begin} up to {entry.end} of a step of {ops}"
        return
    saved = [op.offset for op in entry.saved_ops]
    again = [op.offset for op in entry.recomputed_ops]
    for name, offsets in (("saved_ops", saved), ("recomputed_ops", again)):
        if any(first >= second for first, second in pairwise(offsets)):
            yield f"{name} of unit {entry.unit!r} are not in the order of their offsets"
    both = sorted(set(saved) & set(again))
    if both:
        yield f"op {both[0]} of unit {entry.unit!r} is in saved_ops and in recomputed_ops"
    away = [op.offset for op in entry.offload or ()]
    if any(first >= second for first, second in pairwise(away)):
        yield f"offload of unit {entry.unit!r} is not in the order of its offsets"
    gone = sorted(set(away) & {op for op, _ in entry.dropped})
    if gone:
        yield f"op {gone[0]} of unit {entry.unit!r} is offloaded (offload), and its result is dropped"
    if away and entry.is_loss:
        yield "the loss is offloaded (offload), and its backward comes next"
    last = max(entry.stop, *saved, *again, *away)
    if last >= entry.end - entry.begin:
        yield f"op {last} of unit {entry.unit!r} is beyond its {entry.end - entry.begin} ops"
    if again and again[-1] > entry.stop:
        yield f"op {again[-1]} of unit {entry.unit!r} runs again, and the second run stops at {entry.stop}"
    after = sum(op > entry.stop for op in saved)
    if isinstance(entry.numbers, tuple) and len(entry.numbers) != after:
        yield f"unit {entry.unit!r} saves {after} ops after its stop, and numbers {len(entry.numbers)} of them"
    listed = sum(op.bytes for op in entry.saved_ops)
    if entry.cached_bytes > listed + _ROUNDING_BYTES * len(saved):
        yield (
            f"unit {entry.unit!r} keeps {entry.cached_bytes} bytes (cached_bytes), and its saved_ops have only {listed}"
        )
    known = {*saved, *again}
    missing = next((op for op in range(entry.stop + 1) if op not in known), None)
    if missing is not None:
        yield f"op {missing} of unit {entry.unit!r} is neither in saved_ops nor in recomputed_ops"


def _offload_problems(entry: Checkpoint) -> Iterator[str]:
    if entry.stop < 0 and (entry.recomputed_ops or entry.dropped or not entry.offload):
        yield f"unit {entry.unit!r} has no second run (stop is {entry.stop}), and offloads nothing or drops something"
    if not entry.offload:
        if entry.offloaded_bytes or entry.exposed_ms:
            yield f"unit {entry.unit!r} offloads {entry.offloaded_bytes} bytes (offloaded_bytes), and no op's result"
        return
    saved = {op.offset for op in entry.saved_ops}
    wrong = next((op.offset for op in entry.offload if op.offset not in saved), None)
    if wrong is not None:
        yield f"op {wrong} of unit {entry.unit!r} is in offload, and not in saved_ops"
    if (entry.offloaded_bytes or 0) > entry.cached_bytes:
        yield (
            f"unit {entry.unit!r} offloads {entry.offloaded_bytes} bytes (offloaded_bytes), and holds only "
            f"{entry.cached_bytes} (cached_bytes)"
        )


def _overlap_problems(plan: Plan) -> Iterator[str]:
    for name in _twice(entry.unit for entry in plan.checkpoint):
        yield f"unit {name!r} is checkpointed twice"
    ordered = sorted(plan.checkpoint, key=lambda entry: entry.begin)
    for first, second in pairwise(ordered):
        if second.begin < first.end:
            yield f"units {first.unit!r} and {second.unit!r} have ops in common"
    if list(plan.checkpoint) != ordered:
        yield "checkpoint is not in the order in which its units run"


def _decision_problems(plan: Plan) -> Iterator[str]:
    if plan.chunked_loss and any(entry.is_loss for entry in plan.checkpoint):
        yield "the loss is computed in chunks (chunked_loss), and it is checkpointed as well"
    for kind in _twice(decision.kind for decision in plan.decisions or ()):
        yield f"decisions has {kind!r} twice"
    chunked = any(decision.kind == "loss" for decision in plan.decisions or ())
    if chunked and not plan.chunked_loss:
        yield "decisions has a chunked loss, and there is no chunked_loss that says how"
    divided = any(decision.kind == "micro_batch" for decision in plan.decisions or ())
    if divided != bool(plan.micro_batch):
        yield "decisions and micro_batch do not agree on whether the batch is divided"


def _shard_problems(plan: Plan) -> Iterator[str]:
    if plan.ddp is not None:
        if plan.shard is not None:
            yield "the model is both sharded (shard) and replicated (ddp)"
        if plan.ddp.ranks != plan.ranks:
            yield f"ddp.ranks is {plan.ddp.ranks}, and ranks is {plan.ranks}"
        return
    if plan.mesh:
        if math.prod(plan.mesh.values()) != plan.ranks or plan.shard is not None:
            yield f"the step was captured on the mesh {plan.mesh}, and the plan divides it over {plan.ranks} ranks"
        if plan.rank and not 0 < plan.rank < plan.ranks:
            yield f"the step was captured as rank {plan.rank} of {plan.ranks}"
        return
    if plan.rank:
        yield f"the step was captured as rank {plan.rank}, and there is no mesh"
    if plan.engine == "local" and plan.shard is not None:
        yield f"engine is 'local', which is for one rank, and shard.ranks is {plan.shard.ranks}"
    if plan.engine in ("fsdp2", "sharded") and plan.shard is None and plan.status != "infeasible":
        yield f"engine is {plan.engine!r}, and there is no shard that says how ranks divide the model"
    if plan.shard is None:
        if plan.ranks > 1 and plan.status != "infeasible":
            yield f"ranks is {plan.ranks}, and there is no shard that says how they divide the model"
        return
    if plan.ranks % plan.shard.ranks:
        yield f"shard.ranks is {plan.shard.ranks}, which does not divide {plan.ranks} ranks"
    if not plan.shard.units:
        yield "shard has no units"
    for name in _twice(unit.module for unit in plan.shard.units):
        yield f"module {name!r} is sharded twice"


def _twice(names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)
