"""What sharding adds to a step: units, schedule, bytes, streams and times of FSDP2, memfit's runtime and DDP."""

from memfit.sharding.bubbles import find_bubbles
from memfit.sharding.captured_step import captured_ranks
from memfit.sharding.flat_layout import FlatLayout, Part, PartTable, Slot, group_alike
from memfit.sharding.flat_schedule import Schedule, UnitOptions
from memfit.sharding.host_step import HostStep
from memfit.sharding.joining import JoinableUnit, join_neighbours
from memfit.sharding.mesh_links import group_along, group_of
from memfit.sharding.options import ShardDtypes, ShardEngine, shard_bytes
from memfit.sharding.schedule import copies_ms, transfer_times
from memfit.sharding.sharded_step import (
    FlatOptions,
    Sharding,
    ShardOptions,
    ShardUnit,
    Transfer,
    repeated_blocks,
    shard,
)

__all__ = [
    "FlatLayout",
    "FlatOptions",
    "HostStep",
    "JoinableUnit",
    "Part",
    "PartTable",
    "Schedule",
    "ShardDtypes",
    "ShardEngine",
    "ShardOptions",
    "ShardUnit",
    "Sharding",
    "Slot",
    "Transfer",
    "UnitOptions",
    "captured_ranks",
    "copies_ms",
    "find_bubbles",
    "group_alike",
    "group_along",
    "group_of",
    "join_neighbours",
    "repeated_blocks",
    "shard",
    "shard_bytes",
    "transfer_times",
]
