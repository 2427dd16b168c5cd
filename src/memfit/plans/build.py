"""Build the plan document from a solution, and policies back from a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from memfit._version import __version__
from memfit.capture import NO_INDEX, ChunkedLoss, Implementation, ModuleCall, Phase, Trace
from memfit.hardware import Target
from memfit.plans.document import Plan
from memfit.plans.record import (
    Blocker,
    Checkpoint,
    ChunkedLossRecord,
    DdpPlan,
    Decision,
    Engine,
    Estimate,
    MicroBatchRecord,
    OffloadLinkRecord,
    Prediction,
    RecomputedCollective,
    ShardPlan,
    Status,
    TargetRecord,
    UnitOp,
)
from memfit.plans.trace_record import build_trace_record
from memfit.tradeoff import LOSS, OffloadWindow, Policy, Unit, find_units, find_windows

_DIGITS = 6
"""Milliseconds are kept to the nanosecond: sums in another order are then the same text."""

_E = TypeVar("_E", bound=Estimate)


def build_plan(
    trace: Trace,
    *,
    target: Target,
    budget_bytes: int,
    status: Status,
    gap: float | None,
    bound_ms: float | None,
    minimum_budget_bytes: int | None,
    checkpoint: Iterable[tuple[Unit, Policy]],
    baseline: Estimate,
    predicted: Prediction | None,
    blocker: Blocker | None = None,
    shard: ShardPlan | None = None,
    ddp: DdpPlan | None = None,
    engine: Engine | None = None,
    optimizer: Implementation | None = None,
    notes: Sequence[str] = (),
    chunked: ChunkedLoss | None = None,
    decisions: Sequence[Decision] | None = None,
    price_ms_per_gib: float | None = None,
    micro_batch: MicroBatchRecord | None = None,
) -> Plan:
    """Build the plan, validated as if it came from a file; policies that discard nothing are left out."""
    chosen = sorted((each for each in checkpoint if not each[1].changes_nothing), key=lambda each: each[0].begin)
    windows: dict[str, OffloadWindow] = {}
    if any(policy.offload for _, policy in chosen):
        windows = find_windows(trace, np.zeros(len(trace.ops)), find_units(trace))
    link = target.device.offload_link if windows else None
    plan = Plan(
        memfit=__version__,
        fingerprint=trace.fingerprint,
        target=_target(target),
        ranks=target.ranks,
        budget_bytes=int(budget_bytes),
        status=status,
        gap=_rounded(gap),
        bound_ms=_rounded(bound_ms),
        baseline=_rounded_estimate(baseline),
        predicted=None if predicted is None else _rounded_estimate(predicted),
        minimum_budget_bytes=None if minimum_budget_bytes is None else int(minimum_budget_bytes),
        blocker=blocker,
        checkpoint=tuple(build_checkpoint(trace, *each, windows.get(each[0].name)) for each in chosen),
        shard=shard,
        ddp=ddp,
        engine=engine,
        mesh=trace.mesh or msgspec.UNSET,
        rank=trace.rank if trace.rank or trace.pipelines else msgspec.UNSET,
        wrappers=trace.wrappers if trace.mesh else msgspec.UNSET,
        collectives=_recomputed_collectives(trace, chosen) if trace.mesh else msgspec.UNSET,
        offload_link=msgspec.UNSET if link is None else OffloadLinkRecord(**dataclasses.asdict(link)),
        chunked_loss=msgspec.UNSET if chunked is None else ChunkedLossRecord(**dataclasses.asdict(chunked)),
        decisions=msgspec.UNSET if decisions is None else tuple(map(_rounded_decision, decisions)),
        micro_batch=msgspec.UNSET if micro_batch is None else micro_batch,
        price_ms_per_gib=msgspec.UNSET if price_ms_per_gib is None else round(price_ms_per_gib, _DIGITS),
        optimizer=optimizer,
        notes=tuple(notes),
        trace=build_trace_record(trace),
    )
    return Plan.from_json(plan.to_json(), where="the plan")


def _recomputed_collectives(
    trace: Trace, chosen: Sequence[tuple[Unit, Policy]]
) -> tuple[RecomputedCollective, ...] | msgspec.UnsetType:
    """Return the collectives among the ops that run again; a plan without any does not mention them."""
    kinds = {call.op: call for call in trace.collectives}
    found = [
        RecomputedCollective(
            unit=unit.name, offset=offset, kind=kinds[unit.begin + offset].kind, dims=kinds[unit.begin + offset].dims
        )
        for unit, policy in chosen
        for offset in sorted(policy.recomputed)
        if unit.begin + offset in kinds
    ]
    return tuple(found) or msgspec.UNSET


def build_checkpoint(trace: Trace, unit: Unit, policy: Policy, window: OffloadWindow | None = None) -> Checkpoint:
    """Build the entry of a unit that is checkpointed with this policy; `window` is that of a unit that offloads."""
    held = policy.discarded_bytes + policy.cached_bytes
    after = _last_call_before(trace, unit) if unit.call == NO_INDEX else None
    return Checkpoint(
        unit=unit.name,
        module=unit.module,
        call=_call_number(trace, unit),
        calls=_calls(trace, unit.module),
        kind=unit.kind,
        begin=unit.begin,
        end=unit.end,
        stop=policy.stop,
        discard_ratio=round(policy.discarded_bytes / held, _DIGITS) if held else 0.0,
        discarded_bytes=policy.discarded_bytes,
        cached_bytes=policy.cached_bytes,
        recompute_ms=round(float(policy.recompute_ms), _DIGITS),
        recompute_peak_bytes=policy.recompute_peak_bytes,
        saved_ops=_named(trace, unit, _saved_offsets(trace, unit, policy)),
        recomputed_ops=_named(trace, unit, policy.recomputed),
        dropped=policy.dropped,
        after=None if after is None else after.module,
        after_call=0 if after is None else _number_in_model(trace, after),
        **({} if window is None or not policy.offload else _offload_fields(trace, unit, policy, window)),
        **_numbers(trace, unit, policy),
    )


def _saved_offsets(trace: Trace, unit: Unit, policy: Policy) -> list[int]:
    """Return the ops whose results a policy holds, and those after its `stop` that write to these in place.

    Who runs the policy must know them. Under a dispatch mode torch's composites do not write in place, a product's bias
    above all, and what is held is then another storage than the product's; and a result that is saved must not be
    written to twice.
    """
    held = {*policy.saved, *policy.offload}
    made = {ref.storage for op in held for ref in trace.ops[unit.begin + op].outputs} - {NO_INDEX}
    for index in range(unit.begin + policy.stop + 1, unit.end):
        if not made.isdisjoint(trace.ops[index].mutates):
            held.add(index - unit.begin)
    return sorted(held)


def _numbers(trace: Trace, unit: Unit, policy: Policy) -> dict[str, Any]:
    """Number the ops after `stop` among those of their name: the document has not all of these."""
    after = [op for op in _saved_offsets(trace, unit, policy) if op > policy.stop]
    if policy.stop < 0 or not after:
        return {}
    names = [op.name for op in trace.ops[unit.begin : unit.end]]
    return {"numbers": tuple(names[:op].count(names[op]) for op in after)}


def _offload_fields(trace: Trace, unit: Unit, policy: Policy, window: OffloadWindow) -> dict[str, Any]:
    return {
        "offload": _named(trace, unit, policy.offload),
        "offload_next": window.next.module,
        "offloaded_bytes": policy.offloaded_bytes,
        "exposed_ms": round(float(policy.exposed_ms), _DIGITS),
    }


def _calls(trace: Trace, module: str) -> int:
    """Return how often a module runs in the step's forward, under whichever of its paths."""
    return sum(_is_counted(trace, call, module) for call in trace.calls if call.phase is Phase.FORWARD)


def _is_counted(trace: Trace, call: ModuleCall, path: str) -> bool:
    """Return whether a call is one of this module that engines count: they see none with gradients disabled."""
    if trace.instance_of(call.module) != trace.instance_of(path):
        return False
    return call.index not in trace.no_grad_calls.get(call.module, ())


def _last_call_before(trace: Trace, region: Unit) -> ModuleCall | None:
    """Return the call inside the model at whose end a region begins; None for a region after the model.

    It is the model's own call when nothing inside the model runs before the region.
    """
    model = next(
        (
            call
            for call in trace.calls
            if call.parent == NO_INDEX and call.begin <= region.begin and region.end <= call.end
        ),
        None,
    )
    if model is None:
        return None
    before = [
        call
        for call in trace.calls
        if call is not model and model.begin <= call.begin and call.end == region.begin and "<" not in call.module
    ]
    return before[0] if before else model


def _number_in_model(trace: Trace, call: ModuleCall) -> int:
    """Return how many calls of the same module came before this one in the same run of the model.

    Those without gradients too: the engine wraps the module's forward here, and sees them all.
    """
    begin = max((each.begin for each in trace.calls if each.parent == NO_INDEX and each.begin <= call.begin), default=0)
    same = trace.instance_of(call.module)
    return sum(begin <= each.begin < call.begin and trace.instance_of(each.module) == same for each in trace.calls)


def _named(trace: Trace, unit: Unit, offsets: Sequence[int]) -> tuple[UnitOp, ...]:
    return tuple(
        UnitOp(
            offset=offset,
            name=trace.ops[unit.begin + offset].name,
            bytes=_result_bytes(trace, unit.begin + offset),
        )
        for offset in sorted(offsets)
    )


def _result_bytes(trace: Trace, op: int) -> int:
    """Return what an op allocates for its results: nothing when they are views, or when it writes to what is there."""
    made = {ref.storage for ref in trace.ops[op].outputs if ref.storage != NO_INDEX}
    return sum(trace.storages[each].bytes for each in made if trace.storages[each].alloc_at == op)


def _call_number(trace: Trace, unit: Unit) -> int:
    """Return which call of its module a unit is, among those that engines count; under all paths of the module."""
    if unit.call == NO_INDEX:
        suffix = unit.name[len(LOSS) :]
        return int(suffix[1:]) if suffix else 0
    earlier = (call for call in trace.calls[: unit.call] if call.phase is Phase.FORWARD)
    return sum(_is_counted(trace, call, unit.module) for call in earlier)


def _target(target: Target) -> TargetRecord:
    memory = target.rank_memory
    return TargetRecord(
        device=target.device.name,
        title=target.device.title,
        memory_total_bytes=target.device.memory_total_bytes,
        ranks_per_node=target.ranks_per_node,
        intra_node_link=target.intra_node_link.name,
        inter_node_link=target.inter_node_link.name,
        context_bytes=memory.context.expected_bytes,
        nccl_bytes=memory.nccl.expected_bytes,
        margin_bytes=memory.margin_bytes,
        margin=memory.margin,
        expandable_segments=target.device.allocator.expandable_segments,
        host_memory_bytes=msgspec.UNSET if target.host_memory_bytes is None else target.host_memory_bytes,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), _DIGITS)


def _rounded_decision(decision: Decision) -> Decision:
    names = ("costs_ms", "ms_per_gib", "without_ms")
    found = {name: getattr(decision, name) for name in names}
    rounded = {name: round(float(each), _DIGITS) for name, each in found.items() if each not in (None, msgspec.UNSET)}
    return msgspec.structs.replace(decision, **rounded)


def _rounded_estimate(estimate: _E) -> _E:
    names = [name for name in estimate.__struct_fields__ if name.endswith("_ms")]
    names = [name for name in names if getattr(estimate, name) is not msgspec.UNSET]
    return msgspec.structs.replace(estimate, **{name: _rounded(getattr(estimate, name)) for name in names})


def build_policy(entry: Checkpoint) -> Policy:
    """Build the policy that a document has for a unit."""
    return Policy(
        saved=tuple(op.offset for op in entry.saved_ops),
        recomputed=tuple(op.offset for op in entry.recomputed_ops),
        dropped=entry.dropped,
        stop=entry.stop,
        discarded_bytes=entry.discarded_bytes,
        cached_bytes=entry.cached_bytes,
        recompute_ms=entry.recompute_ms,
        recompute_peak_bytes=entry.recompute_peak_bytes,
        offload=tuple(op.offset for op in entry.offload or ()),
        offloaded_bytes=entry.offloaded_bytes or 0,
        exposed_ms=entry.exposed_ms or 0.0,
    )
