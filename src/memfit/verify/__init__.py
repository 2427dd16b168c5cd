"""Plans beside what really happens: peak, time and gradients, measured."""

from memfit.verify.engine_calibration import calibrate_engines
from memfit.verify.exactness import Difference, Exactness
from memfit.verify.faults import FailedAt, is_out_of_memory, locate_failure, parse_asked_bytes, release
from memfit.verify.measure import mapped_bytes, measure_rise, step_ms
from memfit.verify.prediction import capture_for_plan, replay_on_ranks, replay_plan, without_state
from memfit.verify.rank_messages import (
    describe_failure,
    follows_another,
    forget_message_group,
    gather_objects,
    message_group,
)
from memfit.verify.resolve import resolve_step, step_at
from memfit.verify.state import Found, generators, set_generators, tensors_in
from memfit.verify.tuning import TimedPlan, Tuning, tune
from memfit.verify.verification import TIME_TOLERANCE, BytesCheck, MsCheck, RankCheck, Verification
from memfit.verify.verifying import verify

__all__ = [
    "TIME_TOLERANCE",
    "BytesCheck",
    "Difference",
    "Exactness",
    "FailedAt",
    "Found",
    "MsCheck",
    "RankCheck",
    "TimedPlan",
    "Tuning",
    "Verification",
    "calibrate_engines",
    "capture_for_plan",
    "describe_failure",
    "follows_another",
    "forget_message_group",
    "gather_objects",
    "generators",
    "is_out_of_memory",
    "locate_failure",
    "mapped_bytes",
    "measure_rise",
    "message_group",
    "parse_asked_bytes",
    "release",
    "replay_on_ranks",
    "replay_plan",
    "resolve_step",
    "set_generators",
    "step_at",
    "step_ms",
    "tensors_in",
    "tune",
    "verify",
    "without_state",
]
