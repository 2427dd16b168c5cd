"""Built-in shapes whose model is a class of transformers or diffusers: their configuration is data, as that of others.

The library is imported when such a shape is used. Language and speech models train as `hf:` configurations do. A
denoiser is trained on latents that are computed before, as diffusers' training scripts do where memory is short: the
mean square of what it predicts and what it should, for a batch of noisy latents, time steps and encoded texts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit.capture import spec
from memfit.errors import InputError
from memfit.presets.errors import NotTaken
from memfit.presets.models.layers import CrossEntropy
from memfit.presets.training import BATCH, NO_BATCH, NamedStep, resolve_count, training_step
from memfit.presets.transformers_config import Configured

LONG_UNASKED = "that long since no --seq was given"
_CLASSES = 1000
_NO_PLAN = "its library has no plan for tensor parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """A class of a library and its configuration; fields that are not named have the library's defaults."""

    library: str
    architecture: str
    config: dict[str, Any]

    def named_step(self, title: str, *, usual_seq: int, batch: int | None, seq: int | None) -> NamedStep:
        """Return the training step; `usual_seq` is the length of a sequence when none is given, 0 for images."""
        if usual_seq:
            configured = Configured.of({**self.config, "architectures": [self.architecture]}, where=title, name=title)
            found = configured.step(batch=batch, seq=usual_seq if seq is None else seq, title=title)
            notes = (*found.notes, LONG_UNASKED) if seq is None else found.notes
            return NamedStep(step=found.step, title=found.title, notes=notes)
        if seq is not None:
            raise NotTaken(f"seq={seq} (--seq) makes no sense for {title}, which takes images", "leave it out")
        size = resolve_count("batch", batch, BATCH)
        build, inputs, what = self._images(title, size)
        step = training_step(build, inputs, no_tensor_parallel=_NO_PLAN)
        notes = () if batch is not None else (NO_BATCH,)
        return NamedStep(step=step, title=f"{title}, batch {size}, {what}", notes=notes)

    def _images(self, title: str, size: int) -> tuple[Callable[[], nn.Module], dict[str, torch.Tensor], str]:
        library = _load(self.library, title)
        model_class = getattr(library, self.architecture, None)
        if model_class is None:
            raise InputError(f"{self.library} {library.__version__} has no {self.architecture}; install a newer one")
        if self.library == "transformers":
            config = model_class.config_class(**{key: self.config[key] for key in self.config if key != "model_type"})
            images = spec((size, config.num_channels, config.image_size, config.image_size))
            batch = {"pixel_values": images, "labels": spec((size,), torch.int64)}
            what = f"images of {config.image_size} x {config.image_size}"
            return partial(_classifier, model_class, config), batch, what
        inputs = _LATENTS[self.architecture](size, self.config)
        side = _EIGHTH * _LATENT_SIDE
        return partial(_denoiser, model_class, self.config), inputs, f"latents of images of {side} x {side}"


def _load(library: str, title: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise InputError(
            f"{title} needs {library}, which is not installed: pip install {library}. Shapes such as llama3-8b do "
            "without"
        ) from error


# -- a backbone with a head that classifies ----------------------------------------------------------------------------


class Classifier(nn.Module):
    """A backbone of transformers and a linear head on its summary of an image."""

    def __init__(self, backbone: nn.Module, hidden: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden, _CLASSES)
        self.loss = CrossEntropy()

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.backbone(pixel_values=pixel_values).pooler_output), labels)


def _classifier(model_class: Any, config: Any) -> nn.Module:
    return Classifier(model_class(config), config.hidden_size)


# -- denoisers of diffusers --------------------------------------------------------------------------------------------

_EIGHTH, _LATENT_SIDE = 8, 128
"""Latents have an eighth of an image's sides: those of 1024 x 1024, which these models were made for."""


class Denoiser(nn.Module):
    """A network that predicts what was added to its latents, and the loss of it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, target: torch.Tensor, **inputs: Any) -> torch.Tensor:
        added = {name: inputs.pop(name) for name in ("text_embeds", "time_ids") if name in inputs}
        if added:
            inputs["added_cond_kwargs"] = added
        predicted = self.network(**inputs, return_dict=False)[0]
        return F.mse_loss(predicted.float(), target.float())


def _denoiser(model_class: Any, config: dict[str, Any]) -> nn.Module:
    return Denoiser(model_class(**config))


def _unet_latents(size: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """SDXL's: two encoders' hidden states of 77 tokens, a pooled one, and six numbers on the image's size."""
    latents = spec((size, 4, _LATENT_SIDE, _LATENT_SIDE))
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    return {
        "sample": latents,
        "timestep": spec((size,), torch.int64),
        "encoder_hidden_states": spec((size, 77, config["cross_attention_dim"])),
        "text_embeds": spec((size, pooled)),
        "time_ids": spec((size, 6)),
        "target": latents,
    }


def _flux_latents(size: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """FLUX.1's: latents in patches of 2 x 2, 512 tokens of T5 and a pooled state of CLIP."""
    patches, tokens = (_LATENT_SIDE // 2) ** 2, 512
    latents = spec((size, patches, 64))
    inputs = {
        "hidden_states": latents,
        "encoder_hidden_states": spec((size, tokens, 4096)),
        "pooled_projections": spec((size, 768)),
        "timestep": spec((size,)),
        "img_ids": spec((patches, 3)),
        "txt_ids": spec((tokens, 3)),
        "target": latents,
    }
    if config.get("guidance_embeds"):
        inputs["guidance"] = spec((size,))
    return inputs


def _sd3_latents(size: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stable Diffusion 3's: 77 tokens of two CLIPs and 256 of T5, and the pooled states of both CLIPs."""
    latents = spec((size, 16, _LATENT_SIDE, _LATENT_SIDE))
    return {
        "hidden_states": latents,
        "encoder_hidden_states": spec((size, 77 + 256, 4096)),
        "pooled_projections": spec((size, 2048)),
        "timestep": spec((size,)),
        "target": latents,
    }


_LATENTS = {
    "UNet2DConditionModel": _unet_latents,
    "FluxTransformer2DModel": _flux_latents,
    "SD3Transformer2DModel": _sd3_latents,
}
