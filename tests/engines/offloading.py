"""Plans that offload, written by hand: the planner's own are tested where it is."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

import memfit
from memfit.capture import Step, Trace
from memfit.engines import plan_of_model
from memfit.engines.offload_store import FileStore
from memfit.plans import Plan
from memfit.plans.build import build_checkpoint
from memfit.tradeoff import Role, TraceColumns, UnitColumns, find_units
from memfit.tradeoff.policy import build_policy


@dataclass(frozen=True)
class Offloading:
    """A plan under which units offload all that autograd alone holds of them, with the bytes of each."""

    plan: Plan
    trace: Trace
    bytes: dict[str, int]


def offload_units(
    step: Step, names: Sequence[str], nexts: dict[str, str | None] | None = None, plain: Plan | None = None
) -> Offloading:
    """A plan under which these units recompute nothing and offload everything that they may."""
    trace = memfit.trace(step, target="cpu")
    plan = plain or memfit.plan(trace, progress=False)
    columns = TraceColumns.of(trace, np.ones(len(trace.ops)))
    entries, bytes_of = [], {}
    for unit in find_units(trace):
        if unit.name not in names:
            continue
        unit_columns = UnitColumns.of(columns, unit)
        policy = build_policy(unit_columns, np.zeros(unit_columns.groups, bool))
        entry = build_checkpoint(trace, unit, policy)
        assert policy.stop == -1 and entry.saved_ops
        fields: dict[str, Any] = {"offload": entry.saved_ops}
        if nexts is not None:
            fields["offload_next"] = nexts[unit.name]
        entries.append(msgspec.structs.replace(entry, **fields))
        bytes_of[unit.name] = int(unit_columns.size[unit_columns.role == Role.DISCARDABLE].sum())
    assert len(entries) == len(names)
    plan = msgspec.structs.replace(plan, checkpoint=tuple(sorted(entries, key=lambda entry: entry.begin)))
    return Offloading(Plan.from_json(plan.to_json()), trace, bytes_of)


def offload_saved(plan: Plan) -> Plan:
    """The same plan, whose units offload all results that they save for a recompute or for backward."""
    entries = [
        entry
        if entry.is_loss
        else msgspec.structs.replace(
            entry,
            offload=tuple(
                op for op in entry.saved_ops if op.bytes and op.offset not in {op for op, _ in entry.dropped}
            ),
        )
        for entry in plan.checkpoint
    ]
    assert any(entry.offload for entry in entries)
    return msgspec.structs.replace(plan, checkpoint=tuple(entries))


def store_of(model: nn.Module) -> FileStore:
    """The store of a model that runs an offloading plan."""
    applied = plan_of_model(model)
    assert applied is not None and applied.offloads is not None
    store = applied.offloads.store
    assert isinstance(store, FileStore)
    return store


def bytes_left_away(model: nn.Module) -> int:
    """What is still taken in the file of a model when garbage is collected and the jobs under way have ended.

    A graph that is dropped while a thread reads for it gives its room back when that thread is done.
    """
    extents = store_of(model).extents
    gc.collect()
    deadline = time.monotonic() + 60
    while extents.used_bytes and time.monotonic() < deadline:
        time.sleep(0.001)
    return extents.used_bytes


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all gradients."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
