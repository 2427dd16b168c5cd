"""What runs in training: a plan on its model, and a loss in chunks."""

from memfit.capture import CHUNKS, chunked_cross_entropy
from memfit.engines.attachment import unplanned
from memfit.engines.interrupted import EngineState, check_known, engine_of
from memfit.engines.local import Applied, apply, plan_of_model, remove, replace_policies
from memfit.engines.loss import has_planned_loss, plan_loss
from memfit.engines.recompute import RecomputedCall
from memfit.engines.selection import check_ranks, resolve_engine
from memfit.engines.tape import Tape

__all__ = [
    "CHUNKS",
    "Applied",
    "EngineState",
    "RecomputedCall",
    "Tape",
    "apply",
    "check_known",
    "check_ranks",
    "chunked_cross_entropy",
    "engine_of",
    "has_planned_loss",
    "plan_loss",
    "plan_of_model",
    "remove",
    "replace_policies",
    "resolve_engine",
    "unplanned",
]
