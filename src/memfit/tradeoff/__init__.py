"""What each unit can give up for how much time: exact frontiers."""

from memfit.tradeoff.frontier import Frontier, Frontiers, build_frontier, build_frontiers
from memfit.tradeoff.policy import Policy
from memfit.tradeoff.units import LOSS, Unit, units

__all__ = ["LOSS", "Frontier", "Frontiers", "Policy", "Unit", "build_frontier", "build_frontiers", "units"]
