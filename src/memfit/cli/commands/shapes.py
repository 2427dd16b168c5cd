"""`memfit shapes`: the built-in models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from memfit.cli.options import Json
from memfit.cli.output import plain, show, show_json

if TYPE_CHECKING:
    from memfit.shapes import Shape


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
        from memfit.shapes import list_shapes

        shapes = list_shapes()
        if self.json:
            show_json([plain(shape) for shape in shapes])
        else:
            show(_table(shapes))
        return 0


def _table(shapes: tuple[Shape, ...]) -> Group:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("shape", no_wrap=True)
    table.add_column("model", overflow="fold")
    for heading in ("parameters", "--seq", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sizes from", overflow="fold")
    for shape in shapes:
        table.add_row(
            shape.name,
            shape.title,
            _billions(shape.parameters),
            str(shape.seq) if shape.seq else "images",
            str(shape.longest) if shape.longest else "",
            f"{shape.source.partition(':')[0]}, {shape.date}",
        )
    note = "--seq: unless you give one; at most: positions there are; --json has the sizes and sources"
    return Group(table, Text(), Text(note, style="dim"))


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"
