"""Which releases of torch memfit works with: older ones are refused, newer ones get a warning.

The rooms that load torch first (`trace`, `sharded`) import this module before anything else, and importing it checks.
`make compat` tries each minor release and writes docs/versions.md.
"""

from __future__ import annotations

import re
import warnings

import torch

from memfit.errors import MemfitError

OLDEST = (2, 10)
NEWEST_TRIED = (2, 15)


class TorchVersionError(MemfitError, ImportError):
    """The installed torch is one that memfit does not work with."""


def check_torch_version(version: str) -> None:
    """Refuse a torch that is too old, and warn about one that is newer than any tried."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return
    release = int(numbers[1]), int(numbers[2])
    if release < OLDEST:
        oldest = _display(OLDEST)
        raise TorchVersionError(
            f"memfit needs torch {oldest} or newer, and torch {version} is installed, whose ops do not say which "
            f"are reductions (torch.Tag.reduction): no time could be estimated. Run: pip install 'torch>={oldest}'"
        )
    if release > NEWEST_TRIED:
        warnings.warn(
            f"torch {version} is newer than any that memfit has been tried with ({_display(OLDEST)} to "
            f"{_display(NEWEST_TRIED)}); check a plan with plan.verify before you rely on it",
            stacklevel=2,
        )


def _display(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


check_torch_version(str(torch.__version__))
