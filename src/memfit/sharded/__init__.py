"""The fully sharded data parallel runtime."""

from memfit.sharded.errors import CollectiveError, OrderError, RankMismatch
from memfit.sharded.options import Precision, Reduction, Schedule, UnitOptions
from memfit.sharded.sharding import shard

__all__ = [
    "CollectiveError",
    "OrderError",
    "Precision",
    "RankMismatch",
    "Reduction",
    "Schedule",
    "UnitOptions",
    "shard",
]
