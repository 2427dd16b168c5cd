"""What fills the peak, what holds it, levers, and how plans differ: frozen records that the reports show."""

from memfit.analysis.checkpointing import find_forced_ops
from memfit.analysis.comparison import Comparison, compare, reserves_more
from memfit.analysis.estimating import Estimate, estimate
from memfit.analysis.explaining import explain
from memfit.analysis.explanation import Checkpointing, HeldStorage, ModuleAtPeak, StepExplanation, StillHeld
from memfit.analysis.holders import allocation_bytes, round_to_block
from memfit.analysis.levers import Case, EarlyCaptures, Lever, describe_shortfall, find_levers
from memfit.analysis.mesh_dimensions import MeshDimension, find_dimensions
from memfit.analysis.report import Report

__all__ = [
    "Case",
    "Checkpointing",
    "Comparison",
    "EarlyCaptures",
    "Estimate",
    "HeldStorage",
    "Lever",
    "MeshDimension",
    "ModuleAtPeak",
    "Report",
    "StepExplanation",
    "StillHeld",
    "allocation_bytes",
    "compare",
    "describe_shortfall",
    "estimate",
    "explain",
    "find_dimensions",
    "find_forced_ops",
    "find_levers",
    "reserves_more",
    "round_to_block",
]
