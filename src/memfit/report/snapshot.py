"""A step as a memory snapshot, which `torch.cuda._memory_viz` and pytorch.org/memory_viz open.

Note [Which step]: on a device with a caching allocator, a process runs the step until it reserves nothing more, as for
the plan's reserved bytes (Note [Steady state] of the events), and every address is the simulated allocator's. The
snapshot has the step of these that reaches the highest point, the last of them when several do, after what was there
when it began. Sizes of events are those of blocks, so that they add up to what torch calls allocated. Without a caching
allocator every allocation is a segment of its own, at an address that is used once.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit._version import __version__
from memfit.analysis import Report
from memfit.capture import BEFORE_STEP, NO_INDEX, Category, short
from memfit.files import write_whole
from memfit.hardware import Device
from memfit.memory import (
    BETWEEN,
    FREE,
    Allocation,
    AllocationTable,
    Block,
    BlockPool,
    BlockSnapshot,
    BlockState,
    CachingAllocator,
    ExpandableSegment,
    ProcessEvents,
    Row,
    SegmentSnapshot,
    Timeline,
    allocator_config,
)
from memfit.paths import MODEL_LABEL, module_label

_PROTOCOL = 4
"""The newest that memory_viz reads."""

_SOURCE = re.compile(r"(?P<file>.*):(?P<line>\d+)(?: (?P<function>.*))?")
_FIRST_ADDRESS = 1 << 44
_NOTHING = "unknown"
"""A category that memory_viz fails without, when there are categories."""

Frames = list[dict[str, Any]]


def write_snapshot(report: Report, path: str | os.PathLike[str], *, baseline: bool = False) -> Path:
    """Write the snapshot of the step under the plan; without it when told, and where no plan fits or there is none.

    The same report is the same bytes.
    """
    timeline = report.baseline if baseline or report.planned is None else report.planned
    recorded = _record(timeline.allocations, report.target.device)
    document = _Snapshot(timeline).document(recorded)
    document["allocator_settings"]["step"] = "without a plan" if timeline is report.baseline else "with the plan"
    return write_whole(path, pickle.dumps(document, protocol=_PROTOCOL), "snapshot.pickle")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Act:
    """Something that an allocator did at an instant; `key` is None for segments."""

    action: str
    instant: int
    address: int
    size_bytes: int
    stream: int = 0
    key: int | None = None


@dataclass(slots=True)
class _Recorded:
    """What was there when a step began, what it did, and what it left."""

    before: tuple[SegmentSnapshot, ...] = ()
    acts: list[_Act] = field(default_factory=list)
    after: tuple[SegmentSnapshot, ...] = ()


def _record(table: AllocationTable, device: Device) -> _Recorded:
    """Record the step to show (Note [Which step])."""
    replay = ProcessEvents(table)
    if not device.allocator.caches:
        apart = _Apart(device.allocator.rounding_bytes)
        apart.run(replay.alone())
        return apart.recorded
    allocator = _RecordingAllocator(device)
    best, highest = _Recorded(), 0
    for rows in replay.steps():
        reserved = allocator.reserved_bytes
        found = allocator.run(rows, replay)
        if allocator.peak_allocated_bytes >= highest:
            best, highest = found, allocator.peak_allocated_bytes
        if allocator.reserved_bytes == reserved:
            break
    return best


class _RecordingAllocator(CachingAllocator):
    """The device's allocator, which records the address of every block."""

    def __init__(self, device: Device) -> None:
        super().__init__(allocator_config(device))
        self._acts: list[_Act] = []
        self._instant = NO_INDEX

    def run(self, rows: Iterable[Row], process: ProcessEvents) -> _Recorded:
        """Run a step; the peaks are then those of the step."""
        before, self._acts = self.segments(), []
        self.reset_peaks()
        for self._instant, key, requested_bytes in rows:
            if requested_bytes == FREE:
                self.free(key)
            else:
                self.malloc(key, requested_bytes, process.streams[key])
        return _Recorded(before=before, acts=self._acts, after=self.segments())

    def free(self, key: int) -> None:
        block = self._live.get(key)
        if block is not None:
            self._note("free", block, block.size_bytes, key)
        super().free(key)

    def _alloc_found_block(self, key: int, requested_bytes: int, block: Block, size_bytes: int) -> None:
        super()._alloc_found_block(key, requested_bytes, block, size_bytes)
        given = self._live[key]
        assert given is not None  # it was just made
        self._note("alloc", given, given.size_bytes, key)

    def _alloc_block(self, pool: BlockPool, size_bytes: int) -> Block | None:
        block = super()._alloc_block(pool, size_bytes)
        if block is not None and block.segment is None:
            self._note("segment_alloc", block, block.size_bytes)
        return block

    def _map_block(self, block: Block, size_bytes: int) -> bool:
        address, reserved = block.address, self.reserved_bytes
        mapped = super()._map_block(block, size_bytes)
        if mapped:
            self._note("segment_map", block, self.reserved_bytes - reserved, address=address)
        return mapped

    def _release_block(self, block: Block) -> None:
        self._note("segment_free", block, block.size_bytes)
        super()._release_block(block)

    def _unmap_block(self, block: Block, segment: ExpandableSegment) -> None:
        address, size_bytes = segment.whole_pages(block.address, block.size_bytes)
        if size_bytes:
            self._note("segment_unmap", block, size_bytes, address=address)
        super()._unmap_block(block, segment)

    def _note(
        self, action: str, block: Block, size_bytes: int, key: int | None = None, *, address: int | None = None
    ) -> None:
        address = block.address if address is None else address
        act = _Act(
            action=action,
            instant=self._instant,
            address=address,
            size_bytes=size_bytes,
            stream=block.pool.stream,
            key=key,
        )
        self._acts.append(act)


class _Apart:
    """An allocator without a cache: every allocation is a segment of its own, freed at once."""

    def __init__(self, rounding_bytes: int) -> None:
        self.recorded = _Recorded()
        self._rounding_bytes = rounding_bytes
        self._next_address = _FIRST_ADDRESS
        self._live: dict[int, BlockSnapshot] = {}

    def run(self, rows: Iterable[Row]) -> None:
        """Run a step."""
        for instant, key, requested_bytes in rows:
            if requested_bytes == FREE:
                block = self._live.pop(key, None)
                if block is not None:
                    self._note(instant, block, ("free", key), ("segment_free", None))
            elif requested_bytes:
                block = self._live[key] = self._made(key, requested_bytes)
                self._note(instant, block, ("segment_alloc", None), ("alloc", key))
        self.recorded.after = tuple(
            SegmentSnapshot(
                address=block.address,
                size_bytes=block.size_bytes,
                is_large=True,
                is_expandable=False,
                blocks=(block,),
            )
            for block in sorted(self._live.values(), key=lambda block: block.address)
        )

    def _made(self, key: int, requested_bytes: int) -> BlockSnapshot:
        size_bytes = -(-requested_bytes // self._rounding_bytes) * self._rounding_bytes
        address = self._next_address
        self._next_address += size_bytes
        return BlockSnapshot(
            address=address, size_bytes=size_bytes, requested_bytes=requested_bytes, state=BlockState.ACTIVE, key=key
        )

    def _note(self, instant: int, block: BlockSnapshot, *actions: tuple[str, int | None]) -> None:
        self.recorded.acts += [
            _Act(action=action, instant=instant, address=block.address, size_bytes=block.size_bytes, key=key)
            for action, key in actions
        ]


class _Snapshot:
    """The document that memory_viz reads, with what is known of every allocation as its frames."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.trace = timeline, timeline.trace
        self._made: dict[int, tuple[Frames, str]] = {}
        self._freed: dict[int, Frames] = {}
        self._nowhere: Frames = []

    def document(self, recorded: _Recorded) -> dict[str, Any]:
        """Return the whole document."""
        return {
            "segments": [self._segment(segment) for segment in recorded.after],
            "device_traces": [self._events(recorded)],
            "external_annotations": [],
            "allocator_settings": {"memfit": __version__, "fingerprint": self.trace.fingerprint},
        }

    def _events(self, recorded: _Recorded) -> list[dict[str, Any]]:
        events = []
        for segment in recorded.before:
            action = "segment_map" if segment.is_expandable else "segment_alloc"
            events.append(self._event(action, segment.address, segment.size_bytes, self._nowhere, segment.stream))
        held = [(block, each.stream) for each in recorded.before for block in each.blocks if block.key is not None]
        for block, stream in sorted(held, key=lambda each: each[0].key or 0):
            events.append(self._alloc(block.address, block.size_bytes, block.key or 0, stream))
        for act in recorded.acts:
            if act.action == "alloc" and act.key is not None:
                events.append(self._alloc(act.address, act.size_bytes, act.key, act.stream))
            elif act.action == "free":
                frames = self._frames_of_free(act.instant)
                for action in ("free_requested", "free_completed"):
                    events.append(self._event(action, act.address, act.size_bytes, frames, act.stream))
            else:
                frames = self._frames_of_free(act.instant)
                events.append(self._event(act.action, act.address, act.size_bytes, frames, act.stream))
        events.append(self._event("snapshot", 0, 0, self._nowhere, 0) | {"category": _NOTHING})
        return events

    def _event(self, action: str, address: int, size_bytes: int, frames: Frames, stream: int) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size_bytes, "stream": stream, "frames": frames}

    def _alloc(self, address: int, size_bytes: int, key: int, stream: int) -> dict[str, Any]:
        frames, category = self._frames_of_alloc(key)
        return self._event("alloc", address, size_bytes, frames, stream) | {"category": category}

    def _segment(self, segment: SegmentSnapshot) -> dict[str, Any]:
        held = [block for block in segment.blocks if block.key is not None]
        allocated = sum(block.size_bytes for block in held)
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(block.requested_bytes for block in held),
            "stream": segment.stream,
            "segment_type": "large" if segment.is_large else "small",
            "segment_pool_id": (0, 0),
            "is_expandable": segment.is_expandable,
            "frames": self._nowhere,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": block.state.value,
                    "frames": self._nowhere if block.key is None else self._frames_of_alloc(block.key)[0],
                }
                for block in segment.blocks
            ],
        }

    def _frames_of_alloc(self, key: int) -> tuple[Frames, str]:
        """Return the user's line, then the module with the category and what it is; and the category."""
        if key not in self._made:
            workspace = key - len(self.timeline.allocations.alloc_at)
            if workspace >= 0:
                found = self._frames(workspace, Category.TEMPORARY.value, "workspace of ")
                self._made[key] = found, Category.TEMPORARY.value
            else:
                self._made[key] = self._frames_of_allocation(self.timeline.allocation(key))
        return self._made[key]

    def _frames_of_allocation(self, found: Allocation) -> tuple[Frames, str]:
        category = found.category.value
        if found.alloc_at == BEFORE_STEP or found.storage == NO_INDEX:
            what = f"{category} {found.name}".rstrip()
            return [_frame(module_label(found.module), 0, what)], category
        made = self._frames(found.alloc_at, category)
        if found.remade is not None:
            made = [*made, _frame(module_label(found.remade), 0, "second run")]
        return made, category

    def _frames_of_free(self, instant: int) -> Frames:
        if instant not in self._freed:
            self._freed[instant] = self._frames(instant, "after")
        return self._freed[instant]

    def _frames(self, instant: int, what: str, of: str = "") -> Frames:
        """Return the user's line of the op at an instant, and the op in its module."""
        if not 0 <= instant < len(self.timeline.op):
            return self._nowhere
        op = int(self.timeline.op[instant])
        if op == len(self.trace.ops) or int(self.timeline.run[instant]) == BETWEEN:
            return [_frame(MODEL_LABEL, op, f"{what} communication" if op < len(self.trace.ops) else "end of the step")]
        name = short(self.trace.ops[op].name)
        module = self.timeline.module_of(instant)
        source = _SOURCE.fullmatch(self.trace.source_of(op))
        lines = [] if source is None else [_frame(source["file"], int(source["line"]), source["function"] or "")]
        return [*lines, _frame(module_label(module), op, f"{what} {of}{name}")]


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}
