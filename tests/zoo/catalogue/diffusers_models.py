"""Makes small training steps of diffusers' models from the defaults of their constructors.

As with transformers, sizes are shrunk by name and inputs are made by the names that a forward takes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memfit import Step

BATCH, WIDTH, SIDE, TOKENS = 2, 32, 16, 8
_SIZES: dict[str, Any] = {
    "sample_size": SIDE,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "layers_per_block": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 2,
    "attention_head_dim": 16,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": WIDTH,
    "caption_channels": WIDTH,
    "caption_projection_dim": WIDTH,
    "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "text_embed_dim": WIDTH,
    "inner_dim": WIDTH,
    "hidden_size": WIDTH,
    "n_layers": 2,
    "embed_dim": WIDTH,
    "norm_num_groups": 4,
    "num_embeds_ada_norm": 10,
    "num_vq_embeddings": 16,
    "vq_embed_dim": 4,
    "sample_frames": 5,
    "axes_dims_rope": (4, 6, 6),
}
_LISTS = ("block_out_channels", "encoder_block_out_channels", "decoder_block_out_channels", "channel_multipliers")


def model_names() -> list[str]:
    """Return the names of diffusers' models: networks with a configuration and a forward."""
    import diffusers
    from diffusers.configuration_utils import ConfigMixin
    from diffusers.models.modeling_utils import ModelMixin

    found = []
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name, None)
        if isinstance(kind, type) and issubclass(kind, ModelMixin) and issubclass(kind, ConfigMixin):
            found.append(name)
    return found


def build(name: str) -> Step:
    """Return a small step of the model."""
    import diffusers

    kind = getattr(diffusers, name)
    arguments = {}
    for key, parameter in inspect.signature(kind.__init__).parameters.items():
        default = parameter.default
        if key in _SIZES and default is not inspect.Parameter.empty:
            arguments[key] = _SIZES[key]
        elif key in _LISTS and isinstance(default, tuple | list):
            arguments[key] = type(default)(16 * (1 + index // 2) for index in range(len(default)))
    model = kind(**arguments)
    return Step(model.train(), inputs(model), loss=loss)


def loss(output: Any, batch: Any) -> torch.Tensor:
    """Return the mean square of the first result."""
    first = output[0] if isinstance(output, tuple | list) else next(iter(output.values()))
    while isinstance(first, tuple | list):
        first = first[0]
    return first.float().square().mean()


def inputs(model: nn.Module) -> dict[str, Any]:
    """Return a batch by the names that the model's forward takes without a default, and a few that have one."""
    config: Any = model.config
    width = next(
        (
            n
            for key in ("joint_attention_dim", "cross_attention_dim", "caption_channels")
            if isinstance(n := config.get(key), int)
        ),
        WIDTH,
    )
    channels = config.get("in_channels") or config.get("latent_channels") or 3
    frames = (5,) if "3D" in type(model).__name__ or "Video" in type(model).__name__ else ()
    image = torch.randn(BATCH, channels, *frames, SIDE, SIDE)
    known: dict[str, Any] = {
        "sample": image,
        "hidden_states": image,
        "timestep": torch.randint(0, 1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, TOKENS, width),
        "encoder_attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool),
        "pooled_projections": torch.randn(BATCH, config.get("pooled_projection_dim") or WIDTH),
        "class_labels": torch.randint(0, 10, (BATCH,)),
        "x": image,
    }
    batch = {}
    for key, parameter in inspect.signature(model.forward).parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if key in known and (needed or key in ("timestep", "encoder_hidden_states", "pooled_projections")):
            batch[key] = known[key]
    if config.get("num_embeds_ada_norm"):
        batch["class_labels"] = known["class_labels"]
    return batch
