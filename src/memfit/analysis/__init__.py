"""What fills the peak, what holds it, levers, and how plans differ: frozen records that the reports show."""

from memfit.analysis.checkpointing import find_forced_ops
from memfit.analysis.comparison import Comparison, compare, reserves_more
from memfit.analysis.explaining import explain
from memfit.analysis.explanation import Checkpointing, HeldStorage, ModuleAtPeak, StepExplanation, StillHeld
from memfit.analysis.holders import allocation_bytes, round_to_block
from memfit.analysis.levers import BegunCaptures, Case, Lever, describe_shortfall, find_levers
from memfit.analysis.report import Report

__all__ = [
    "BegunCaptures",
    "Case",
    "Checkpointing",
    "Comparison",
    "HeldStorage",
    "Lever",
    "ModuleAtPeak",
    "Report",
    "StepExplanation",
    "StillHeld",
    "allocation_bytes",
    "compare",
    "describe_shortfall",
    "explain",
    "find_forced_ops",
    "find_levers",
    "reserves_more",
    "round_to_block",
]
