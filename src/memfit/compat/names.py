"""Names of modules compared component by component, and bytes as the prototypes show them."""

from __future__ import annotations

from memfit import units


def is_submodule(name_descendant: str, name_ancestor: str) -> bool:
    """Whether one module lies inside another and is not the same; everything lies inside the empty path."""
    if not name_ancestor:
        return bool(name_descendant)
    return name_descendant.startswith(name_ancestor + ".")


def is_self_or_submodule(name_descendant: str, name_ancestor: str) -> bool:
    """Whether one module lies inside another or is the same."""
    return name_descendant == name_ancestor or is_submodule(name_descendant, name_ancestor)


def display_bytes(b: int, unit: str = "MiB") -> str:
    """Show bytes in 'bytes', 'KiB', 'MiB', 'GiB' or 'TiB'."""
    return units.display_bytes(b, unit)
