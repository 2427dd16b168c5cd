"""What sharding adds to a step: bytes that are there from one op to another."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture import NEVER, Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bytes that sharding adds, there while ops `begin` up to (not including) `end` run.

    `begin` is `NEVER` for what is there before the step, `end` is `NEVER` for what stays. With `ahead` it is made
    before op `begin` and before a unit that runs again there, as a gather is; otherwise by the op, as a gradient is.
    `made_order` and `freed_order` are its places in what happens between the same two ops; `NEVER` is before all
    of that. What has them may be made and freed between the same two ops.
    """

    category: Category
    size_bytes: int
    begin: int
    end: int
    ahead: bool = True
    made_order: int = NEVER
    freed_order: int = NEVER
    module: str = ""
