"""Names of ops as people read them."""

from __future__ import annotations


def short(name: str) -> str:
    """An op's name without what all of them have: `aten.mm.default` is `mm`."""
    return name.removeprefix("aten.").removesuffix(".default")
