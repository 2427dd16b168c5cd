"""Levers: what would lower the peak of a step, each with its effect worked out, the cheapest first."""

from memfit.analysis.levers.case import Basis, Case, Lever, describe_shortfall
from memfit.analysis.levers.early import EarlyCaptures
from memfit.analysis.levers.finding import LEVERS, find_levers

__all__ = ["LEVERS", "Basis", "Case", "EarlyCaptures", "Lever", "describe_shortfall", "find_levers"]
