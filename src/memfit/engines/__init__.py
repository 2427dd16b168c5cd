"""What runs in training: a plan on its model, and a loss in chunks."""

from memfit.engines.attachment import unplanned
from memfit.engines.local import Applied, apply, plan_of_model, remove
from memfit.engines.loss import chunked_cross_entropy, has_planned_loss, plan_loss

__all__ = [
    "Applied",
    "apply",
    "chunked_cross_entropy",
    "has_planned_loss",
    "plan_loss",
    "plan_of_model",
    "remove",
    "unplanned",
]
