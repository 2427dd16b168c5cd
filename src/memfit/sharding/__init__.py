"""What sharding adds to a step: units, schedule, bytes, streams and times of FSDP2, memfit's runtime and DDP."""

from memfit.sharding.shard import Sharding, ShardOptions, ShardUnit, repeated_blocks, shard

__all__ = ["ShardOptions", "ShardUnit", "Sharding", "repeated_blocks", "shard"]
