"""What can go wrong between ranks."""

from __future__ import annotations

from memfit.errors import MemfitError


class CollectiveError(MemfitError, RuntimeError):
    """A collective did not end: a rank died, stopped, or does something else."""


class OrderError(MemfitError, RuntimeError):
    """Ranks run units in different orders, so that their collectives would not meet."""


class RankMismatch(MemfitError, ValueError):
    """Ranks were given different models, units or options."""
