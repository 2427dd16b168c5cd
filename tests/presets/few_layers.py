"""Built-in shapes with few layers, so that what a page or a test does with large ones takes no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.presets import Shape, load_shape
from memfit.presets.library_models import LibraryModel
from memfit.presets.models.llama import LlamaSizes

LAYERS = 3
LIBRARY_LAYERS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16},
    "dinov3": {"num_hidden_layers": 2},
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "gemma3": {"num_hidden_layers": 7},  # the sixth attends to everything
    "gpt-oss": {"num_hidden_layers": 2, "num_local_experts": 8},
    "llama4": {"num_hidden_layers": 4, "num_local_experts": 4},  # the fourth has no rotary positions
    "sd3": {"num_layers": 2},
    "sdxl": {"transformer_layers_per_block": [1, 1, 1], "layers_per_block": 1},
    "whisper": {"encoder_layers": 2, "decoder_layers": 2},
}
"""What a configuration of each family says in place of its own, so that the model has every kind of layer."""


def few_layers(name: str) -> Shape:
    """Return a decoder of three layers that are as much wider, so that budgets mean the same; others as they are."""
    shape = load_shape(name)
    if not isinstance(shape.sizes, LlamaSizes):
        return shape
    wider = shape.sizes.layers // LAYERS
    return replace(shape, sizes=replace(shape.sizes, layers=LAYERS, feed_forward=shape.sizes.feed_forward * wider))


def few_library_layers(shape: Shape) -> Shape:
    """Return a shape of a library's class with few layers."""
    assert isinstance(shape.sizes, LibraryModel)
    config = {**shape.sizes.config, **LIBRARY_LAYERS[shape.family]}
    return replace(shape, sizes=replace(shape.sizes, config=config))
