"""Out of memory and drift, said in words: explain, replan, repeat."""

from memfit.recovery.drift import Drift, PlanDrift
from memfit.recovery.explanation import Explanation, OutOfMemory
from memfit.recovery.guarding import Guard, guard
from memfit.recovery.replan import loss_is_outside

__all__ = ["Drift", "Explanation", "Guard", "OutOfMemory", "PlanDrift", "guard", "loss_is_outside"]
