"""memfit makes PyTorch training fit in memory."""

from memfit._version import __version__

__all__ = ["__version__"]
