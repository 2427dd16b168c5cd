"""Plans beside what really happens: verified before training, guarded during it."""

from memfit.verify.drift import Drift, PlanDrift
from memfit.verify.exactness import Difference, Exactness
from memfit.verify.explanation import Explanation
from memfit.verify.faults import OutOfMemory
from memfit.verify.given import step_at
from memfit.verify.guard import Guard, guard
from memfit.verify.verification import BytesBeside, MsBeside, Verification
from memfit.verify.verifying import verify

__all__ = [
    "BytesBeside",
    "Difference",
    "Drift",
    "Exactness",
    "Explanation",
    "Guard",
    "MsBeside",
    "OutOfMemory",
    "PlanDrift",
    "Verification",
    "guard",
    "step_at",
    "verify",
]
