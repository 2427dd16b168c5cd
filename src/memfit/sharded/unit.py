"""A unit: a module whose parameters are gathered together, and what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import nn

from memfit.sharded.flat import FlatShard
from memfit.sharded.gradients import Gradients
from memfit.sharded.links import Link, Transfer
from memfit.sharded.options import Precision, UnitOptions
from memfit.sharded.states import State, check_transition
from memfit.sharded.streams import Streams
from memfit.sharded.whole import Whole

_KINDS = 2
_FLATS = 64


class Run:
    """One forward of a unit that has a backward. Autograd's graph holds it, so that it goes when the graph does."""

    __slots__ = ("__weakref__", "began")

    def __init__(self) -> None:
        self.began = False


class Unit:
    """A module with its flat shards; the root has the empty name."""

    def __init__(
        self,
        *,
        number: int,
        name: str,
        module: nn.Module,
        flats: list[FlatShard],
        gradients: list[Gradients],
        options: UnitOptions,
        precision: Precision,
        streams: Streams,
        nearby: Link | None,
    ) -> None:
        self.number = number
        self.name = name
        self.module = module
        self.flats = flats
        self.gradients = gradients
        self.options = options
        self.state = State.IDLE
        self.gathered = False
        self.stale = False
        self.runs: WeakSet[Run] = WeakSet()
        self._precision = precision
        self._streams = streams
        self._nearby = nearby
        self._resharded = False
        self._wholes: list[Whole] = []
        self._transfers: list[Transfer] | None = None
        self._event: torch.cuda.Event | None = None

    def __repr__(self) -> str:
        return f"Unit({self.title})"

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"unit {self.name!r}" if self.name else "the root unit"

    @property
    def in_flight(self) -> bool:
        """Whether a gather was begun and not waited for."""
        return self._transfers is not None

    @property
    def bytes(self) -> int:
        """What its gathered parameters take."""
        return sum(flat.whole(self._dtype(flat)).bytes for flat in self.flats)

    def go(self, state: State) -> None:
        """Take the next state, or refuse."""
        check_transition(self.title, self.state, state)
        self.state = state

    def begin_gather(self, phase: str) -> None:
        """Begin to gather all parameters, unless that is done or under way.

        A forward replaces those of an earlier pass.
        """
        if self.in_flight or (self.gathered and not (self.stale and phase == "forward")):
            return
        about = f"gather of {self.title} in {phase}"
        self._wholes = [flat.whole(self._dtype(flat)) for flat in self.flats]
        self._transfers = []
        for number, (flat, whole) in enumerate(zip(self.flats, self._wholes, strict=True)):
            tag = self._tag(number, 0)
            if self._resharded and self._nearby is not None:
                transfer = flat.begin_regather(whole, self._nearby, tag, about)
            else:
                transfer = flat.begin_gather(whole, tag, about)
            if transfer is not None:
                self._transfers.append(transfer)
        self._event = self._streams.event(self._streams.gather)

    def wait(self) -> None:
        """Wait for the gather that was begun."""
        if self._transfers is None:
            return
        transfers, self._transfers = self._transfers, None
        with self._streams.on(self._streams.gather):
            for transfer in transfers:
                transfer.wait()
            self._event = self._streams.event(self._streams.gather)
        self._streams.wait(self._event)
        self._resharded = False
        self.gathered, self.stale = True, False

    def show_whole(self) -> None:
        """Make the module hold gathered parameters."""
        for flat, whole in zip(self.flats, self._wholes, strict=True):
            flat.show_whole(whole)

    def show_shards(self) -> None:
        """Make the module hold shards."""
        for flat in self.flats:
            flat.show_shards()

    def free(self) -> None:
        """Give up the gathered parameters."""
        self.wait()
        self.gathered = self._resharded = False
        for flat in self.flats:
            flat.free()

    def reshard(self) -> None:
        """Give up the gathered parameters, or keep one part of them for a smaller group."""
        if self._nearby is None or not self.gathered:
            self.free()
            return
        for flat, whole in zip(self.flats, self._wholes, strict=True):
            flat.keep_part(whole, self._nearby)
        self.gathered, self._resharded = False, True

    def begin_sum(self, *, everything: bool = False) -> None:
        """Begin to sum gradients over ranks: of all flat shards that train, or of those that have any."""
        for number, gradients in enumerate(self.gradients):
            if gradients.under_way or not (gradients.waiting or (everything and gradients.flat.trains)):
                continue
            gradients.begin(self._tag(number, 1), f"reduction of {self.title}'s gradients in backward")

    def each_gradients(self, act: Callable[[Gradients], None]) -> None:
        """Do the same with the gradients of every flat shard."""
        for gradients in self.gradients:
            act(gradients)

    def _tag(self, flat: int, kind: int) -> int:
        return (self.number * _FLATS + flat) * _KINDS + kind

    def _dtype(self, flat: FlatShard) -> torch.dtype:
        wanted = self._precision.param_dtype
        if wanted is None or not flat.dtype.is_floating_point:
            return flat.dtype
        return flat.dtype if self._precision.full_in_eval and not self.module.training else wanted
