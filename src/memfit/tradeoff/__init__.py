"""What each unit can give up for how much time: exact frontiers, and the prototype's statistics and greedy order."""

from memfit.tradeoff.curve import tradeoff_curve
from memfit.tradeoff.estimator import SACEstimator
from memfit.tradeoff.frontier import Frontier, Frontiers, frontier_of, frontiers
from memfit.tradeoff.greedy import greedy_order
from memfit.tradeoff.policy import Policy
from memfit.tradeoff.sac import MSPS, SACGreedyOrderMeta, SACStats, SACTradeOffStats, sac_stats
from memfit.tradeoff.units import LOSS, Unit, units

__all__ = [
    "LOSS",
    "MSPS",
    "Frontier",
    "Frontiers",
    "Policy",
    "SACEstimator",
    "SACGreedyOrderMeta",
    "SACStats",
    "SACTradeOffStats",
    "Unit",
    "frontier_of",
    "frontiers",
    "greedy_order",
    "sac_stats",
    "tradeoff_curve",
    "units",
]
