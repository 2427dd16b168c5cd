"""The plan document: decisions for one step, what they are predicted to do, and the step that they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.lazy_names import lazy_names
from memfit.plans.build import build_checkpoint, build_plan, build_policy
from memfit.plans.document import Plan, load
from memfit.plans.mismatch import (
    PlanMismatch,
    describe_input,
    describe_parameter,
    find_model_differences,
    find_optimizer_differences,
)
from memfit.plans.planning import curve, plan, plan_problem
from memfit.plans.record import (
    Blocker,
    Checkpoint,
    ChunkedLossRecord,
    DdpPlan,
    Decision,
    Engine,
    Estimate,
    InputRecord,
    LoopRecord,
    MicroBatchRecord,
    ModelCallRecord,
    OffloadLinkRecord,
    OutputRecord,
    ParameterRecord,
    PeakAt,
    Prediction,
    ShardedUnit,
    ShardPlan,
    TargetRecord,
    TraceRecord,
    UnitOp,
)
from memfit.plans.reservation import EXPANDABLE, Reservation, Room, reservation_under, with_room
from memfit.plans.resolve import (
    Inputs,
    Model,
    StepInputs,
    check_nothing_beside,
    find_cast,
    resolve_cost,
    resolve_options,
)
from memfit.plans.setting_problems import units_with_loss
from memfit.plans.settings import MOST_CHUNKS
from memfit.plans.shard_options import shard_options_of
from memfit.plans.trace_record import build_trace_record, describe_peak, peak_at
from memfit.plans.wrappers import named_modules, unwrap, wrappers_of

if TYPE_CHECKING:
    from memfit.plans.alternatives import Alternative, find_alternatives
    from memfit.plans.device_result import DevicePoint, DeviceSearch
    from memfit.plans.mesh_result import MeshPoint, MeshSearch, display_mesh
    from memfit.plans.search_result import Over, Search, SearchInterrupted, SearchPoint
    from memfit.plans.searching import search

__all__ = [
    "EXPANDABLE",
    "MOST_CHUNKS",
    "Alternative",
    "Blocker",
    "Checkpoint",
    "ChunkedLossRecord",
    "DdpPlan",
    "Decision",
    "DevicePoint",
    "DeviceSearch",
    "Engine",
    "Estimate",
    "InputRecord",
    "Inputs",
    "LoopRecord",
    "MeshPoint",
    "MeshSearch",
    "MicroBatchRecord",
    "Model",
    "ModelCallRecord",
    "OffloadLinkRecord",
    "OutputRecord",
    "Over",
    "ParameterRecord",
    "PeakAt",
    "Plan",
    "PlanMismatch",
    "Prediction",
    "Reservation",
    "Room",
    "Search",
    "SearchInterrupted",
    "SearchPoint",
    "ShardPlan",
    "ShardedUnit",
    "StepInputs",
    "TargetRecord",
    "TraceRecord",
    "UnitOp",
    "build_checkpoint",
    "build_plan",
    "build_policy",
    "build_trace_record",
    "check_nothing_beside",
    "curve",
    "describe_input",
    "describe_parameter",
    "describe_peak",
    "display_mesh",
    "find_alternatives",
    "find_cast",
    "find_model_differences",
    "find_optimizer_differences",
    "load",
    "named_modules",
    "peak_at",
    "plan",
    "plan_problem",
    "reservation_under",
    "resolve_cost",
    "resolve_options",
    "search",
    "shard_options_of",
    "units_with_loss",
    "unwrap",
    "with_room",
    "wrappers_of",
]

# A plan needs none of these.
__getattr__ = lazy_names(
    __name__,
    {
        "memfit.plans.alternatives": ("Alternative", "find_alternatives"),
        "memfit.plans.device_result": ("DevicePoint", "DeviceSearch"),
        "memfit.plans.mesh_result": ("MeshPoint", "MeshSearch", "display_mesh"),
        "memfit.plans.search_result": ("Over", "Search", "SearchInterrupted", "SearchPoint"),
        "memfit.plans.searching": ("search",),
    },
)
