"""What the figures of a report rest on: the device with its sources, how the step was captured, and versions."""

from __future__ import annotations

from typing import Any

import numpy as np

from memfit._version import __version__
from memfit.analysis import Report
from memfit.capture import Phase
from memfit.cost import Roofline
from memfit.hardware import HALF_BYTES, ByteRange, Device, Family, Link, Target
from memfit.plans import build_trace_record
from memfit.units import display_bytes, display_ms


def list_assumptions(report: Report) -> dict[str, Any]:
    """Return the conditions under which the answer holds, and the device's figures with their sources and dates."""
    return {"facts": _conditions(report), "figures": _figures(report.target.device), "notes": list(_notes(report))}


def _conditions(report: Report) -> list[list[str]]:
    trace, target, device = report.trace, report.target, report.target.device
    record = build_trace_record(trace)
    found = [
        ["device", f"{device.title} ({device.name}), {display_bytes(device.memory_total_bytes)}"],
        ["usable for tensors", _usable(target)],
        ["ranks", f"{target.ranks}, {target.ranks_per_node} to a node" if target.ranks > 1 else "1"],
    ]
    if target.ranks > 1:
        found.append(["link inside a node", _link(target.intra_node_link)])
        if target.nodes > 1:
            found.append(["link between nodes", _link(target.inter_node_link)])
    shapes = [
        f"{each.dtype} {'x'.join(map(str, each.shape)) or 'scalar'}"
        for each in record.inputs
        if each.shape is not None and each.dtype is not None
    ]
    plan = report.plan
    found += [
        ["batch", ", ".join(shapes) or "nothing that an op reads"],
        ["autocast", trace.autocast or "off"],
        ["optimizer", trace.optimizer or "none"],
        ["captured", f"{len(trace.ops):,} ops, {len(trace.storages):,} storages, {len(trace.calls):,} module calls"],
        ["allocator", _allocator(device)],
        ["memory", "replayed op by op from the captured step; tensors alive, as the allocator rounds them"],
        ["times of ops", _times(report)],
        ["versions", f"memfit {plan.memfit if plan is not None else __version__}, torch {trace.torch}"],
        ["fingerprint of the step", trace.fingerprint],
    ]
    return found


def _usable(target: Target) -> str:
    """Say what a rank may reserve, and what of its device is for other things (Note [What a rank has])."""
    memory = target.rank_memory
    words = [f"context {_expected(memory.context)}"]
    if memory.nccl.expected_bytes:
        words.append(f"NCCL {_expected(memory.nccl)}")
    if memory.margin_bytes:
        words.append(f"margin {memory.margin:.1%}, {display_bytes(memory.margin_bytes)}")
    return f"{display_bytes(memory.usable_bytes)}, less {'; '.join(words)}"


def _expected(found: ByteRange) -> str:
    """Say what is counted, and the range that it is the middle of; one that was given has none."""
    known = found.low_bytes == found.high_bytes
    return display_bytes(found.expected_bytes) + ("" if known else f" ({found})")


def _times(report: Report) -> str:
    """Say where the times come from; a report has them without their cost model, so they are compared with it."""
    given, roofline = report.runtime.op_ms, Roofline.of(report.target).op_ms(report.trace)
    ran = (given > 0) & [op.phase is not Phase.OPTIMIZER for op in report.trace.ops]  # shards take their part only
    if given.shape == roofline.shape and np.allclose(given[ran], roofline[ran], rtol=1e-6):
        return "roofline: an op takes what its FLOPs or bytes need at the device's rates"
    return "measured, or given: not those of the device's roofline"


def _allocator(device: Device) -> str:
    rounding = device.allocator.rounding_bytes
    how = f"storages rounded up to {rounding} bytes" if rounding > 1 else "storages as large as they are"
    return f"{device.allocator.name}, {how}"


def _notes(report: Report) -> tuple[str, ...]:
    notes = report.plan.notes if report.plan is not None else report.trace.notes
    plan = report.plan
    if plan is not None and plan.baseline.peak_bytes != report.baseline.peak_bytes:
        notes = (
            *notes,
            f"the step without the plan is drawn with the plan's optimizer step; as given it peaks at "
            f"{display_bytes(plan.baseline.peak_bytes)}",
        )
    return notes


def _link(link: Link) -> str:
    return f"{link.name}, {link.bandwidth_bytes_per_s / 1e9:,.0f} GB/s each way, {display_ms(link.latency_ms)} a hop"


def _figures(device: Device) -> list[dict[str, Any]]:
    return [
        {
            "key": each.key,
            "value": figure(device, each.key),
            "source": each.source,
            "publisher": each.publisher,
            "date": each.date,
            "seen": each.seen,
            "estimate": each.estimate,
            "reason": each.reason,
        }
        for each in device.provenance
    ]


def figure(device: Device, key: str) -> str:
    """Return the value of a figure that provenance names, with its unit; empty for one that is not shown."""
    section, _, name = key.partition(".")
    if section == "flops":
        rate = getattr(device.flops_per_s, name, None)
        return "" if rate is None else f"{rate / 1e12:,.1f} TFLOP/s"
    if section == "efficiency":
        return _efficiency(device, name)
    if section == "sustained":
        part = getattr(device.sustained, name, None)
        return "" if part is None else f"{part:.0%}"
    known: dict[str, object] = {
        "memory.total_bytes": display_bytes(device.memory_total_bytes),
        "memory.bandwidth_bytes_per_s": f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
        "links.ranks_per_node": device.ranks_per_node,
        "overheads.context_bytes": display_bytes(device.context_bytes),
        "overheads.context_low_bytes": display_bytes(device.context_low_bytes or 0),
        "overheads.context_high_bytes": display_bytes(device.context_high_bytes or 0),
        "overheads.blas_workspace_bytes": display_bytes(device.blas_workspace_bytes),
        "overheads.blaslt_workspace_bytes": display_bytes(device.blaslt_workspace_bytes),
        "compute.multiprocessors": device.multiprocessors,
        "compute.shared_memory_per_block_bytes": display_bytes(device.shared_memory_per_block_bytes or 0),
        "compute.capability": ".".join(map(str, device.compute_capability or ())),
        "compute.threads": device.threads,
        "compute.l2_cache_bytes": display_bytes(device.l2_cache_bytes or 0),
    }
    value = known.get(key)
    return "" if value is None else str(value)


def _efficiency(device: Device, name: str) -> str:
    *kind, family, factor = name.split(".")
    if family == "host":
        value = getattr(device.efficiency.host, factor, None)
    elif family in {each.value for each in Family}:
        item_bytes = HALF_BYTES if kind == ["half"] else 0
        value = getattr(device.efficiency.of(Family(family), item_bytes), factor, None)
    else:
        value = None
    if value is None:
        return ""
    return display_ms(value) if factor.endswith("_ms") else f"{value:.0%} of peak"
