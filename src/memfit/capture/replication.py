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

from msgspec.structs import replace

from memfit.capture.block_row import CALLS, COMPARED, OPS, OUTSIDE, STORAGES, TEMPLATE, BlockRow, Form, Pass
from memfit.capture.repeated_blocks import FIRST, LAST, NotRepeated
from memfit.capture.trace_types import BEFORE_STEP, NO_INDEX, Category, ModuleCall, Op, Phase, Storage, TensorRef

_static = attrgetter(
    *("name", "phase", "arguments", "flops", "read_bytes", "written_bytes", "workspace_bytes", "view", "random"),
    *("saved", "source"),
)
"""Gives what ops of equal blocks have in common."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """The whole record, and the numbers in it of storages of the short one."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    calls: tuple[ModuleCall, ...]
    number_of: Callable[[int], int]


class _Replication:
    """Copies the records of position 2 for the blocks that did not run."""

    def __init__(self, row: BlockRow) -> None:
        self.row = row
        self.owner, self.moved = row.owner, row.moved
        self.stand_in_of = {pair: number for number, pair in row.stand_ins.items()}
        self._storage_forms: dict[int, Form] = {}
        self._refs: list[tuple[TensorRef, Form]] = []
        self._ref_index: dict[TensorRef, int] = {}
        self._mapped_refs: dict[tuple[int, int], TensorRef] = {}
        """By the identity of a record and the position of who uses it."""
        self._optimizer_refs: dict[int, TensorRef] = {}
        """By the identity of a record; an optimizer's lists have thousands of them, several times over."""

    # -- what positions 1, 2 and 3 have in common -------------------------------------------------------------------

    def _storage_form(self, numbers: Sequence[int]) -> Form:
        known = self._storage_forms.get(numbers[1])
        if known is None:
            known = self._storage_forms[numbers[1]] = self.row.form(STORAGES, numbers)
        elif known != self.row.form(STORAGES, numbers):
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

    def _three(self, each: Pass, table: int, records: Sequence[Any]) -> Any:
        ranges = [each.segments[table][position] for position in COMPARED]
        return zip(*(records[begin:end] for begin, end in ranges), strict=True)

    def _op_templates(self, each: Pass) -> list[tuple[Any, ...]]:
        found = []
        for three in self._three(each, OPS, self.row.ops):
            template = three[1]
            if not _static(three[0]) == _static(template) == _static(three[2]):
                raise NotRepeated("blocks differ in their ops")
            found.append(
                (
                    template,
                    self._ref_forms([op.inputs for op in three]),
                    self._ref_forms([op.outputs for op in three]),
                    self.row.form(CALLS, [op.call for op in three]),
                    self.row.forms(STORAGES, [op.mutates for op in three]),
                    self.row.form(OPS, [op.mutated_op for op in three]),
                    self.row.form(OPS, [op.forward_op for op in three]),
                )
            )
        return found

    def _suffix(self, texts: Sequence[str]) -> tuple[bool, str]:
        """Return what follows the path of a block in a name, or the whole name."""
        prefixes = [self.row.paths[self.row.block_at[position]] for position in COMPARED]
        inside = [text == path or text.startswith(f"{path}.") for text, path in zip(texts, prefixes, strict=True)]
        rest = [
            text[len(path) :] if within else text for text, path, within in zip(texts, prefixes, inside, strict=True)
        ]
        if len(set(inside)) != 1 or len(set(rest)) != 1:
            raise NotRepeated("blocks differ in their names")
        return inside[0], rest[0]

    def _storage_templates(self, each: Pass) -> list[tuple[Any, ...]]:
        found = []
        begin = each.segments[STORAGES][TEMPLATE][0]
        for offset, three in enumerate(self._three(each, STORAGES, self.row.storages)):
            if len({(storage.bytes, storage.category) for storage in three}) != 1:
                raise NotRepeated("blocks differ in their storages")
            gradient = three[1].category is Category.GRADIENT
            ends: list[Any] = []
            for name in ("free_after", "released"):
                numbers = [getattr(storage, name) for storage in three]
                if gradient and all(n == NO_INDEX or self.owner[OPS][n] is None for n in numbers):
                    ends.append(name)  # of the parameter's own gradient: an optimizer may free one after another
                else:
                    ends.append(self.row.form(OPS, numbers))
            found.append(
                (
                    three[1],
                    self.row.form(OPS, [storage.alloc_at for storage in three]),
                    *ends,
                    self.row.form(CALLS, [storage.call for storage in three]),
                    self._suffix([storage.module for storage in three]),
                    self._suffix([storage.name for storage in three]),
                    self.row.forms(OPS, [storage.saved_by for storage in three]),
                    begin + offset,
                )
            )
        return found

    def _call_templates(self, each: Pass) -> list[tuple[Any, ...]]:
        found = []
        begins = [each.segments[OPS][position][0] for position in COMPARED]
        number = self.row.passes.index(each)
        for three in self._three(each, CALLS, self.row.calls):
            if len({(call.kind, call.index, call.phase) for call in three}) != 1:
                raise NotRepeated("blocks differ in their calls")
            spans = {(call.begin - begin, call.end - begin) for call, begin in zip(three, begins, strict=True)}
            if len(spans) != 1:
                raise NotRepeated("blocks differ in their calls")
            stride = each.length(OPS) * (1 if each.up else -1)
            base = self.row.in_row(OPS, number, TEMPLATE, 0)
            last = [NO_INDEX if call.backward_end == NO_INDEX else call.backward_end - 1 for call in three]
            found.append(
                (
                    three[1],
                    self._suffix([call.module for call in three]),
                    self.row.form(CALLS, [call.parent for call in three]),
                    *((base + offset, stride) for offset in next(iter(spans))),
                    self.row.form(OPS, [call.backward_begin for call in three]),
                    self.row.form(OPS, last),
                    [self._storage_form(numbers) for numbers in zip(*(call.inputs for call in three), strict=False)],
                )
            )
            if len({len(call.inputs) for call in three}) != 1:
                raise NotRepeated("blocks differ in their calls")
        return found

    # -- the whole record -------------------------------------------------------------------------------------------

    def run(self) -> Replicated:
        """Return the whole record."""
        templates = [
            (self._op_templates(p), self._storage_templates(p), self._call_templates(p)) for p in self.row.passes
        ]
        owned = self._owned()
        refs = [self._refs_of(k) for k in range(self.row.copies + 1)]
        made: list[dict[int, list[list[Any]]]] = [{}, {}, {}]
        for number, (ops, storages, calls) in enumerate(templates):
            made[OPS][number] = [self._copy_ops(ops, k, refs[k]) for k in range(self.row.copies + 1)]
            made[STORAGES][number] = [self._copy_storages(storages, k) for k in range(self.row.copies + 1)]
            made[CALLS][number] = [self._copy_calls(calls, k) for k in range(self.row.copies + 1)]
        return Replicated(
            ops=tuple(self._spliced(OPS, made[OPS], self._map_op_record)),
            storages=tuple(self._spliced(STORAGES, made[STORAGES], lambda n: self._map_storage_record(n, owned))),
            calls=tuple(self._spliced(CALLS, made[CALLS], self._map_call_record)),
            number_of=lambda number: self._map_storage(number, OUTSIDE, everywhere=True),
        )

    def _spliced(self, table: int, made: dict[int, list[list[Any]]], mapped: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = []
        at = 0
        size = len((self.row.ops, self.row.storages, self.row.calls)[table])
        order = sorted(range(len(self.row.passes)), key=lambda number: self.row.passes[number].insert_at(table))
        for number in order:
            each = self.row.passes[number]
            if not each.length(table):
                continue
            begin, end = each.segments[table][TEMPLATE]
            found += [mapped(i) for i in range(at, begin) if table != STORAGES or i not in self.row.stand_ins]
            for copied in made[number] if each.up else made[number][::-1]:
                found += copied
            at = end
        found += [mapped(i) for i in range(at, size) if table != STORAGES or i not in self.row.stand_ins]
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
        path = self.row.paths[TEMPLATE + k]
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
            found = self.stand_in_of.get((TEMPLATE + k, number))
            if found is None:
                raise NotRepeated("a gradient is freed before the backward is over")
            number = found
        end = getattr(self.row.storages[number], form)
        return self._map_op(end, OUTSIDE)

    def _copy_calls(self, templates: list[tuple[Any, ...]], k: int) -> list[ModuleCall]:
        path = self.row.paths[TEMPLATE + k]
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
        if owner is not None and owner[1] in COMPARED and not everywhere:
            if position == TEMPLATE + 1 and owner[1] == TEMPLATE:
                return self.row.in_row(table, owner[0], self.row.blocks - LAST - 1, owner[2])
            if position == OUTSIDE or abs(position - owner[1]) > 1:
                raise NotRepeated("something other than the next block uses what a block made")
        return self.moved[table][number]

    def _map_op(self, number: int, position: int, everywhere: bool = False) -> int:
        return self._map(OPS, number, position, everywhere)

    def _map_storage(self, number: int, position: int, everywhere: bool = False) -> int:
        stand_in = self.row.stand_ins.get(number)
        if stand_in is None:
            return self._map(STORAGES, number, position, everywhere)
        block, template = stand_in
        owner = self.owner[STORAGES][template]
        if owner is None or owner[1] != TEMPLATE:
            raise NotRepeated("a gradient is made outside of its block")
        return self.row.in_row(STORAGES, owner[0], block, owner[2])

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
            number = self._map_storage(ref.storage, OUTSIDE, everywhere=True)
            found = self._optimizer_refs[id(ref)] = _on(ref, number)
        return found

    def _map_op_record(self, index: int) -> Op:
        op = self.row.ops[index]
        owner = self.owner[OPS][index]
        position = OUTSIDE if owner is None else owner[1]
        after = op.phase is Phase.OPTIMIZER
        if after:
            inputs, outputs = map(self._map_optimizer_ref, op.inputs), map(self._map_optimizer_ref, op.outputs)
        else:
            inputs, outputs = (map(self._map_ref, refs, itertools.repeat(position)) for refs in (op.inputs, op.outputs))
        mutated_op = self._map_op(op.mutated_op, position, after)
        made = self.owner[OPS][op.mutated_op] if after and op.mutated_op != NO_INDEX else None
        if made is not None and made[1] == TEMPLATE:  # of position 2, or of a block that it stood for
            target = op.mutates[0]
            place = self.row.stand_ins.get(target) or self.row.own_place.get(target, (TEMPLATE,))
            block = place[0]
            mutated_op = self.row.in_row(OPS, made[0], block, made[2])
        return replace(
            op,
            call=self._map(CALLS, op.call, position),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            mutates=tuple([self._map_storage(number, position, after) for number in op.mutates]),
            mutated_op=mutated_op,
            forward_op=self._map_op(op.forward_op, position),
        )

    def _check_gradient(self, number: int) -> None:
        owner = None if number == NO_INDEX else self.owner[STORAGES][number]
        if owner is not None and owner[1] in COMPARED and self.row.storages[number].category is not Category.GRADIENT:
            raise NotRepeated("something other than the next block uses what a block made")

    def _owned(self) -> list[list[Form]]:
        """Return the ops that save each parameter and buffer of a block; the rest of their records is equal."""
        found = []
        numbers = [self.row.own[self.row.block_at[position]] for position in COMPARED]
        for three in zip(*numbers, strict=True):
            found.append(self.row.forms(OPS, [self.row.storages[number].saved_by for number in three]))
        return found

    def _map_storage_record(self, number: int, owned: list[list[Form]]) -> Storage:
        storage = self.row.storages[number]
        owner = self.owner[STORAGES][number]
        position = OUTSIDE if owner is None else owner[1]
        place = self.row.own_place.get(number)
        stays = storage.alloc_at == BEFORE_STEP and storage.free_after == storage.released == NO_INDEX
        if stays and not storage.saved_by and (place is None or not owned[place[1]]):
            return storage
        if place is not None:
            block, i = place
            if block in self.row.block_at:
                saved_by = [self._map_op(op, self.row.block_at.index(block)) for op in storage.saved_by]
            else:
                saved_by = [base + (block - TEMPLATE) * stride for base, stride in owned[i]]
        else:
            saved_by = self._map_saved_by(storage.saved_by, position)
        return replace(
            storage,
            alloc_at=self._map_op(storage.alloc_at, position),
            free_after=self._map_op(storage.free_after, position),
            released=self._map_op(storage.released, position),
            call=self._map(CALLS, storage.call, position),
            saved_by=tuple(sorted(saved_by)),
        )

    def _map_saved_by(self, saved_by: Sequence[int], position: int) -> list[int]:
        """Return the ops that save a storage: where those of positions 1, 2 and 3 do, those of all blocks do."""
        found: list[int] = []
        near: list[int] = []
        inside: list[set[tuple[int, int]]] = [set() for _ in range(FIRST + LAST)]
        for op in saved_by:
            owner = self.owner[OPS][op]
            if owner is not None and owner[1] in COMPARED:
                inside[owner[1]].add((owner[0], owner[2]))
                near.append(op)
            else:
                found.append(self.moved[OPS][op])
        sets = [inside[each] for each in COMPARED]
        if position in COMPARED or not (sets[0] == sets[1] == sets[2]):
            return found + [self._map_op(op, position) for op in near]
        for number, offset in sets[0]:
            found += [self.row.in_row(OPS, number, block, offset) for block in range(1, self.row.blocks - 1)]
        return found

    def _map_call_record(self, index: int) -> ModuleCall:
        call = self.row.calls[index]
        owner = self.owner[CALLS][index]
        position = OUTSIDE if owner is None else owner[1]
        last = NO_INDEX if call.backward_end == NO_INDEX else call.backward_end - 1
        begin = self.moved[OPS][call.begin]
        end = self.moved[OPS][call.end - 1] + 1 if call.end > call.begin else begin
        backward_end = self._map_op(last, position)
        return replace(
            call,
            parent=self._map(CALLS, call.parent, position),
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
    return _Replication(BlockRow(ops, storages, calls, paths, own, stand_ins)).run()
