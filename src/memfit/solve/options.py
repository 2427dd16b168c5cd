"""What a caller may ask of the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from memfit.errors import InputError
from memfit.paths import MODEL_LABEL, around, module_label
from memfit.sharding import ShardOptions
from memfit.solve.decisions import (
    DEFAULT_DECISIONS,
    Decided,
    DecidedGroup,
    expand_decisions,
    resolve_decisions,
)
from memfit.solve.milp import Limits
from memfit.text import close_names, did_you_mean
from memfit.tradeoff import Unit

POINTS = 24
_SHOWN = 3
"""What plans print for the model itself, whose path is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """Which units may be, must not be and must be checkpointed, by name; how parameters are sharded; when to stop.

    `ac_units` restricts the candidates to these and to those in `force`. A name stands for all calls of the module,
    `name#1` for its second; the model itself is `(model)`. It names that unit alone: `forbid=("h.0",)` says nothing
    of `h.0.mlp`, which is a unit of its own.
    `optimizer` lets a plan choose how the optimizer does its step: one tensor after another, on lists, or fused.
    `micro_batches` is `"same"` for one policy in all micro-batches of a step, however many of them a loop really runs;
    with `"own"` each has its own, which is a little faster and needs a loop that keeps to the step exactly.
    `offload` lets units offload what they hold for their backward to the host, where the device has a link to it.
    `decide` are further kinds of decisions that a plan may take (docs/design/joint.md): kinds by name, `"exact"` for
    all that keep numbers bit for bit, `"all"` for those too that change the order of sums. What an option or `shard`
    gives a value to stays as it is unless its kind is named; `fixed` are kinds that stay in any case.
    Unless given, a plan decides what `DEFAULT_DECISIONS` says, where that may gain: the usual values of `shard` count
    as not given, so that `fixed=("reshard", "prefetch")` keeps these two. `offload` and `optimizer` are the same
    as these kinds by name, but that on a CPU what `offload` finds is kept however little it gains; `offload="hidden"`
    has every unit offload as much as compute hides, beside those of `force`, and decides the rest. `loss_chunks` fixes
    the number of chunks of the loss, and 1 leaves it whole.
    """

    ac_units: tuple[str, ...] | None = None
    forbid: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    shard: ShardOptions = field(default_factory=ShardOptions)
    limits: Limits = field(default_factory=Limits)
    points: int = POINTS
    optimizer: bool = False
    micro_batches: Literal["same", "own"] = "same"
    offload: bool | Literal["hidden"] = False
    decide: DecidedGroup | tuple[Decided | DecidedGroup, ...] | None = None
    fixed: tuple[Decided, ...] = ()
    loss_chunks: int | None = None

    def __post_init__(self) -> None:
        for field_name in ("ac_units", "forbid", "force"):
            names = getattr(self, field_name)
            if isinstance(names, str):
                raise InputError(f"{field_name}={names!r} is one name; give a tuple of names, ({names!r},)")
            if names is None and field_name == "ac_units":
                continue
            if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
                raise InputError(f"{field_name} is {names!r}; give a tuple of names of units, such as ('layers.0',)")
            object.__setattr__(self, field_name, tuple(name.removeprefix(MODEL_LABEL) for name in names))
        clash = sorted(set(self.force) & set(self.forbid))
        if clash:
            raise InputError(f"{module_label(clash[0])!r} is both forced and forbidden; leave it out of one")
        for field_name, kind in (("shard", ShardOptions), ("limits", Limits)):
            value = getattr(self, field_name)
            if not isinstance(value, kind):
                raise InputError(f"{field_name} is {value!r}; write {field_name}=memfit.solve.{kind.__name__}(...)")
        if self.micro_batches not in ("same", "own"):
            raise InputError(f"micro_batches is {self.micro_batches!r}; write 'same' or 'own'")
        if not isinstance(self.offload, bool) and self.offload != "hidden":
            raise InputError(f"offload is {self.offload!r}; write True, False or 'hidden'")
        self._check_decisions()
        if isinstance(self.points, bool) or not isinstance(self.points, int) or self.points < 1:
            raise InputError(f"points is {self.points!r}; write a whole number of at least 1")

    def _check_decisions(self) -> None:
        chunks = self.loss_chunks
        if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
            raise InputError(f"loss_chunks is {chunks!r}; write a whole number of at least 1, which leaves it whole")
        object.__setattr__(self, "fixed", resolve_decisions(self.fixed, "fixed"))
        if self.decide is None:
            return
        named = resolve_decisions(self.decide, "decide")
        object.__setattr__(self, "decide", named)
        for name in ("offload", "optimizer"):
            if name in named and name not in self.fixed:
                object.__setattr__(self, name, getattr(self, name) or True)

    @property
    def decided(self) -> tuple[Decided, ...]:
        """The kinds of decisions that plans take, where the step, the target and the engine allow them."""
        given = self._given()
        named = self.decide
        if named is None:
            named = tuple(kind for kind in DEFAULT_DECISIONS if kind not in given)
        flags: dict[Decided, bool] = {"offload": bool(self.offload), "optimizer": self.optimizer}
        asked = [kind for kind, flag in flags.items() if flag]
        kinds = expand_decisions((*named, *asked), given)
        return tuple(kind for kind in kinds if kind not in self.fixed or kind in asked)

    def _given(self) -> list[Decided]:
        """Return the kinds of decisions whose values are given."""
        shard = self.shard
        values: dict[Decided, bool] = {
            "loss": self.loss_chunks is not None,
            "units": shard.units is not None,
            "replicas": shard.replicas != 1,
            "prefetch": shard.prefetch != 1,
            "reshard": bool(shard.keep_last) or shard.reshard_after_forward is not True,
            "cpu_offload": shard.cpu_offload,
        }
        return [kind for kind, given in values.items() if given]

    def allowed(self, units: Sequence[Unit], sharded: Sequence[str]) -> tuple[Unit, ...]:
        """Return units that may be checkpointed; none that contains a unit whose parameters are gathered by itself."""
        for names in (self.ac_units or (), self.forbid, self.force):
            for name in names:
                _known(name, units)
        containing = {path for name in sharded for path in around(name)}
        return tuple(
            unit
            for unit in units
            if (self.ac_units is None or _named(unit, self.ac_units) or _named(unit, self.force))
            and not _named(unit, self.forbid)
            and (unit.kind == "loss" or unit.module not in containing)
        )

    def forced(self, units: Sequence[Unit]) -> frozenset[str]:
        """Return the names of the units that must be checkpointed."""
        return frozenset(unit.name for unit in units if _named(unit, self.force))


def _named(unit: Unit, names: Sequence[str]) -> bool:
    return unit.name in names or (unit.kind != "loss" and unit.module in names)


def _known(name: str, units: Sequence[Unit]) -> None:
    names = {unit.name for unit in units} | {unit.module for unit in units if unit.kind != "loss"}
    if name not in names:
        near = _near(str(name), sorted(names))
        hint = did_you_mean(map(repr, near), _some(sorted(names - {""})))
        raise InputError(f"no unit is called {module_label(name)!r}; {hint}")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return f"there are {', '.join(names[:_SHOWN])}{f' and {more} more' if more > 0 else ''}"


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Return names that may have been meant: those that differ in how they begin, then those that look alike."""
    found = [each for each in names if each and (each.endswith(f".{name}") or name.endswith(f".{each}"))]
    ends: dict[str, list[str]] = {}
    for each in names:
        parts = each.split(".")
        for place in range(len(parts)):
            ends.setdefault(".".join(parts[place:]), []).append(each)
    for close in close_names(name, ends, most=_SHOWN):
        found += ends[close]
    return list(dict.fromkeys(found))[:_SHOWN]
