"""The gradients of a flat shard: collected as they come, summed over ranks, added to what is there.

A whole gradient is copied into its slot of one buffer and given up as soon as autograd has it. Each pass sums its
gradients and adds them to those of the shard, so that accumulation takes no more memory than one pass; without
communication the buffer stays, and later passes add to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from memfit.errors import InputError
from memfit.sharded.flat import FlatShard
from memfit.sharded.links import Link, SumTransfer, Transfer
from memfit.sharded.options import Precision, Reduction
from memfit.sharded.streams import Streams


class Gradients:
    """What autograd made for one flat shard and has not been summed yet, and the sum that is under way."""

    def __init__(
        self, flat: FlatShard, replicas: Link | None, streams: Streams, precision: Precision, reduction: Reduction
    ) -> None:
        self.flat = flat
        self.holds_missing = True
        self._replicas = replicas
        self._streams = streams
        self._reduction = reduction
        self._kept_dtype = _floating(flat.dtype, precision.reduce_dtype if precision.keep_reduced_gradients else None)
        self._dtype = _floating(flat.dtype, reduction.compress or precision.reduce_dtype)
        self._before, self._after = divisors(self._ranks, self._dtype, reduction.divisor)
        self._buffer: torch.Tensor | None = None
        self._collected: set[int] = set()
        self._sum: SumTransfer | None = None
        self._total: torch.Tensor | None = None
        self._replica_sum: Transfer | None = None
        self._event: torch.cuda.Event | None = None
        self._about = ""
        self._missing: dict[int, torch.Tensor] = {}
        flat.listener = self.collect

    @property
    def waiting(self) -> bool:
        """Whether gradients came that are not being summed."""
        return self._buffer is not None and self._sum is None

    @property
    def under_way(self) -> bool:
        """Whether a sum was begun and not finished."""
        return self._sum is not None or self._total is not None

    @property
    def collected(self) -> frozenset[int]:
        """Numbers of the parameters whose gradients came since the last sum."""
        return frozenset(self._collected)

    def collect(self, number: int, parameter: torch.Tensor) -> None:
        """Put a gradient that autograd has just finished into its slot."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        slot = self.flat.layout.slots[number]
        if gradient.layout is not torch.strided:
            raise InputError(
                f"the gradient of {slot.names[0]!r} is sparse, which cannot be sharded; build its module with "
                "sparse=False"
            )
        if self.under_way:  # of this pass already: it came late, and is summed at the end of the backward
            self.finish()
        with torch.no_grad():
            place = self._slots()[slot.begin : slot.end].view(slot.shape)
            if number in self._collected:
                place.add_(gradient, alpha=1 / self._before)
            elif self._before != 1 and gradient.dtype == place.dtype:
                torch.mul(gradient, 1 / self._before, out=place)
            else:
                place.copy_(gradient)
                if self._before != 1:
                    place.div_(self._before)
        self._collected.add(number)

    def begin(self, tag: int, about: str) -> None:
        """Begin to sum over ranks what was collected; a gradient that never came counts as zeros."""
        buffer = self._slots()
        with torch.no_grad():
            for number, slot in enumerate(self.flat.layout.slots):
                if number not in self._collected:
                    buffer[slot.begin : slot.end].zero_()
        streams, link = self._streams, self.flat.link
        streams.after_current(streams.reduce)
        with torch.no_grad(), streams.on(streams.reduce):
            if self._reduction.hook is not None:
                self._total = self._reduction.hook(buffer, link.group)
            else:
                self._sum = link.sum_parts(buffer, tag, about)
            self._event = streams.event(streams.reduce)
        self._about = about

    def exchange(self) -> None:
        """Take the sum over shard ranks and begin that over replicas, where there are any."""
        if self._sum is not None:
            with torch.no_grad():
                self._total = self._sum.result()
            self._sum = None
        if self._total is not None and self._replicas is not None and self._replica_sum is None:
            streams = self._streams
            streams.after_current(streams.all_reduce)
            with streams.on(streams.all_reduce):
                self._replica_sum = self._replicas.all_reduce(
                    self._total, f"all-reduce {self._about.partition(' ')[2]}"
                )
                self._event = streams.event(streams.all_reduce)

    def finish(self) -> None:
        """Wait for the sum and make it, or add it to, the gradients of the shards."""
        self.exchange()
        if self._total is None:
            return
        self._streams.wait(self._event)
        if self._replica_sum is not None:
            self._replica_sum.wait()
        total = self._total
        collected = self.collected
        self._forget()
        with torch.no_grad():
            if self._after != 1:
                total.div_(self._after)
            self._give(total.to(device=self.flat.shard.device, dtype=self._kept_dtype), collected)

    def resolve(self, used: Sequence[bool]) -> None:
        """Give the gradients of parameters that got none on this rank; those that no rank used get none."""
        missing, self._missing = self._missing, {}
        with torch.no_grad():
            for number, gradient in missing.items():
                if used[number]:
                    self._give_one(self.flat.parameters[number], gradient)

    def came(self) -> list[bool]:
        """For every parameter, whether this rank had a gradient for it in the sums since `resolve`."""
        return [number not in self._missing for number in range(len(self.flat.parameters))]

    def drop(self) -> None:
        """Give up what was collected, and wait for a sum that other ranks take part in."""
        try:
            self.exchange()
            if self._replica_sum is not None:
                self._replica_sum.wait()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._buffer = self._total = self._sum = self._replica_sum = self._event = None
        self._collected.clear()

    def _slots(self) -> torch.Tensor:
        """The buffer, with zeros where no gradient goes."""
        if self._buffer is None:
            layout = self.flat.layout
            self._buffer = torch.empty(layout.elements, dtype=self._dtype, device=self.flat.device)
            end = 0
            for slot in layout.slots:
                if end < slot.begin:
                    self._buffer[end : slot.begin].zero_()
                end = slot.end
            self._buffer[end:].zero_()
        return self._buffer

    def _give(self, total: torch.Tensor, collected: frozenset[int]) -> None:
        """Make the sum the gradients of the parameters that need one; what came from other ranks only may wait."""
        for number, parameter in enumerate(self.flat.parameters):
            if not parameter.requires_grad:
                continue
            gradient = self.flat.local(number, total)
            if number in collected or not self.holds_missing:
                self._missing.pop(number, None)
                self._give_one(parameter, gradient)
            elif number in self._missing:
                self._missing[number] = self._missing[number] + gradient
            else:
                self._missing[number] = gradient

    def _give_one(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        else:
            if parameter.dtype != gradient.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)

    @property
    def _ranks(self) -> int:
        return self.flat.link.ranks * (1 if self._replicas is None else self._replicas.ranks)


def divisors(ranks: int, dtype: torch.dtype, divisor: float | None) -> tuple[float, float]:
    """By what gradients are divided before and after they are summed.

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
    """Mixed precision is for floating point only."""
    return wanted if wanted is not None and own.is_floating_point else own
