"""The four models, built from configuration. Parameters are few and batches large: activations fill the memory.

One plain step takes 0.5 to 2 s on one thread at full size, and hardly any time at the small one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit import Step

ADAMW = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its batch, and the modules that a person would checkpoint."""

    name: str
    size: str
    build: Callable[[], nn.Module]
    batch: Any
    blocks: tuple[str, ...]
    loss: Callable[..., torch.Tensor] | None = None

    def step(self) -> Step:
        """The step on a model of its own; the same weights every time."""
        torch.manual_seed(0)
        return Step(self.build().train(), self.batch, loss=self.loss, optimizer=ADAMW)


def llama(quick: bool, vocabulary: int = 1024, batch: int = 8) -> Case:
    """A decoder with grouped queries and a gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, length, batch = (3, 64, 64, 2) if quick else (8, 192, 256, batch)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return Case(
        name="llama",
        size=f"{layers} layers of {hidden}, batch {batch}, sequence {length}",
        build=lambda: LlamaForCausalLM(config),
        batch=_language(batch, length),
        blocks=tuple(f"model.layers.{number}" for number in range(layers)),
    )


def gpt2(quick: bool, vocabulary: int = 1024, batch: int = 4) -> Case:
    """A decoder with dropout, which a second run has to repeat."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, hidden, length, batch = (3, 64, 64, 2) if quick else (8, 192, 256, batch)
    config = GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 32,
        n_positions=length,
        vocab_size=vocabulary,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Case(
        name="gpt2",
        size=f"{layers} layers of {hidden}, batch {batch}, sequence {length}, dropout 0.1",
        build=lambda: GPT2LMHeadModel(config),
        batch=_language(batch, length),
        blocks=tuple(f"transformer.h.{number}" for number in range(layers)),
    )


def vit(quick: bool, batch: int = 32) -> Case:
    """An encoder over the patches of images."""
    from transformers import ViTConfig, ViTForImageClassification

    layers, hidden, size, batch = (3, 64, 64, 4) if quick else (8, 192, 64, batch)
    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
        image_size=size,
        patch_size=8,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    blocks = tuple(name for name, each in model.named_modules() if type(each).__name__ == "ViTLayer")
    return Case(
        name="vit",
        size=f"{layers} layers of {hidden}, batch {batch}, images of {size}x{size} in patches of 8x8",
        build=lambda: ViTForImageClassification(config),
        batch={"pixel_values": _normal(batch, 3, size, size), "labels": torch.arange(batch) % 10},
        blocks=blocks,
    )


def unet(quick: bool) -> Case:
    """Convolutions with skips across the model and attention at the bottom; its blocks are residual and attention."""
    import diffusers

    channels, size, batch = ((16, 32), 16, 2) if quick else ((32, 64, 64), 32, 8)
    middle = ("AttnDownBlock2D",) * (len(channels) - 1)

    def build() -> nn.Module:
        return diffusers.UNet2DModel(
            sample_size=size,
            layers_per_block=1,
            block_out_channels=channels,
            down_block_types=("DownBlock2D", *middle),
            up_block_types=(*("AttnUpBlock2D" for _ in middle), "UpBlock2D"),
            norm_num_groups=8,
        )

    kinds = ("ResnetBlock2D", "Attention")
    blocks = tuple(name for name, each in build().named_modules() if type(each).__name__ in kinds)
    return Case(
        name="unet",
        size=f"channels {', '.join(map(str, channels))}, batch {batch}, images of {size}x{size}",
        build=build,
        batch={"sample": _normal(batch, 3, size, size), "timestep": torch.arange(batch) * 100},
        blocks=blocks,
        loss=_noise_loss,
    )


CASES: dict[str, Callable[[bool], Case]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "unet": unet}


def _language(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1024, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _noise_loss(output: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output.sample, batch["sample"])
