"""The modules that gather their parameters, every run of them in the step, and the passes of the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memfit.capture import NO_INDEX, ModuleCall, Parameter, Phase, Trace
from memfit.errors import InputError
from memfit.paths import around, unwrapped
from memfit.paths import repeated_blocks as blocks_among
from memfit.sharding.options import ShardDtypes, ShardOptions, elements, item_bytes, padded_elements, shard_bytes
from memfit.torch_private.wrappers import INNER_NAMES

_FORWARD = (Phase.FORWARD, Phase.LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward and its backward: ops `begin` up to (not including) `end`, its backward from `backward_begin` on.

    `earliest` is the first forward op that has a gradient; what runs before it has inputs without one.
    """

    begin: int
    backward_begin: int
    end: int
    earliest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCall:
    """One run of a unit; its backward is that of its own pass, `NO_INDEX` when it has none.

    `reduces` says whether its gradients are reduced when its backward ends. That of a run whose inputs need no gradient
    is not seen to end, and its gradients wait for the end of the whole backward.
    """

    begin: int
    end: int
    backward_begin: int
    backward_end: int
    depth: int
    reduces: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """A module whose parameters are gathered together, those of units inside it excepted, and its runs.

    `joined` are the modules after the first where small neighbours are one unit. One that is `kept` does not reshard
    after its forward: the root, with `keep_last` the last that run, and with `reshard_after_forward=False` all. With
    `reshard_ranks` it reshards to so many ranks until its backward.
    """

    module: str
    kept: bool
    parameters: int
    shard_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    calls: tuple[ShardCall, ...]
    reshard_ranks: int | None = None
    joined: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of all its modules."""
        return self.module, *self.joined

    @property
    def reshard_after_forward(self) -> bool | int:
        """As `fully_shard` takes it."""
        return self.reshard_ranks or not self.kept


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Modules that are alike and numbered in a row, the outermost such; what FSDP usually wraps.

    One in a wrapper (`checkpoint_wrapper`, `torch.compile`) is like the others, and the wrapper is the unit.
    """
    called = {call.module for call in trace.calls}
    holding = {path for parameter in trace.parameters for name in parameter.names for path in around(name)}
    kinds = unwrapped({each.path: each.kind for each in trace.modules if each.path in holding}, INNER_NAMES)
    return blocks_among({path: kind for path, kind in kinds.items() if path in called})


def find_passes(trace: Trace) -> tuple[Pass, ...]:
    """The passes of a step, several with accumulation. What an optimizer does in the backward does not end it."""
    spans: list[list[int]] = []  # begin, first and last backward op
    begin, forward_since = 0, True
    for index, op in enumerate(trace.ops):
        if op.phase in _FORWARD:
            if not forward_since:
                begin = spans[-1][2] + 1
            forward_since = True
        elif op.phase is Phase.BACKWARD:
            if forward_since:
                spans.append([begin, index, index])
            spans[-1][2] = index
            forward_since = False
    return tuple(
        Pass(
            begin=begin,
            backward_begin=first,
            end=last + 1,
            earliest=min(
                (op.forward_op for op in trace.ops[first : last + 1] if op.forward_op >= begin), default=last + 1
            ),
        )
        for begin, first, last in spans
    )


def pass_of(passes: Sequence[Pass], op: int) -> int:
    """The number of the pass that an op lies in; that after the last for what follows."""
    return bisect_right([each.end for each in passes], op)


def members_of(trace: Trace, options: ShardOptions) -> dict[str, list[int]]:
    """The numbers of the parameters of every unit, the root's first."""
    if isinstance(options.units, str):
        raise InputError(f"units is {options.units!r}; give a tuple of module paths, ({options.units!r},)")
    wanted = repeated_blocks(trace) if options.units is None else tuple(dict.fromkeys(options.units))
    known = {module.path for module in trace.modules}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InputError(f"no module is called {unknown[0]!r}; give module paths such as {sorted(known)[1:4]}")
    order = {module.path: place for place, module in enumerate(trace.modules)}
    names = ("", *sorted((name for name in wanted if name), key=order.__getitem__))
    members: dict[str, list[int]] = {name: [] for name in names}
    for number, parameter in enumerate(trace.parameters):
        members[_home(parameter, names)].append(number)
    return members


def in_order_of_fsdp2(trace: Trace, units: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the parameters of units as `fully_shard` finds them: those of a module after those of its children."""
    place: dict[str, int] = {}
    open_paths: list[str] = []
    for path in (*(module.path for module in trace.modules), None):
        while open_paths and (path is None or not path.startswith(open_paths[-1] and f"{open_paths[-1]}.")):
            place[open_paths.pop()] = len(place)
        if path is not None:
            open_paths.append(path)

    def key(number: int) -> tuple[int, int]:
        return min(place[name.rpartition(".")[0]] for name in trace.parameters[number].names), number

    return [sorted(numbers, key=key) for numbers in units]


def find_units(
    trace: Trace,
    members: dict[str, list[int]],
    passes: Sequence[Pass],
    ranks: int,
    dtypes: ShardDtypes,
    *,
    keep_last: bool | int = False,
    reshard_after_forward: bool | int = True,
) -> tuple[ShardUnit, ...]:
    """Every unit with its sizes and its runs."""
    found = []
    fewer = None if isinstance(reshard_after_forward, bool) else reshard_after_forward
    if fewer is not None and (fewer >= ranks or ranks % fewer):
        raise InputError(f"reshard_after_forward is {fewer}; write a divisor of the {ranks} ranks, smaller than that")
    for name, numbers in members.items():
        calls = _calls(trace, name, passes)
        if not calls:
            raise InputError(f"module {name!r} is never called, so it cannot gather its parameters; leave it out")
        held = [trace.parameters[number] for number in numbers]
        trained = [parameter for parameter in held if parameter.trainable]
        found.append(
            ShardUnit(
                module=name,
                kept=not name or reshard_after_forward is False,
                reshard_ranks=fewer if name else None,
                parameters=len(held),
                shard_bytes=sum(shard_bytes(each, ranks, dtypes.kept(each)) for each in held),
                gathered_bytes=sum(padded_elements(each, ranks) * item_bytes(dtypes.gathered(each)) for each in held),
                gradient_bytes=sum(elements(each) * item_bytes(dtypes.gathered(each)) for each in trained),
                reduced_bytes=sum(padded_elements(each, ranks) * item_bytes(dtypes.reduced(each)) for each in trained),
                calls=calls,
            )
        )
    inner = [unit for unit in found if unit.module]
    inner.sort(key=lambda unit: max((call.end, call.depth) for call in unit.calls))
    for last in inner[max(0, len(inner) - int(keep_last)) :]:
        found[found.index(last)] = replace(last, kept=True)
    return tuple(found)


def join_units(units: Sequence[ShardUnit], root: ShardUnit) -> ShardUnit:
    """Return units as one, whose runs begin with the first call of any of them and end when all were called.

    One of which not all are called ends with the forward of the root.
    """
    first = units[0]
    if len(units) == 1:
        return first
    found: list[ShardCall] = []
    current: list[ShardCall] = []
    called: set[str] = set()
    calls = sorted(((call, unit.module) for unit in units for call in unit.calls), key=lambda each: each[0].begin)
    for call, module in calls:
        ends = [each.end for each in root.calls if current and current[-1].end <= each.end <= call.begin]
        if ends:
            found.append(replace(_joined_call(current), end=ends[0]))
            current, called = [], set()
        current.append(call)
        called.add(module)
        if len(called) == len(units):
            found.append(_joined_call(current))
            current, called = [], set()
    if current:
        ends = [each.end for each in root.calls if each.end >= current[-1].end]
        found.append(replace(_joined_call(current), end=ends[0] if ends else current[-1].end))
    return replace(
        first,
        joined=tuple(unit.module for unit in units[1:]),
        parameters=sum(unit.parameters for unit in units),
        shard_bytes=sum(unit.shard_bytes for unit in units),
        gathered_bytes=sum(unit.gathered_bytes for unit in units),
        gradient_bytes=sum(unit.gradient_bytes for unit in units),
        reduced_bytes=sum(unit.reduced_bytes for unit in units),
        calls=tuple(found),
    )


def _joined_call(calls: Sequence[ShardCall]) -> ShardCall:
    backwards = [call for call in calls if call.backward_begin != NO_INDEX]
    return ShardCall(
        begin=calls[0].begin,
        end=max(call.end for call in calls),
        backward_begin=min((call.backward_begin for call in backwards), default=NO_INDEX),
        backward_end=max((call.backward_end for call in backwards), default=NO_INDEX),
        depth=min(call.depth for call in calls),
        reduces=calls[0].reduces,
    )


def _calls(trace: Trace, name: str, passes: Sequence[Pass]) -> tuple[ShardCall, ...]:
    return tuple(
        _call(trace, call, len(trace.ancestors(number)), passes)
        for number, call in enumerate(trace.calls)
        if call.module == name and call.phase in _FORWARD and call.begin < call.end
    )


def _call(trace: Trace, call: ModuleCall, depth: int, passes: Sequence[Pass]) -> ShardCall:
    first, last, reduces = call.backward_begin, call.backward_end, False
    if first != NO_INDEX:
        own = passes[pass_of(passes, first)]
        reduces = own.earliest < call.begin
        if last > own.end:  # a trace counts what later passes add to a gradient as backward of its first use
            ops = range(own.end - 1, first, -1)
            last = next((op for op in ops if call.begin <= trace.ops[op].forward_op < call.end), first) + 1
    return ShardCall(
        begin=call.begin, end=call.end, backward_begin=first, backward_end=last, depth=depth, reduces=reduces
    )


def _home(parameter: Parameter, names: Sequence[str]) -> str:
    """The innermost unit that holds every name of a parameter; one that is tied across units belongs to the root."""
    homes = {
        max((name for name in names if not name or path.startswith(f"{name}.")), key=len) for path in parameter.names
    }
    return homes.pop() if len(homes) == 1 else ""
