"""What runs a plan."""

from memfit.engines.attachment import unplanned
from memfit.engines.local import Applied, apply, plan_of_model, remove

__all__ = ["Applied", "apply", "plan_of_model", "remove", "unplanned"]
