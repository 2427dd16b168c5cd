"""Engines after a step that ended midway on some rank: back to between two steps, on every rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import MissingFeatureError
from memfit.plans import Engine, Plan, wrappers_of
from memfit.torch_private.process_groups import reset_reducer
from memfit.torch_private.wrappers import is_fully_sharded

if TYPE_CHECKING:
    from memfit.sharded import ShardedRuntime

_KNOWN = ("fully_shard", "CheckpointWrapper")


def engine_of(plan: Plan, model: nn.Module) -> Engine:
    """Return the engine that runs a model: `local` where something else than memfit wraps it, or nothing does."""
    if _runtime(model) is not None:
        return "sharded"
    return "fsdp2" if plan.shard is not None else "local"


class EngineState:
    """What an engine is between two steps, to go back to when the next one does not end on every rank.

    memfit's own runtime numbers its passes, and ranks must agree on them. FSDP2 and DDP know only the pass under way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        runtime = _runtime(model)
        self._position = None if runtime is None else runtime.position()
        self.holds_gradients = _holds_gradients(model)
        """Whether gradients of earlier passes wait to be reduced, which going back drops."""

    def restore(self) -> None:
        """Drop the pass under way; the groups were cut."""
        runtime = _runtime(self._model)
        if runtime is not None and self._position is not None:
            runtime.rewind(self._position)
        if any(is_fully_sharded(module) for module in self._model.modules()):
            from memfit.torch_private.fully_shard import reset_iteration  # such a model has loaded it

            reset_iteration(self._model)
        for module in self._model.modules():
            if isinstance(module, DistributedDataParallel):
                reset_reducer(module)

    def renewed(self) -> None:
        """Go on with groups whose connections were made anew."""
        runtime = _runtime(self._model)
        if runtime is not None:
            runtime.renewed()


def check_known(model: nn.Module) -> None:
    """Refuse wrappers whose state after half a step nothing here can restore."""
    unknown = [name for name in wrappers_of(model) if name not in _KNOWN and "DistributedDataParallel" not in name]
    if unknown:
        raise MissingFeatureError(
            f"the model is in {', '.join(unknown)}, which cannot be brought back to between two steps after one that a "
            "rank has left: steps on several ranks are run again with fully_shard, DDP and memfit's own runtime; leave "
            "optimizer= out to watch steps only"
        )


def _holds_gradients(model: nn.Module) -> bool:
    runtime = _runtime(model)
    if runtime is not None:
        return runtime.holds_gradients
    if not any(is_fully_sharded(module) for module in model.modules()):
        return False
    from memfit.torch_private.fully_shard import holds_whole_gradients

    return holds_whole_gradients(model)


def _runtime(model: nn.Module) -> ShardedRuntime | None:
    """Return memfit's runtime of a model; whoever has sharded one has loaded it, which takes long."""
    sharded = sys.modules.get("memfit.sharded")
    return None if sharded is None else sharded.find_runtime(model)
