"""`memfit shapes`: the built-in models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from memfit.cli.options import Json
from memfit.cli.output import plain, result_console, show, show_json
from memfit.text import edgeless_table

if TYPE_CHECKING:
    from memfit.presets import Shape

_WIDE, _NARROW = 100, 70
"""Columns from which the table of shapes has room for all it shows, and for most of it."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The built-in models that can stand for STEP, trained as torchtitan does.

    Parameters in float32, compute in bfloat16, fused AdamW, gradients clipped; --batch and --seq are yours.

    examples:
      memfit shapes
      memfit plan gpt2 --target rtx-4090 --batch 8
    """

    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.presets import list_shapes

        shapes = list_shapes()
        if self.json:
            show_json([plain(shape) for shape in shapes])
        else:
            show(_table(shapes, result_console().width))
        return 0


def _table(shapes: tuple[Shape, ...], width: int) -> Group:
    """Build a table with a row for each shape; columns that the width has no room for are left out."""
    columns: dict[str, Callable[[Shape], str]] = {
        "shape": lambda shape: shape.name,
        "model": lambda shape: shape.title,
        "parameters": lambda shape: _billions(shape.parameters),
        "--seq": lambda shape: str(shape.seq) if shape.seq else "images",
        "at most": lambda shape: str(shape.longest) if shape.longest else "",
        "sizes from": lambda shape: f"{shape.source.partition(':')[0]}, {shape.date}",
    }
    for name, least in (("sizes from", _WIDE), ("model", _NARROW)):
        if width < least:
            del columns[name]
    table = edgeless_table()
    for name in columns:
        words = name in ("model", "sizes from")
        left = words or name == "shape"
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not words)
    for shape in shapes:
        table.add_row(*(shown(shape) for shown in columns.values()))
    note = "--seq: unless you give one; at most: positions there are; --json has the sizes and sources"
    return Group(table, Text(), Text(note, style="dim"))


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"
