"""The record of a step with all blocks of a row, from one in which five of them ran (Note [Repeated blocks]).

Note [Replication]: the blocks that ran have positions 0 to 4 in the record: the first three of the row and its last
two. The step goes through the row in passes, upward in a forward and downward in a backward; in each, a position has a
segment of ops, one of storages and, where modules are called, one of calls. Everything that an op, a storage or a call
of position 2 refers to is one of

- `offset` in a segment of its own position or of the one before or after, in a certain pass (kind REL),
- something outside of positions 1 to 3, the same for all of them (kind ABS),
- a parameter or buffer of its own block (kind OWN),

and the same is true, with the same offsets, of positions 1 and 3: that is checked for every reference, and all else
about the three is equal. So the record of the block `k` places after position 2 is that of position 2 with each number
n replaced by n + k * stride, where the stride is the segment's length, less than 0 in a downward pass, and 0 for ABS.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec.structs import replace

from memfit.capture.repeated_blocks import FIRST, LAST, NotRepeated
from memfit.capture.trace_types import BEFORE_STEP, NO_INDEX, Category, ModuleCall, Op, Phase, Storage, TensorRef

_TEMPLATE = FIRST - 1
_COMPARED = (_TEMPLATE - 1, _TEMPLATE, _TEMPLATE + 1)
_POSITIONS = FIRST + LAST
_OUTSIDE = -1
_static = attrgetter(
    *("name", "phase", "arguments", "flops", "read_bytes", "written_bytes", "workspace_bytes", "view", "random"),
    *("saved", "source"),
)
"""Gives what ops of equal blocks have in common."""
_OPS, _STORAGES, _CALLS = 0, 1, 2

Form = tuple[int, int]
"""A number of the whole record: that of position 2, and what is added for each block after it."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """The whole record, and the numbers in it of storages of the short one."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    calls: tuple[ModuleCall, ...]
    number_of: Callable[[int], int]


@dataclass(slots=True)
class _Pass:
    """One way through the row; `segments` has ranges of ops, storages and calls of each position."""

    up: bool
    segments: list[list[tuple[int, int]]]

    def insert_at(self, table: int) -> int:
        """Return where records of other blocks go, in numbers of the short record."""
        begin, end = self.segments[table][_TEMPLATE]
        return end if self.up else begin

    def length(self, table: int) -> int:
        """Return how many records a block has."""
        begin, end = self.segments[table][_TEMPLATE]
        return end - begin


class _Replication:
    def __init__(
        self,
        ops: Sequence[Op],
        storages: Sequence[Storage],
        calls: Sequence[ModuleCall],
        paths: Sequence[str],
        own: Sequence[Sequence[int]],
        stand_ins: dict[int, tuple[int, int]],
    ) -> None:
        self.ops, self.storages, self.calls = ops, storages, calls
        self.paths, self.own, self.stand_ins = paths, own, stand_ins
        self.blocks = len(paths)
        self.copies = self.blocks - _POSITIONS
        self.block_at = [*range(FIRST), *range(self.blocks - LAST, self.blocks)]
        self.call_position = self._call_positions()
        self.op_position = [self.call_position[op.call] if op.call != NO_INDEX else _OUTSIDE for op in ops]
        self.passes: list[_Pass] = []
        self.owner: list[list[tuple[int, int, int] | None]] = [[None] * len(table) for table in (ops, storages, calls)]
        """For each record the pass, the position and the offset in the segment, None outside of passes."""
        self._find_passes()
        self._find_storages()
        self._find_calls()
        self.moved = [self._moved(table) for table in (_OPS, _STORAGES, _CALLS)]
        self.own_place = {n: (block, i) for block, numbers in enumerate(own) for i, n in enumerate(numbers)}
        self.own_stride = self._own_stride()
        self.stand_in_of = {pair: number for number, pair in stand_ins.items()}
        self._storage_forms: dict[int, Form] = {}
        self._refs: list[tuple[TensorRef, Form]] = []
        self._ref_index: dict[TensorRef, int] = {}
        self._mapped_refs: dict[tuple[int, int], TensorRef] = {}
        """By the identity of a record and the position of who uses it."""
        self._optimizer_refs: dict[int, TensorRef] = {}
        """By the identity of a record; an optimizer's lists have thousands of them, several times over."""

    # -- where everything is ----------------------------------------------------------------------------------------

    def _call_positions(self) -> list[int]:
        by_path = {self.paths[block]: position for position, block in enumerate(self.block_at)}
        found: list[int] = []
        for call in self.calls:
            above = found[call.parent] if call.parent != NO_INDEX else _OUTSIDE
            found.append(above if above != _OUTSIDE else by_path.get(call.module, _OUTSIDE))
        return found

    def _find_passes(self) -> None:
        positions = np.array(self.op_position, dtype=np.int64)
        edges = [0, *(np.flatnonzero(np.diff(positions)) + 1).tolist(), len(positions)]
        runs = [(int(positions[a]), a, b) for a, b in itertools.pairwise(edges) if a < b]
        order = [position for position, _, _ in runs]
        up, down = list(range(_POSITIONS)), list(range(_POSITIONS))[::-1]
        covered = 0
        for i in range(len(runs) - _POSITIONS + 1):
            window = order[i : i + _POSITIONS]
            if window not in (up, down):
                continue
            segments = sorted(runs[i : i + _POSITIONS])
            ranges = [(begin, end) for _, begin, end in segments]
            number = len(self.passes)
            self.passes.append(_Pass(window == up, [ranges, [], []]))
            self._check_lengths(ranges)
            covered += 1
            for position, begin, end in segments:
                for index in range(begin, end):
                    self.owner[_OPS][index] = (number, position, index - begin)
        if any(order.count(position) != covered for position in _COMPARED) or not covered:
            raise NotRepeated("ops of other modules run between those of the blocks")

    def _check_lengths(self, ranges: list[tuple[int, int]]) -> None:
        if len({ranges[position][1] - ranges[position][0] for position in _COMPARED}) != 1:
            raise NotRepeated("blocks differ in their ops")

    def _find_storages(self) -> None:
        found: list[list[list[int]]] = [[[] for _ in range(_POSITIONS)] for _ in self.passes]
        for number, storage in enumerate(self.storages):
            if number in self.stand_ins or storage.alloc_at == BEFORE_STEP or storage.alloc_at >= len(self.ops):
                continue
            owner = self.owner[_OPS][storage.alloc_at]
            if owner is not None:
                found[owner[0]][owner[1]].append(number)
        for number, each in enumerate(self.passes):
            for position, numbers in enumerate(found[number]):
                begin, end = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
                if end - begin != len(numbers):
                    raise NotRepeated("storages of several blocks are mixed")
                each.segments[_STORAGES].append((begin, end))
                for n in numbers:
                    self.owner[_STORAGES][n] = (number, position, n - begin)
            self._check_adjacent(each, _STORAGES)

    def _find_calls(self) -> None:
        tops: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for index, call in enumerate(self.calls):
            position = self.call_position[index]
            if position == _OUTSIDE or (call.parent != NO_INDEX and self.call_position[call.parent] != _OUTSIDE):
                continue
            end = index + 1
            while end < len(self.calls) and self.calls[end].parent >= index:
                end += 1
            tops.setdefault((position, call.phase is not Phase.BACKWARD), []).append((index, end))
        seen = {True: 0, False: 0}
        for number, each in enumerate(self.passes):
            turn = seen[each.up]
            seen[each.up] += 1
            for position in range(_POSITIONS):
                ranges = tops.get((position, each.up), [])
                begin, end = ranges[turn] if turn < len(ranges) else (0, 0)
                each.segments[_CALLS].append((begin, end))
                for index in range(begin, end):
                    self.owner[_CALLS][index] = (number, position, index - begin)
            self._check_adjacent(each, _CALLS)
        for up, count in seen.items():
            if any(len(tops.get((position, up), [])) not in ((count,) if up else (0, count)) for position in _COMPARED):
                raise NotRepeated("blocks are called in other ways than the step passes through them")

    def _check_adjacent(self, each: _Pass, table: int) -> None:
        ranges = [each.segments[table][position] for position in (_COMPARED if each.up else _COMPARED[::-1])]
        self._check_lengths(each.segments[table])
        if ranges[0] != ranges[1] and any(a[1] != b[0] for a, b in itertools.pairwise(ranges)):
            raise NotRepeated("records of several blocks are mixed")

    def _moved(self, table: int) -> list[int]:
        """Return the number in the whole record of everything outside of the row, and of one behind the last."""
        size = len((self.ops, self.storages, self.calls)[table])
        moved = np.arange(size + 1)
        for each in self.passes:
            if each.length(table):
                moved[each.insert_at(table) :] += self.copies * each.length(table)
        if table == _STORAGES:
            removed = np.zeros(size + 1, dtype=np.int64)
            removed[sorted(self.stand_ins)] = 1
            moved -= np.cumsum(removed)
        return moved.tolist()

    def _own_stride(self) -> int:
        template, following = self.own[_TEMPLATE], self.own[_TEMPLATE + 1]
        stride = following[0] - template[0] if template else 0
        for block, numbers in enumerate(self.own):
            if list(numbers) != [n + (block - _TEMPLATE) * stride for n in template]:
                raise NotRepeated("parameters of blocks are not in order")
        return stride

    def _in_row(self, table: int, number: int, block: int, offset: int) -> int:
        """Return the number in the whole record of what a block, neither the first nor the last, has in a pass."""
        each = self.passes[number]
        length = each.length(table)
        if each.up:
            return self.moved[table][each.segments[table][1][0]] + (block - 1) * length + offset
        begin = each.segments[table][_POSITIONS - LAST][0]
        return self.moved[table][begin] + (self.blocks - LAST - block) * length + offset

    # -- what positions 1, 2 and 3 have in common -------------------------------------------------------------------

    def _form(self, table: int, numbers: Sequence[int]) -> Form:
        """Return the form of a reference, given those of positions 1, 2 and 3."""
        first = self._kind(table, numbers[0], numbers[1], _COMPARED[0], of_first=False)
        if first is None or first != self._kind(table, numbers[1], numbers[2], _COMPARED[1], of_first=True):
            raise NotRepeated("blocks differ in what they use")
        kind, number, relative, offset = first
        if kind == "rel":
            stride = self.passes[number].length(table) * (1 if self.passes[number].up else -1)
            return self._in_row(table, number, _TEMPLATE + relative, offset), stride
        if kind == "own":
            return self.moved[table][offset], self.own_stride
        return (NO_INDEX if offset == NO_INDEX else self.moved[table][offset]), 0

    def _kind(self, table: int, one: int, other: int, position: int, *, of_first: bool) -> Any:
        """Return how a position and the next one refer to the same thing; None when they do not."""
        if one == NO_INDEX or other == NO_INDEX:
            return ("abs", 0, 0, NO_INDEX) if one == other else None
        mine, theirs = self.owner[table][one], self.owner[table][other]
        if mine is not None and theirs is not None and mine[0] == theirs[0]:
            relative = mine[1] - position
            if relative == theirs[1] - position - 1 and -1 <= relative <= 1:
                ends = self.passes[mine[0]].segments[table]
                from_end = mine[2] - (ends[mine[1]][1] - ends[mine[1]][0])
                same_end = from_end == theirs[2] - (ends[theirs[1]][1] - ends[theirs[1]][0])
                if mine[2] == theirs[2] or same_end:
                    return ("rel", mine[0], relative, mine[2] if of_first else theirs[2])
        if one == other and (mine is None or mine[1] not in _COMPARED):
            return ("abs", 0, 0, one) if one not in self.own_place or table != _STORAGES else None
        if table == _STORAGES and one in self.own_place and other in self.own_place:
            places = self.own_place[one], self.own_place[other]
            blocks = self.block_at[position], self.block_at[position + 1]
            if (places[0][0], places[1][0]) == blocks and places[0][1] == places[1][1]:
                return ("own", 0, 0, self.own[_TEMPLATE][places[0][1]])
        return None

    def _forms(self, table: int, groups: Sequence[Sequence[int]]) -> list[Form]:
        if len({len(group) for group in groups}) != 1:
            raise NotRepeated("blocks differ in what they use")
        return [self._form(table, numbers) for numbers in zip(*groups, strict=True)]

    def _storage_form(self, numbers: Sequence[int]) -> Form:
        known = self._storage_forms.get(numbers[1])
        if known is None:
            known = self._storage_forms[numbers[1]] = self._form(_STORAGES, numbers)
        elif known != self._form(_STORAGES, numbers):
            raise NotRepeated("blocks differ in what they use")
        return known

    def _ref_forms(self, groups: Sequence[Sequence[TensorRef]]) -> list[int]:
        """Return the places in `_refs` of a block's tensors."""
        if len({len(group) for group in groups}) != 1:
            raise NotRepeated("blocks differ in what they use")
        found = []
        for refs in zip(*groups, strict=True):
            shapes = {(ref.shape, ref.stride, ref.offset, ref.dtype) for ref in refs}
            if len(shapes) != 1:
                raise NotRepeated("blocks differ in their tensors")
            form = self._storage_form([ref.storage for ref in refs])
            index = self._ref_index.get(refs[1])
            if index is None:
                index = self._ref_index[refs[1]] = len(self._refs)
                self._refs.append((refs[1], form))
            found.append(index)
        return found

    def _three(self, each: _Pass, table: int, records: Sequence[Any]) -> Any:
        ranges = [each.segments[table][position] for position in _COMPARED]
        return zip(*(records[begin:end] for begin, end in ranges), strict=True)

    def _op_templates(self, each: _Pass) -> list[tuple[Any, ...]]:
        found = []
        for three in self._three(each, _OPS, self.ops):
            template = three[1]
            if not _static(three[0]) == _static(template) == _static(three[2]):
                raise NotRepeated("blocks differ in their ops")
            found.append(
                (
                    template,
                    self._ref_forms([op.inputs for op in three]),
                    self._ref_forms([op.outputs for op in three]),
                    self._form(_CALLS, [op.call for op in three]),
                    self._forms(_STORAGES, [op.mutates for op in three]),
                    self._form(_OPS, [op.mutated_op for op in three]),
                    self._form(_OPS, [op.forward_op for op in three]),
                )
            )
        return found

    def _suffix(self, texts: Sequence[str]) -> tuple[bool, str]:
        """Return what follows the path of a block in a name, or the whole name."""
        prefixes = [self.paths[self.block_at[position]] for position in _COMPARED]
        inside = [text == path or text.startswith(f"{path}.") for text, path in zip(texts, prefixes, strict=True)]
        rest = [
            text[len(path) :] if within else text for text, path, within in zip(texts, prefixes, inside, strict=True)
        ]
        if len(set(inside)) != 1 or len(set(rest)) != 1:
            raise NotRepeated("blocks differ in their names")
        return inside[0], rest[0]

    def _storage_templates(self, each: _Pass) -> list[tuple[Any, ...]]:
        found = []
        begin = each.segments[_STORAGES][_TEMPLATE][0]
        for offset, three in enumerate(self._three(each, _STORAGES, self.storages)):
            if len({(storage.bytes, storage.category) for storage in three}) != 1:
                raise NotRepeated("blocks differ in their storages")
            gradient = three[1].category is Category.GRADIENT
            ends: list[Any] = []
            for name in ("free_after", "released"):
                numbers = [getattr(storage, name) for storage in three]
                if gradient and all(n == NO_INDEX or self.owner[_OPS][n] is None for n in numbers):
                    ends.append(name)  # of the parameter's own gradient: an optimizer may free one after another
                else:
                    ends.append(self._form(_OPS, numbers))
            found.append(
                (
                    three[1],
                    self._form(_OPS, [storage.alloc_at for storage in three]),
                    *ends,
                    self._form(_CALLS, [storage.call for storage in three]),
                    self._suffix([storage.module for storage in three]),
                    self._suffix([storage.name for storage in three]),
                    self._forms(_OPS, [storage.saved_by for storage in three]),
                    begin + offset,
                )
            )
        return found

    def _call_templates(self, each: _Pass) -> list[tuple[Any, ...]]:
        found = []
        begins = [each.segments[_OPS][position][0] for position in _COMPARED]
        number = self.passes.index(each)
        for three in self._three(each, _CALLS, self.calls):
            if len({(call.kind, call.index, call.phase) for call in three}) != 1:
                raise NotRepeated("blocks differ in their calls")
            spans = {(call.begin - begin, call.end - begin) for call, begin in zip(three, begins, strict=True)}
            if len(spans) != 1:
                raise NotRepeated("blocks differ in their calls")
            stride = each.length(_OPS) * (1 if each.up else -1)
            base = self._in_row(_OPS, number, _TEMPLATE, 0)
            last = [NO_INDEX if call.backward_end == NO_INDEX else call.backward_end - 1 for call in three]
            found.append(
                (
                    three[1],
                    self._suffix([call.module for call in three]),
                    self._form(_CALLS, [call.parent for call in three]),
                    *((base + offset, stride) for offset in next(iter(spans))),
                    self._form(_OPS, [call.backward_begin for call in three]),
                    self._form(_OPS, last),
                    [self._storage_form(numbers) for numbers in zip(*(call.inputs for call in three), strict=False)],
                )
            )
            if len({len(call.inputs) for call in three}) != 1:
                raise NotRepeated("blocks differ in their calls")
        return found

    # -- the whole record -------------------------------------------------------------------------------------------

    def run(self) -> Replicated:
        """Return the whole record."""
        templates = [(self._op_templates(p), self._storage_templates(p), self._call_templates(p)) for p in self.passes]
        owned = self._owned()
        refs = [self._refs_of(k) for k in range(self.copies + 1)]
        made: list[dict[int, list[list[Any]]]] = [{}, {}, {}]
        for number, (ops, storages, calls) in enumerate(templates):
            made[_OPS][number] = [self._copy_ops(ops, k, refs[k]) for k in range(self.copies + 1)]
            made[_STORAGES][number] = [self._copy_storages(storages, k) for k in range(self.copies + 1)]
            made[_CALLS][number] = [self._copy_calls(calls, k) for k in range(self.copies + 1)]
        return Replicated(
            ops=tuple(self._spliced(_OPS, made[_OPS], self._map_op_record)),
            storages=tuple(self._spliced(_STORAGES, made[_STORAGES], lambda n: self._map_storage_record(n, owned))),
            calls=tuple(self._spliced(_CALLS, made[_CALLS], self._map_call_record)),
            number_of=lambda number: self._map_storage(number, _OUTSIDE, everywhere=True),
        )

    def _spliced(self, table: int, made: dict[int, list[list[Any]]], mapped: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = []
        at = 0
        size = len((self.ops, self.storages, self.calls)[table])
        order = sorted(range(len(self.passes)), key=lambda number: self.passes[number].insert_at(table))
        for number in order:
            each = self.passes[number]
            if not each.length(table):
                continue
            begin, end = each.segments[table][_TEMPLATE]
            found += [mapped(i) for i in range(at, begin) if table != _STORAGES or i not in self.stand_ins]
            for copied in made[number] if each.up else made[number][::-1]:
                found += copied
            at = end
        found += [mapped(i) for i in range(at, size) if table != _STORAGES or i not in self.stand_ins]
        return found

    def _refs_of(self, k: int) -> list[TensorRef]:
        return [replace(ref, storage=form[0] + k * form[1]) for ref, form in self._refs]

    def _copy_ops(self, templates: list[tuple[Any, ...]], k: int, refs: list[TensorRef]) -> list[Op]:
        ref = refs.__getitem__
        return [
            replace(
                op,
                call=call[0] + k * call[1],
                inputs=tuple(map(ref, inputs)),
                outputs=tuple(map(ref, outputs)),
                mutates=tuple([base + k * stride for base, stride in mutates]) if mutates else (),
                mutated_op=mutated[0] + k * mutated[1],
                forward_op=forward[0] + k * forward[1],
            )
            for op, inputs, outputs, call, mutates, mutated, forward in templates
        ]

    def _copy_storages(self, templates: list[tuple[Any, ...]], k: int) -> list[Storage]:
        path = self.paths[_TEMPLATE + k]
        return [
            replace(
                storage,
                alloc_at=alloc[0] + k * alloc[1],
                free_after=self._end(freed, k, number),
                released=self._end(released, k, number),
                call=call[0] + k * call[1],
                module=path + module[1] if module[0] else module[1],
                name=path + name[1] if name[0] else name[1],
                saved_by=tuple(sorted([base + k * stride for base, stride in saved_by])) if saved_by else (),
            )
            for storage, alloc, freed, released, call, module, name, saved_by, number in templates
        ]

    def _end(self, form: Any, k: int, number: int) -> int:
        """Return when a storage is freed; a gradient that was put in its place tells it itself."""
        if not isinstance(form, str):
            return form[0] + k * form[1]
        if k:
            found = self.stand_in_of.get((_TEMPLATE + k, number))
            if found is None:
                raise NotRepeated("a gradient is freed before the backward is over")
            number = found
        end = getattr(self.storages[number], form)
        return self._map_op(end, _OUTSIDE)

    def _copy_calls(self, templates: list[tuple[Any, ...]], k: int) -> list[ModuleCall]:
        path = self.paths[_TEMPLATE + k]
        return [
            replace(
                call,
                module=path + module[1] if module[0] else module[1],
                parent=parent[0] + k * parent[1],
                begin=begin[0] + k * begin[1],
                end=end[0] + k * end[1],
                backward_begin=first[0] + k * first[1],
                backward_end=NO_INDEX if last[0] == NO_INDEX else last[0] + k * last[1] + 1,
                inputs=tuple([base + k * stride for base, stride in inputs]),
            )
            for call, module, parent, begin, end, first, last, inputs in templates
        ]

    # -- records outside of the row, and of positions 0, 1, 3 and 4 -------------------------------------------------

    def _map(self, table: int, number: int, position: int, everywhere: bool = False) -> int:
        """Return the number in the whole record of what a record of this position refers to."""
        if number == NO_INDEX:
            return NO_INDEX
        owner = self.owner[table][number]
        if owner is not None and owner[1] in _COMPARED and not everywhere:
            if position == _TEMPLATE + 1 and owner[1] == _TEMPLATE:
                return self._in_row(table, owner[0], self.blocks - LAST - 1, owner[2])
            if position == _OUTSIDE or abs(position - owner[1]) > 1:
                raise NotRepeated("something other than the next block uses what a block made")
        return self.moved[table][number]

    def _map_op(self, number: int, position: int, everywhere: bool = False) -> int:
        return self._map(_OPS, number, position, everywhere)

    def _map_storage(self, number: int, position: int, everywhere: bool = False) -> int:
        stand_in = self.stand_ins.get(number)
        if stand_in is None:
            return self._map(_STORAGES, number, position, everywhere)
        block, template = stand_in
        owner = self.owner[_STORAGES][template]
        if owner is None or owner[1] != _TEMPLATE:
            raise NotRepeated("a gradient is made outside of its block")
        return self._in_row(_STORAGES, owner[0], block, owner[2])

    def _map_ref(self, ref: TensorRef, position: int) -> TensorRef:
        key = (id(ref), position)
        found = self._mapped_refs.get(key)
        if found is None:
            found = self._mapped_refs[key] = _on(ref, self._map_storage(ref.storage, position))
        return found

    def _map_optimizer_ref(self, ref: TensorRef) -> TensorRef:
        found = self._optimizer_refs.get(id(ref))
        if found is None:
            self._check_gradient(ref.storage)
            number = self._map_storage(ref.storage, _OUTSIDE, everywhere=True)
            found = self._optimizer_refs[id(ref)] = _on(ref, number)
        return found

    def _map_op_record(self, index: int) -> Op:
        op = self.ops[index]
        owner = self.owner[_OPS][index]
        position = _OUTSIDE if owner is None else owner[1]
        after = op.phase is Phase.OPTIMIZER
        if after:
            inputs, outputs = map(self._map_optimizer_ref, op.inputs), map(self._map_optimizer_ref, op.outputs)
        else:
            inputs, outputs = (map(self._map_ref, refs, itertools.repeat(position)) for refs in (op.inputs, op.outputs))
        mutated_op = self._map_op(op.mutated_op, position, after)
        made = self.owner[_OPS][op.mutated_op] if after and op.mutated_op != NO_INDEX else None
        if made is not None and made[1] == _TEMPLATE:  # of position 2, or of a block that it stood for
            target = op.mutates[0]
            block = (
                self.stand_ins[target][0] if target in self.stand_ins else self.own_place.get(target, (_TEMPLATE,))[0]
            )
            mutated_op = self._in_row(_OPS, made[0], block, made[2])
        return replace(
            op,
            call=self._map(_CALLS, op.call, position),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            mutates=tuple([self._map_storage(number, position, after) for number in op.mutates]),
            mutated_op=mutated_op,
            forward_op=self._map_op(op.forward_op, position),
        )

    def _check_gradient(self, number: int) -> None:
        owner = None if number == NO_INDEX else self.owner[_STORAGES][number]
        if owner is not None and owner[1] in _COMPARED and self.storages[number].category is not Category.GRADIENT:
            raise NotRepeated("something other than the next block uses what a block made")

    def _owned(self) -> list[list[Form]]:
        """Return the ops that save each parameter and buffer of a block; the rest of their records is equal."""
        found = []
        numbers = [self.own[self.block_at[position]] for position in _COMPARED]
        for three in zip(*numbers, strict=True):
            found.append(self._forms(_OPS, [self.storages[number].saved_by for number in three]))
        return found

    def _map_storage_record(self, number: int, owned: list[list[Form]]) -> Storage:
        storage = self.storages[number]
        owner = self.owner[_STORAGES][number]
        position = _OUTSIDE if owner is None else owner[1]
        place = self.own_place.get(number)
        stays = storage.alloc_at == BEFORE_STEP and storage.free_after == storage.released == NO_INDEX
        if stays and not storage.saved_by and (place is None or not owned[place[1]]):
            return storage
        if place is not None:
            block, i = place
            if block in self.block_at:
                saved_by = [self._map_op(op, self.block_at.index(block)) for op in storage.saved_by]
            else:
                saved_by = [base + (block - _TEMPLATE) * stride for base, stride in owned[i]]
        else:
            saved_by = self._map_saved_by(storage.saved_by, position)
        return replace(
            storage,
            alloc_at=self._map_op(storage.alloc_at, position),
            free_after=self._map_op(storage.free_after, position),
            released=self._map_op(storage.released, position),
            call=self._map(_CALLS, storage.call, position),
            saved_by=tuple(sorted(saved_by)),
        )

    def _map_saved_by(self, saved_by: Sequence[int], position: int) -> list[int]:
        """Return the ops that save a storage: where those of positions 1, 2 and 3 do, those of all blocks do."""
        found: list[int] = []
        near: list[int] = []
        inside: list[set[tuple[int, int]]] = [set() for _ in range(_POSITIONS)]
        for op in saved_by:
            owner = self.owner[_OPS][op]
            if owner is not None and owner[1] in _COMPARED:
                inside[owner[1]].add((owner[0], owner[2]))
                near.append(op)
            else:
                found.append(self.moved[_OPS][op])
        sets = [inside[each] for each in _COMPARED]
        if position in _COMPARED or not (sets[0] == sets[1] == sets[2]):
            return found + [self._map_op(op, position) for op in near]
        for number, offset in sets[0]:
            found += [self._in_row(_OPS, number, block, offset) for block in range(1, self.blocks - 1)]
        return found

    def _map_call_record(self, index: int) -> ModuleCall:
        call = self.calls[index]
        owner = self.owner[_CALLS][index]
        position = _OUTSIDE if owner is None else owner[1]
        last = NO_INDEX if call.backward_end == NO_INDEX else call.backward_end - 1
        begin = self.moved[_OPS][call.begin]
        end = self.moved[_OPS][call.end - 1] + 1 if call.end > call.begin else begin
        backward_end = self._map_op(last, position)
        return replace(
            call,
            parent=self._map(_CALLS, call.parent, position),
            begin=begin,
            end=end,
            backward_begin=self._map_op(call.backward_begin, position),
            backward_end=NO_INDEX if backward_end == NO_INDEX else backward_end + 1,
            inputs=tuple(self._map_storage(number, position) for number in call.inputs),
        )


def _on(ref: TensorRef, number: int) -> TensorRef:
    return ref if ref.storage == number else replace(ref, storage=number)


def replicate(
    ops: Sequence[Op],
    storages: Sequence[Storage],
    calls: Sequence[ModuleCall],
    *,
    paths: Sequence[str],
    own: Sequence[Sequence[int]],
    stand_ins: dict[int, tuple[int, int]],
) -> Replicated:
    """Return the record of all blocks; `NotRepeated` where those that ran do not tell it.

    `paths` are those of the blocks, `own` the storages of their parameters and buffers, and `stand_ins` gradients that
    were put where blocks did not run, each with its block and the storage in the third block that it is like.
    """
    return _Replication(ops, storages, calls, paths, own, stand_ins).run()
