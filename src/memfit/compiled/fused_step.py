"""Memory and time of the two graphs that a joint graph is split into, as Inductor fuses them.

Note [Fusion]: a matrix product, a convolution, attention and whatever else Inductor has no loop for is a kernel of its
own, and its result is a buffer. Everything between two of them that depends on the same ones becomes one kernel, in
which values have no memory; a value is a buffer only where a kernel of its own, a later kernel, the caller or the
backward reads it. A kernel writes its result into an input of the same size that nobody reads afterwards. The backward
computes a value again just before the first op that needs it, as torch orders it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from memfit.compiled.joint_graph import JointGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """One graph as it runs: bytes allocated while each value of `order` is computed, `given` ones included.

    `buffers` are the values that have memory, `last_use` the place in `order` after which each is freed.
    """

    order: tuple[int, ...]
    levels: tuple[int, ...]
    buffers: frozenset[int]
    last_use: dict[int, int]
    peak_bytes: int
    end_bytes: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedStep:
    """What a saved set costs: bytes above what is there before the step, and milliseconds of both graphs."""

    forward: GraphRun
    backward: GraphRun
    saved_bytes: int
    ms: float

    @property
    def held_bytes(self) -> int:
        """What the forward leaves: saved values and outputs."""
        return self.forward.end_bytes


def forward_order(graph: JointGraph, saved: Collection[int]) -> list[int]:
    """Return the values that the forward computes, in order."""
    return sorted(_ancestors(graph, {*graph.forward_outputs, *saved}, set()))


def backward_order(graph: JointGraph, saved: Collection[int]) -> list[int]:
    """Return the values that the backward computes, in order; what is not saved comes before its first use."""
    needed = _ancestors(graph, graph.backward_outputs, {*saved, *graph.tangents})
    done: set[int] = {*saved, *graph.tangents}
    order: list[int] = []
    for value in sorted(needed):
        if graph.is_backward[value] or value in graph.backward_outputs:
            new = sorted(_ancestors(graph, (value,), done))
            done.update(new)
            order += new
    return order


def run_step(graph: JointGraph, saved: Collection[int]) -> FusedStep:
    """Estimate memory and time of both graphs for a saved set."""
    forward = run_graph(graph, forward_order(graph, saved), given=(), kept={*graph.forward_outputs, *saved})
    backward = run_graph(
        graph, backward_order(graph, saved), given={*saved, *graph.tangents}, kept=graph.backward_outputs
    )
    return FusedStep(
        forward=forward,
        backward=backward,
        saved_bytes=sum(graph.value_bytes[value] for value in saved),
        ms=forward.ms + backward.ms,
    )


def run_graph(graph: JointGraph, order: Sequence[int], *, given: Collection[int], kept: Collection[int]) -> GraphRun:
    """Run one graph: `given` values are there and freed after their last use, `kept` ones stay (Note [Fusion])."""
    place = {value: index for index, value in enumerate(order)}
    readers: dict[int, list[int]] = defaultdict(list)
    depth: dict[int, int] = {}
    for value in order:
        above = 0
        for used in graph.inputs[value]:
            readers[used].append(value)
            if used in depth:
                above = max(above, depth[used] + graph.is_extern[used])
        depth[value] = above + graph.is_extern[value]
    held = set(kept)
    buffers = {value for value in order if _is_buffer(graph, value, readers[value], depth, held)}
    runs_at: dict[int, int] = {}
    for value in reversed(order):
        own = place[value]
        runs_at[value] = own if value in buffers else max((runs_at[each] for each in readers[value]), default=own)
    last_use = {
        value: max((runs_at[each] for each in readers[value]), default=place.get(value, -1))
        for value in (*given, *buffers)
    }
    dying: dict[int, list[int]] = defaultdict(list)
    for value, index in last_use.items():
        if value not in held:
            dying[index].append(value)
    level = sum(graph.value_bytes[value] for value in given)
    peak, levels, ms = level, [], 0.0
    for index, value in enumerate(order):
        ms += graph.op_ms[value]
        freed = dying[index]
        high = level
        if value in buffers:
            size = graph.value_bytes[value]
            reused = not graph.is_extern[value] and any(graph.value_bytes[each] == size for each in freed)
            high += 0 if reused else size
            level += size
        peak = max(peak, high)
        levels.append(high)
        level -= sum(graph.value_bytes[each] for each in freed)
    ms += graph.ms_per_byte * _traffic(graph, order, buffers | set(given), depth)
    return GraphRun(
        order=tuple(order),
        levels=tuple(levels),
        buffers=frozenset(buffers),
        last_use=last_use,
        peak_bytes=peak,
        end_bytes=level,
        ms=ms,
    )


def _is_buffer(graph: JointGraph, value: int, readers: Iterable[int], depth: dict[int, int], kept: set[int]) -> bool:
    if graph.is_extern[value] or value in kept:
        return True
    return any(graph.is_extern[each] or depth[each] != depth[value] for each in readers)


def _traffic(graph: JointGraph, order: Sequence[int], buffers: set[int], depth: dict[int, int]) -> int:
    """Return the bytes that fused kernels read and write; kernels of their own are timed with theirs."""
    moved = 0
    read: set[tuple[int, int]] = set()
    for value in order:
        if graph.is_extern[value]:
            continue
        if value in buffers:
            moved += graph.value_bytes[value]
        for used in graph.inputs[value]:
            if used in buffers and depth.get(used) != depth[value]:
                read.add((used, depth[value]))
    return moved + sum(graph.value_bytes[used] for used, _ in read)


def _ancestors(graph: JointGraph, wanted: Iterable[int], stop: set[int]) -> set[int]:
    """Return these values and all that they are computed of, but not beyond what is there already."""
    found: set[int] = set()
    stack = [value for value in wanted if value not in stop]
    while stack:
        value = stack.pop()
        if value in found:
            continue
        found.add(value)
        stack += [used for used in graph.inputs[value] if used not in stop and used not in found]
    return found
