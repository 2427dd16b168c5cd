"""The fully sharded data parallel runtime."""

from memfit.sharded.accumulation import no_sync
from memfit.sharded.clip import clip_grad_norm_, finite_gradients
from memfit.sharded.errors import CollectiveError, OrderError, RankMismatch
from memfit.sharded.options import Precision, Reduction, Schedule, UnitOptions
from memfit.sharded.scaler import ShardedGradScaler
from memfit.sharded.sharding import shard

__all__ = [
    "CollectiveError",
    "OrderError",
    "Precision",
    "RankMismatch",
    "Reduction",
    "Schedule",
    "ShardedGradScaler",
    "UnitOptions",
    "clip_grad_norm_",
    "finite_gradients",
    "no_sync",
    "shard",
]
