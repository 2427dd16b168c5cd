"""Built-in shapes with few layers, so that what a page does with large ones takes no time."""

from __future__ import annotations

from dataclasses import replace

from memfit.presets import Shape, load_shape
from memfit.presets.models.llama import LlamaSizes

LAYERS = 3


def few_layers(name: str) -> Shape:
    """Return a decoder of three layers that are as much wider, so that budgets mean the same; others as they are."""
    shape = load_shape(name)
    if not isinstance(shape.sizes, LlamaSizes):
        return shape
    wider = shape.sizes.layers // LAYERS
    return replace(shape, sizes=replace(shape.sizes, layers=LAYERS, feed_forward=shape.sizes.feed_forward * wider))
