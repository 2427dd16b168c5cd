"""The fully sharded data parallel runtime."""

import memfit.torch_private.version  # noqa: F401  first, so that a torch which does not work is refused with the reason

# isort: split
from memfit.sharded.checkpoint import Loaded, load, save, saves
from memfit.sharded.comm import CollectiveError, OrderError, RankMismatch, check_agreement
from memfit.sharded.earlier_optimizers import move_optimizer
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.full_parameters import full_parameters
from memfit.sharded.fully_shard import (
    find_runtime,
    get_runtime,
    no_sync,
    shard,
    unreduced_gradients,
)
from memfit.sharded.gradient_scaling import ShardedGradScaler, clip_grad_norm_, finite_gradients
from memfit.sharded.mesh import device_of, make_comms, resolve_mesh
from memfit.sharded.module_hooks import register_forward_method
from memfit.sharded.optimizer_state import plain_optimizer_state
from memfit.sharded.options import Precision, Reduction, Schedule, UnitOptions
from memfit.sharded.rank_coordinator import RankError
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.state_dict import full_state_dict, load_state_dict, sharded_state_dict

__all__ = [
    "CollectiveError",
    "FlatDTensor",
    "Loaded",
    "OrderError",
    "Precision",
    "RankError",
    "RankMismatch",
    "Reduction",
    "Schedule",
    "ShardedGradScaler",
    "ShardedRuntime",
    "UnitOptions",
    "check_agreement",
    "clip_grad_norm_",
    "device_of",
    "find_runtime",
    "finite_gradients",
    "full_parameters",
    "full_state_dict",
    "get_runtime",
    "load",
    "load_state_dict",
    "make_comms",
    "move_optimizer",
    "no_sync",
    "plain_optimizer_state",
    "register_forward_method",
    "resolve_mesh",
    "save",
    "saves",
    "shard",
    "sharded_state_dict",
    "unreduced_gradients",
]
