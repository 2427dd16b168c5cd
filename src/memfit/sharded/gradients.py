"""The gradients of a flat shard: collected as they come, summed over ranks, added to what is there.

Note [Parts]
What is sent to one rank is one part of a flat buffer. A part gets memory when all gradients that go into it are there,
and each of these is given up when it is copied: early in a unit's backward, when its activations are all still there,
nothing but the gradients themselves is, and late the whole gradients and the buffer are never there together. NCCL
wants all parts as one tensor, which then waits for the last gradient of the unit.

Each pass sums its gradients and adds them to those of the shard, so that accumulation takes no more memory than one
pass; without communication what was collected stays, and later passes add to it.

Where replicas are not to be summed over (`set_requires_all_reduce(False)`), what a pass leaves is the sum over the
ranks that shard, in `_partial`: no gradient of the shards yet. The next pass that sums over replicas adds it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from memfit.errors import InputError
from memfit.sharded.comm import ShardComm, SumTransfer, Transfer, join_parts
from memfit.sharded.custom_comm import AllReduceHook, sum_by
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.options import Precision, Reduction
from memfit.sharded.streams import Streams
from memfit.sharding import PartTable, Slot
from memfit.torch_private.autograd import optimizers_in_backward, post_accumulate_hooks

_NOTHING = nullcontext()


class Gradients:
    """What autograd made for one flat shard and has not been summed yet, and the sum that is under way."""

    def __init__(
        self, flat: FlatShard, replicas: ShardComm | None, streams: Streams, precision: Precision, reduction: Reduction
    ) -> None:
        self.flat = flat
        self._replicas = replicas
        self._streams = streams
        self._reduction = reduction
        self._kept_dtype = _floating(flat.dtype, precision.reduce_dtype if precision.keep_reduced_gradients else None)
        self._dtype = _floating(flat.dtype, reduction.compress or precision.reduce_dtype)
        self._before, self._after = divisors(self._ranks, self._dtype, reduction.divisor)
        self._parts: list[torch.Tensor | None] = [None] * flat.link.ranks
        self._collected: set[int] = set()
        self._held: dict[int, torch.Tensor] = {}
        self._filled: set[int] = set()
        self._table = PartTable(flat.layout, separate=flat.link.separate_parts)
        self._pieces = [
            {rank: _piece(slot, rank, flat.layout.shard_elements) for rank in ranks}
            for slot, ranks in zip(flat.layout.slots, self._table.ranks_of, strict=True)
        ]
        self._sum: SumTransfer | None = None
        self._total: torch.Tensor | None = None
        self._replica_sum: Transfer | None = None
        self._event: torch.cuda.Event | None = None
        self._about, self._tag = "", 0
        self.custom_reduce_scatter: Any = None
        self.all_reduce_hook: AllReduceHook | None = None
        self.all_reduce_stream: torch.cuda.Stream | None = None
        self._came: set[int] = set()
        self._missing: dict[int, torch.Tensor] = {}
        self.all_reduces = True
        self._partial: torch.Tensor | None = None
        self._partial_came: set[int] = set()
        flat.listener = self.collect

    @property
    def has_hook(self) -> bool:
        """Whether a hook of the user's sums them over the ranks that shard."""
        return self._reduction.hook is not None

    def use_replicas(self, replicas: ShardComm | None) -> None:
        """Sum over the replicas of a model around its own, which are the same ranks."""
        self._replicas = replicas

    def use_streams(self, streams: Streams) -> None:
        """Use the side streams of a model around its own."""
        self._streams = streams

    def set_divisor(self, divisor: float) -> None:
        """Divide by this from the next pass on."""
        self._before, self._after = divisors(self._ranks, self._dtype, divisor)

    @property
    def waiting(self) -> bool:
        """Whether gradients came that are not being summed, or not over replicas, though they are to be."""
        return bool(self._collected or (self.all_reduces and self.partial)) and not self.under_way

    @property
    def partial(self) -> bool:
        """Whether gradients of earlier passes were summed over the ranks that shard only."""
        return self._partial is not None

    @property
    def under_way(self) -> bool:
        """Whether a sum was begun and not finished."""
        return self._sum is not None or self._total is not None

    def collect(self, number: int, parameter: torch.Tensor) -> None:
        """Put a gradient that autograd has just finished into its slot."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        slot, inner = self.flat.layout.slots[number], self.flat.inners[number]
        if inner is not None:
            gradient = inner.gradient_of(gradient)
        if gradient.layout is not torch.strided:
            raise InputError(
                f"the gradient of {slot.names[0]!r} is sparse, which cannot be sharded; build its module with "
                "sparse=False"
            )
        if self.under_way:  # of this pass already: it came late, and is summed at the end of the backward
            self.finish()
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:  # in a backward it is not
            if number not in self._collected:
                self._collected.add(number)
                for rank in self._table.ranks_of[number]:
                    if rank in self._filled:  # it was frozen when that part was filled
                        self._write(number, rank, gradient, add=False)
                if not self._filled.issuperset(self._table.ranks_of[number]):
                    self._held[number] = gradient
                self._fill_complete(number)
            else:
                for rank in self._table.ranks_of[number]:
                    if rank in self._filled:
                        self._write(number, rank, gradient, add=True)
                if number in self._held:
                    self._held[number] = self._held[number].to(self._dtype).add_(gradient)

    def begin(self, tag: int, about: str) -> None:
        """Begin to reduce what was collected; a gradient that never came counts as zeros."""
        link = self.flat.link
        with torch.no_grad():
            for number in range(len(self.flat.parameters)):
                if number not in self._collected:
                    for rank in self._table.ranks_of[number]:
                        self._place(number, rank)[0].zero_()
            for rank in range(link.ranks):
                self._fill(rank)
            parts = [self._part(rank) for rank in range(link.ranks)]
        streams = self._streams
        streams.after_current(streams.reduce)
        with torch.no_grad(), streams.on(streams.reduce):
            if self._reduction.hook is not None:
                self._total = self._reduction.hook(join_parts(parts), link.group)
            elif self.custom_reduce_scatter is not None:
                self._total = sum_by(self.custom_reduce_scatter, link, parts, about)
            else:
                self._sum = link.sum_parts(parts, tag, about)
            self._event = streams.event(streams.reduce)
        self._about, self._tag = about, tag
        if self.all_reduces:
            self._collected |= self._partial_came  # which this pass gives, too

    def advance(self) -> bool:
        """Go on from the reduce-scatter to the all-reduce over replicas, or finish; return whether all is done.

        Each of both runs beside the backward of another unit.
        """
        if self.under_way and self._replicas is not None and self.all_reduces and self._replica_sum is None:
            self._exchange()
            return False
        self.finish()
        return True

    def _exchange(self) -> None:
        """Take the sum over shard ranks and begin that over replicas, where there are any."""
        if self._sum is not None:
            with torch.no_grad():
                self._total = self._sum.result()
            self._sum = None
        if not self.all_reduces or self._replicas is None:
            return
        if self._total is not None and self._replica_sum is None:
            streams = self._streams
            streams.wait(self._event)  # what a hook of the user began on the stream of reductions
            if self._partial is not None:
                with torch.no_grad():
                    self._total.add_(self._partial)
                self._partial = None
            self._parts = [None] * self.flat.link.ranks  # they were summed
            streams.after_current(streams.all_reduce)
            with streams.on(streams.all_reduce):
                self._replica_sum = self._replicas.sum_replicas(
                    self._total, self._tag, f"all-reduce {self._about.partition(' ')[2]}"
                )
                self._event = streams.event(streams.all_reduce)

    def finish(self) -> None:
        """Wait for the reduction, and set or accumulate the gradients of the shards."""
        with record_function("memfit::sum"), torch.no_grad():
            self._exchange()
            if self._total is None:
                return
            self._streams.wait(self._event)
            if self._replica_sum is not None:
                self._replica_sum.wait()
            elif self._replicas is not None:  # this pass is not summed over replicas
                self._partial = self._total if self._partial is None else self._partial.add_(self._total)
                self._partial_came |= self._collected
                self._forget()
                return
            total = self._total
            self._partial_came.clear()
            if self.all_reduce_hook is not None:
                streams, stream = self._streams, self.all_reduce_stream
                streams.after_current(stream)
                with streams.on(stream):
                    self.all_reduce_hook(total)
                    done = streams.event(stream)
                streams.wait(done)
            collected = frozenset(self._collected)
            self._came |= collected
            self._forget()
            if self._after != 1:
                total.div_(self._after)
            self._set_gradients(total.to(device=self.flat.shard.device, dtype=self._kept_dtype), collected)

    def resolve(self, used: Sequence[bool]) -> None:
        """Give the gradients of parameters that got none on this rank; those that no rank used get none."""
        missing, self._missing = self._missing, {}
        self._came.clear()
        with torch.no_grad():
            for number, gradient in missing.items():
                if used[number]:
                    self._set_gradient(number, gradient)

    @property
    def misses(self) -> bool:
        """Whether a parameter was summed for which this rank had no gradient."""
        return bool(self._missing)

    def came(self) -> list[bool]:
        """Return, for every parameter summed since `resolve` or now, whether this rank had a gradient for it."""
        numbers = range(len(self.flat.parameters))
        if self.under_way:
            return [number in self._came or number in self._collected for number in numbers]
        return [number in self._came or number not in self._missing for number in numbers]

    def unreduced(self, number: int) -> torch.Tensor | None:
        """Return the whole gradient of passes that were not to be sent, as autograd made it; None where none came."""
        if number not in self._collected or self.under_way:
            return None
        slot = self.flat.layout.slots[number]
        found = torch.zeros(slot.elements, dtype=self._dtype, device=self.flat.device)
        with torch.no_grad():
            for rank in self._table.ranks_of[number]:
                place, begin = self._place(number, rank) if rank in self._filled else (None, 0)
                if place is not None:
                    torch.mul(place, self._before, out=found[begin : begin + place.numel()])
            held = self._held.get(number)
            if held is not None:
                found.copy_(held.reshape(-1))
        return found.view(slot.shape)

    def drop(self) -> None:
        """Drop what was collected, and wait for a reduction that other ranks take part in."""
        self._came.clear()
        self._missing.clear()
        self._partial = None
        self._partial_came.clear()
        try:
            self._exchange()
            if self._replica_sum is not None:
                self._replica_sum.wait()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._parts = [None] * self.flat.link.ranks
        self._total = self._sum = self._replica_sum = self._event = None
        self._collected.clear()
        self._held.clear()
        self._filled.clear()

    def _fill_complete(self, number: int) -> None:
        """Fill the parts that a gradient was the last one missing in."""
        parameters, collected = self.flat.parameters, self._collected
        for rank in self._table.completed_by(
            number, lambda each: each in collected or not parameters[each].requires_grad
        ):
            self._fill(rank)

    def _fill(self, rank: int) -> None:
        """Copy the gradients that are held for a part into it, and give up those that no other part waits for."""
        if rank in self._filled:
            return
        self._filled.add(rank)
        with record_function("memfit::fill"):
            for number in self._table.slots_of[rank]:
                if number in self._held:
                    self._write(number, rank, self._held[number], add=False)
                    if all(each in self._filled for each in self._table.ranks_of[number]):
                        del self._held[number]

    def _write(self, number: int, rank: int, gradient: torch.Tensor, *, add: bool) -> None:
        """Put what belongs into a part of a gradient there."""
        slot = self.flat.layout.slots[number]
        place, begin = self._place(number, rank)
        if place.numel() == slot.elements:
            place = place.view(slot.shape)
        else:
            gradient = gradient.reshape(-1)[begin : begin + place.numel()]
        if add:
            place.add_(gradient, alpha=1 / self._before)
        elif self._before != 1 and gradient.dtype == place.dtype:
            torch.mul(gradient, 1 / self._before, out=place)
        else:
            place.copy_(gradient)
            if self._before != 1:
                place.div_(self._before)

    def _place(self, number: int, rank: int) -> tuple[torch.Tensor, int]:
        """Return where the piece of a gradient that belongs to a part goes, and its first element."""
        begin, end, first = self._pieces[number][rank]
        return self._part(rank)[begin:end], first

    def _part(self, rank: int) -> torch.Tensor:
        """Return what is sent to a rank, with zeros where no gradient goes."""
        part = self._parts[rank]
        if part is None:
            layout, link = self.flat.layout, self.flat.link
            ranks = [rank] if link.separate_parts else list(range(link.ranks))
            elements = layout.shard_elements
            made = torch.empty(len(ranks) * elements, dtype=self._dtype, device=self.flat.device)
            for each, piece in zip(ranks, made.split(elements), strict=True):
                for begin, end in layout.gaps(each):
                    piece[begin:end].zero_()
                self._parts[each] = piece
            part = self._parts[rank]
            assert part is not None
        return part

    def _set_gradients(self, total: torch.Tensor, collected: frozenset[int]) -> None:
        """Make the sum the gradients of the parameters that need one; what can be from other ranks only waits."""
        for number, parameter in enumerate(self.flat.parameters):
            if not parameter.requires_grad:
                continue
            gradient = self.flat.local(number, total)
            waiting = self._missing.pop(number, None)
            if waiting is not None:
                gradient = gradient.add_(waiting)
            if number in collected:
                self._set_gradient(number, gradient)
            else:
                self._missing[number] = gradient

    def _set_gradient(self, number: int, gradient: torch.Tensor) -> None:
        parameter = self.flat.parameters[number]
        there = parameter.grad
        if there is not None and not isinstance(there, FlatDTensor):  # a whole one, as of a loss with parameter.sum()
            spec = self.flat.flat_specs[number]
            own = spec.own(there.full_tensor() if spec.inner is None and isinstance(there, DTensor) else there)
            gradient = gradient.add_(own.to(gradient.device))
        if isinstance(there, FlatDTensor):
            there.local.add_(gradient)
        else:
            if parameter.dtype != gradient.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = self.flat.flat_specs[number].wrap(gradient)
        for hook in (post_accumulate_hooks(parameter) or {}).values():
            hook(parameter)
        optimizers = optimizers_in_backward(parameter)
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None

    @property
    def _ranks(self) -> int:
        return self.flat.link.ranks * (1 if self._replicas is None else self._replicas.ranks)


def _piece(slot: Slot, rank: int, shard_elements: int) -> tuple[int, int, int]:
    """Return which elements of a part a parameter has, from and up to, and the first of them in the parameter."""
    first = rank * shard_elements
    begin, end = max(slot.begin, first), min(slot.end, first + shard_elements)
    return begin - first, end - first, begin - slot.begin


def divisors(ranks: int, dtype: torch.dtype, divisor: float | None) -> tuple[float, float]:
    """Return by what gradients are divided before and after they are summed.

    Before it costs nothing where it is exact, since it is part of the copy into the slot; float16 could overflow in the
    sum or underflow before it, and gets about the square root of it on either side.
    """
    wanted = float(ranks if divisor is None else divisor)
    if dtype == torch.float16:
        before = 1.0
        while wanted % before == 0 and wanted / before > before:
            before *= 2
        return before, wanted / before
    exact = math.frexp(wanted)[0] == 0.5
    return (wanted, 1.0) if exact else (1.0, wanted)


def _floating(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the wanted dtype for a floating point one, else its own: mixed precision is for floating point only."""
    return wanted if wanted is not None and own.is_floating_point else own
