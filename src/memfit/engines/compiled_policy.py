"""The policy of a unit as a plan gives it, and compiled for one kind of input.

A plan names ops by their place in the unit. Running a unit op by op in Python would cost more than most policies win,
so `PolicyCompiler` looks at every op of one run and compiles the policy into what later runs need: which of the
tensors that autograd packs are dropped, and in which parts of the unit (Note [Gaps]) saved results are kept or answered
for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.engines.tensors import StridedView
from memfit.plans import Checkpoint, Plan
from memfit.torch_private.dispatch import DispatchMode
from memfit.torch_private.distributed_tensors import only_waits

_DETACH = "aten.detach.default"
_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """The policy of one call of a unit, as a plan gives it.

    `names` are those of the ops that the plan knows, by offset. `saved` ops up to `stop` are not recomputed. `absent`
    ops do not run here, see `absent_casts`; None where all of them do. Results of `offload` ops leave for the host
    until the backward (offload.py); `offload_next` is the path of the module that they wait for, None for none.
    """

    unit: str
    module: str
    call: int
    kind: str
    ops: int
    names: dict[int, str]
    saved: frozenset[int]
    dropped: frozenset[tuple[int, int]]
    stop: int
    absent: frozenset[int] | None = None
    offload: frozenset[int] = frozenset()
    offload_next: str | None = None

    @classmethod
    def of(cls, entry: Checkpoint, absent: frozenset[int] | None = None, offload_next: str | None = None) -> RunPolicy:
        """Return the policy of an entry of a plan; `offload_next` is for entries that do not say it themselves."""
        offload = tuple(entry.offload or ())
        known = (*entry.saved_ops, *entry.recomputed_ops, *offload)
        if absent is not None:  # what is absent after `stop` is not in the document
            known = tuple(op for op in known if op.offset <= entry.stop)
        if isinstance(entry.offload_next, str | None):
            offload_next = entry.offload_next
        return cls(
            unit=entry.unit,
            module=entry.module,
            call=entry.call,
            kind=entry.kind,
            ops=entry.end - entry.begin,
            names={op.offset: op.name for op in known},
            saved=frozenset(op.offset for op in entry.saved_ops if op.offset <= entry.stop),
            dropped=frozenset(entry.dropped),
            stop=entry.stop,
            absent=absent,
            offload=frozenset(op.offset for op in offload),
            offload_next=offload_next,
        )

    @property
    def content(self) -> tuple[object, ...]:
        """What is done, whichever call it is for."""
        return self.ops, tuple(sorted(self.names.items())), self.saved, self.dropped, self.stop, self.offload


def absent_casts(plan: Plan, entry: Checkpoint) -> frozenset[int] | None:
    """Return the offsets of autocast's casts of parameters, where sharding gathers these in autocast's dtype already.

    The step was captured with the casts, the prediction is without them (sharding/gradients.py, Note [Casts]). A plan
    does not say what an op casts: they are the saved casts that are as large as a parameter of the unit. None where
    nothing is gathered in another dtype than the captured one, or it was captured without the casts.
    """
    gathered = None if plan.shard is None else plan.shard.param_dtype
    if gathered is None or gathered != plan.trace.autocast or plan.trace.cast:
        return None
    item_bytes = getattr(torch, gathered).itemsize
    inside = f"{entry.module}." if entry.module else ""
    own = (each for each in plan.trace.parameters if any(name.startswith(inside) for name in each.names))
    sizes = {math.prod(parameter.shape) * item_bytes for parameter in own}
    return frozenset(op.offset for op in entry.saved_ops if op.name == str(_TO_COPY) and op.bytes in sizes)


def same_op(name: str, planned: str | None) -> bool:
    """Return whether an op is the one that the plan knows, if it knows it.

    Under a dispatch mode torch's own composites avoid writing in place: `add` is then what is `add_` without one.
    """
    return planned is None or name == planned or name == planned.replace("_.", ".")


def casts_parameter(func: Any, args: Any) -> bool:
    """Return whether an op casts a parameter."""
    return func is _TO_COPY and isinstance(args[0], nn.Parameter)


def not_counted(func: Any, planned: str | None) -> bool:
    """Return whether an op is none of the step's.

    Profiler marks, detachments that a capture does not see, and waiting for the result of a collective.
    """
    if func.namespace == "profiler" or only_waits(func):
        return True
    return str(func) == _DETACH and planned is not None and planned != _DETACH


# -- The call tree of a unit -----------------------------------------------------------------------------------------
#
# Note [Gaps]: a run of a module is cut by the calls of the modules inside it into gaps, numbered from 0. A gap in
# which nothing is to be kept or answered runs without any dispatch mode. Modules are followed by an entry `forward`
# in their own dictionary that is there for the time of a run only, and only where a gap is looked at.


MakeMode = Callable[[Any], DispatchMode | None]
"""Returns the dispatch mode of a gap, None where it needs none."""


@dataclass(slots=True)
class CallNode:
    """One call of a module during a run. `gaps` holds what is known of each gap, None where there is nothing."""

    module: weakref.ref[nn.Module]
    children: list[CallNode] = field(default_factory=list)
    gaps: list[Any] = field(default_factory=lambda: [None])


@dataclass(frozen=True, slots=True)
class TrackedCalls:
    """The calls with a gap in or inside them that is looked at, and the modules that they call."""

    open: frozenset[int]
    """By `id` of the node; the root holds all of them."""
    followed: tuple[weakref.ref[nn.Module], ...]

    @classmethod
    def through(cls, root: CallNode, looked_at: Callable[[Any], bool]) -> TrackedCalls:
        """Return the calls that contain a gap for which a condition holds."""
        open_visits: set[int] = set()
        followed: dict[weakref.ref[nn.Module], None] = {}

        def enter(node: CallNode) -> bool:
            inside = [enter(child) for child in node.children]
            found = any(inside) or any(gap is not None and looked_at(gap) for gap in node.gaps)
            if found:
                open_visits.add(id(node))
                followed.update(dict.fromkeys(child.module for child in node.children))
            return found

        enter(root)
        return cls(frozenset(open_visits), tuple(followed))


class SubmoduleTracker:
    """Tracks which submodule call a forward is in, and enters a dispatch mode in the gaps that are looked at."""

    def __init__(self, root: CallNode, tracked: TrackedCalls, make_mode: MakeMode) -> None:
        self.diverged = False
        """Whether the run called other modules than those of the tree."""
        self._tracked = tracked
        self._make_mode = make_mode
        self._here: CallNode | None = root
        self._gap = 0
        self._mode: DispatchMode | None = None

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the unit's forward."""
        patches: list[tuple[nn.Module, Any]] = []
        try:
            for reference in self._tracked.followed:
                module = reference()
                if module is None:
                    continue
                patches.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = self._tracked_forward(module, module.forward)
            self._enter_gap()
            return forward(*args, **kwargs)
        finally:
            self._leave_gap()
            for module, forward_before in reversed(patches):
                if forward_before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward_before

    def _tracked_forward(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def node(*args: Any, **kwargs: Any) -> Any:
            outer, gap = self._here, self._gap
            if outer is None:  # inside a call where nothing is looked at
                return forward(*args, **kwargs)
            self._leave_gap()
            self._here, self._gap = self._child(outer, gap, module), 0
            self._enter_gap()
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave_gap()
                self._here, self._gap = outer, gap + 1
                self._enter_gap()

        return node

    def _child(self, outer: CallNode, gap: int, module: nn.Module) -> CallNode | None:
        if gap >= len(outer.children) or outer.children[gap].module() is not module:
            self.diverged = True
            return None
        child = outer.children[gap]
        return child if id(child) in self._tracked.open else None

    def _enter_gap(self) -> None:
        here = self._here
        if here is None or self.diverged or self._gap >= len(here.gaps) or here.gaps[self._gap] is None:
            return
        self._mode = self._make_mode(here.gaps[self._gap])
        if self._mode is not None:
            self._mode.__enter__()

    def _leave_gap(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


class CallTreeBuilder(SubmoduleTracker):
    """Tracks a run through all modules of a unit and builds its call tree."""

    def __init__(self, unit: nn.Module) -> None:
        self.root = CallNode(weakref.ref(unit))
        inside = tuple(weakref.ref(module) for module in unit.modules() if module is not unit)
        super().__init__(self.root, TrackedCalls(frozenset(), inside), lambda gap: None)

    @property
    def place(self) -> tuple[CallNode, int]:
        """The call and the gap in which the run is."""
        assert self._here is not None
        return self._here, self._gap

    def _child(self, outer: CallNode, gap: int, module: nn.Module) -> CallNode | None:
        child = CallNode(weakref.ref(module))
        outer.children.append(child)
        outer.gaps.append(None)
        return child


# -- The compiled policy ---------------------------------------------------------------------------------------------


OpKind = tuple[Any, int]
OpKey = tuple[OpKind, int]
"""An op of a gap: its kind, and how many of that kind came before it in the gap."""


def op_kind(func: Any, args: Any) -> OpKind:
    """Return an op's overload and, where it casts a parameter, which one: autocast caches such casts."""
    return func, id(args[0]) if casts_parameter(func, args) else 0


class FromPack(NamedTuple):
    """A tensor of a saved result that autograd packs anyway: numbers of the pack and of the policy's view."""

    pack: int
    view: int


@dataclass(slots=True)
class Gap:
    """The saved ops of a gap. Those in `fresh` are kept when they run; the tensors of the others are packed anyway."""

    sources: dict[OpKey, tuple[FromPack | None, ...]] = field(default_factory=dict)
    fresh: set[OpKey] = field(default_factory=set)
    instead: dict[OpKey, tuple[OpKey, StridedView]] = field(default_factory=dict)
    """Ops whose result a later one overwrites, which under a mode makes another: that one's storage stands for both."""
    single: set[OpKey] = field(default_factory=set)
    """Ops whose result is one tensor and no sequence of them."""


@dataclass(slots=True)
class CompiledPolicy:
    """`drops` has, for each tensor that autograd packs, its shape if it is dropped and None if it is held."""

    drops: list[torch.Size | None]
    needed: dict[int, StridedView]
    """Packs that are held and whose storages stand for saved results, with where they lay."""
    storage_bytes: dict[int, int]
    """Sizes of the storages of those packs. A pack may be a view of the saved result, which only this tells from a
    result of another size."""
    views: list[StridedView]
    """Where saved results lie in those storages."""
    view_packs: list[int]
    """The pack of each view."""
    compared: frozenset[int]
    """Packs that are dropped and whose values are compared with what a recomputation makes (Note [Samples])."""
    root: CallNode
    last: int
    """The last pack that is dropped; -1 when none is."""
    overwrites_inputs: bool
    fresh: int
    """How many saved results have to be kept when they are made."""
    keeping: TrackedCalls
    """Past the gaps that they are made in."""
    answering: TrackedCalls | None
    """Past the gaps in which a recompute answers for saved ops; None when there are none."""
    reads: frozenset[int] = frozenset()
    """Buffers of the unit, by number, that its recomputation reads: not the running statistics of a normalisation."""
    rewritten: bool = False
    """Whether inputs, parameters or such buffers are written to between forward and backward, and what is recomputed is
    the same all the same: the ops that read them are saved."""
    offloaded: frozenset[int] = frozenset()
    """Packs whose storages leave for the host."""
    offloaded_kept: frozenset[tuple[int, OpKey]] = frozenset()
    """The same of results that are kept when they are made: `id` of the gap, and the op."""


def next_units(plan: Plan) -> dict[str, str | None]:
    """Return, for each entry of a plan, the module of the entry that follows it in the same pass, None for none."""
    entries = [entry for entry in plan.checkpoint if not entry.is_loss]
    passes = plan.trace.micro_batches or 1
    found: dict[str, str | None] = {}
    for entry in entries:
        of_pass = entry.call * passes // entry.calls
        later = (each for each in entries if each.begin >= entry.end and each.call * passes // each.calls == of_pass)
        following = min(later, key=lambda each: each.begin, default=None)
        found[entry.unit] = None if following is None else following.module
    return found
