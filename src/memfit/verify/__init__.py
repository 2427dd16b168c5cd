"""Plans beside what really happens: peak, time and gradients, measured."""

from memfit.verify.exactness import Difference, Exactness
from memfit.verify.resolve import step_at
from memfit.verify.verification import BytesCheck, MsCheck, Verification
from memfit.verify.verifying import verify

__all__ = ["BytesCheck", "Difference", "Exactness", "MsCheck", "Verification", "step_at", "verify"]
