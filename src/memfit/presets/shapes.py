"""Built-in shapes: the sizes of well-known models, as data, found by name, and how they are trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from memfit.capture import Step, spec
from memfit.presets.errors import NotTaken, WrongRequest
from memfit.presets.library_models import LONG_UNASKED, LibraryModel
from memfit.presets.models.bert import BERT, BERTSizes
from memfit.presets.models.gpt2 import GPT2, GPT2Sizes
from memfit.presets.models.llama import Llama, LlamaSizes
from memfit.presets.models.mixtral import Mixtral, MixtralSizes
from memfit.presets.models.vit import ViT, ViTSizes
from memfit.presets.training import BATCH, NO_BATCH, NamedStep, display_count, resolve_count, training_step
from memfit.text import close_names, did_you_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Sizes = LlamaSizes | GPT2Sizes | BERTSizes | ViTSizes | LibraryModel
_SIZES: dict[str, type[Any]] = {
    "llama": LlamaSizes,
    "qwen3": LlamaSizes,
    "mixtral": MixtralSizes,
    "qwen3-moe": MixtralSizes,
    "gpt2": GPT2Sizes,
    "bert": BERTSizes,
    "vit": ViTSizes,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes and where they are from. `seq` is the length of a sequence unless another is given.

    `longest` is the most positions that the model has, 0 where nothing limits it; images have no sequence (`seq` 0).
    `seen` is how the count was read: stored, in stored copies of what was published; built, of the model itself, where
    its makers gave the count in `published`, rounded.
    """

    name: str
    title: str
    family: str
    task: str
    parameters: int
    seq: int
    longest: int
    source: str
    date: str
    seen: str
    sizes: Sizes
    aliases: tuple[str, ...] = ()
    published: str = ""


def list_shapes() -> tuple[Shape, ...]:
    """Return every built-in shape, those of a family together, small ones first."""
    return _shipped()


def load_shape(name: str) -> Shape:
    """Return the shape called `name`; case, spaces and dashes do not matter."""
    known = {_normalized(spelling): shape for shape in _shipped() for spelling in (shape.name, *shape.aliases)}
    found = known.get(_normalized(name))
    if found is None:
        raise WrongRequest(f"there is no shape {name!r}; {_near(name)}")
    return found


def _near(name: str) -> str:
    names = [shape.name for shape in _shipped()]
    spellings = {_normalized(spelling): shape.name for shape in _shipped() for spelling in (shape.name, *shape.aliases)}
    close = [spellings[key] for key in close_names(_normalized(name), spellings, most=4, cutoff=0.7)]
    own = "for a model of your own write path/to/file.py:function, or hf:config.json"
    return did_you_mean(close, f"there are {', '.join(names)}; {own}")


@cache
def _shipped() -> tuple[Shape, ...]:
    found: list[Shape] = []
    folder = resources.files("memfit.presets") / "data"
    for file in sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name):
        raw = msgspec.toml.decode(file.read_bytes())
        library = {key: raw[key] for key in ("library", "architecture") if key in raw}
        for each in raw["shapes"]:
            if library:
                sizes: Sizes = LibraryModel(**library, config={**raw.get("config", {}), **each.pop("config", {})})
            else:
                sizes = msgspec.convert(each.pop("sizes"), _SIZES[raw["family"]])
            aliases = tuple(each.pop("aliases", ()))
            found.append(Shape(family=raw["family"], task=raw["task"], sizes=sizes, aliases=aliases, **each))
    return tuple(sorted(found, key=lambda shape: (shape.family, shape.parameters)))


def _normalized(name: str) -> str:
    """Return a name without what people write differently."""
    return re.sub(r"[^a-z0-9.]+", "", name.lower())


def shape_step(shape: Shape, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
    """Return the training step of a shape: one sample unless given, sequences as long as the shape's own."""
    size = resolve_count("batch", batch, BATCH)
    described = f"{shape.title}, {display_count(shape.parameters)} parameters"
    if isinstance(shape.sizes, LibraryModel):
        return shape.sizes.named_step(described, usual_seq=shape.seq, batch=batch, seq=_checked_length(shape, seq))
    notes = [NO_BATCH] if batch is None else []
    if isinstance(shape.sizes, ViTSizes):
        images = f"{shape.sizes.image} x {shape.sizes.image}"
        if seq is not None:
            raise NotTaken(
                f"seq={seq} (--seq) makes no sense for {shape.name}, which takes images of {images}", "leave it out"
            )
        pixels = spec((size, shape.sizes.channels, shape.sizes.image, shape.sizes.image))
        batched = {"images": pixels, "labels": spec((size,), torch.int64)}
        step = training_step(partial(ViT, shape.sizes), batched, no_tensor_parallel=_ONE_MATRIX)
        return NamedStep(step=step, title=f"{described}, batch {size}, images of {images}", notes=tuple(notes))
    length = resolve_count("seq", _checked_length(shape, seq), shape.seq)
    if seq is None:
        notes.append(LONG_UNASKED)
    tokens = {name: spec((size, length), torch.int64) for name in ("tokens", "labels")}
    step = language_step(shape.sizes, length, tokens)
    return NamedStep(step=step, title=f"{described}, batch {size}, sequences of {length}", notes=tuple(notes))


def _checked_length(shape: Shape, seq: int | None) -> int | None:
    if seq is not None and shape.longest and resolve_count("seq", seq, shape.seq) > shape.longest:
        raise WrongRequest(
            f"seq={seq} (--seq) is more than {shape.name} has positions for; give at most {shape.longest}"
        )
    return seq


def language_step(sizes: LlamaSizes | GPT2Sizes | BERTSizes, length: int, tokens: Mapping[str, torch.Tensor]) -> Step:
    if isinstance(sizes, MixtralSizes):
        why = "memfit's Mixtral has the weights of all experts in one matrix"
        return training_step(partial(Mixtral, sizes, length), tokens, no_tensor_parallel=why)
    if isinstance(sizes, LlamaSizes):
        parallel = partial(_parallelize_llama, sizes, length)
        return training_step(
            partial(Llama, sizes, length),
            tokens,
            tensor_parallel=parallel,
            pipeline=_llama_stage,
            context_parallel=partial(_share_sequences, length),
        )
    build = partial(GPT2, sizes) if isinstance(sizes, GPT2Sizes) else partial(BERT, sizes)
    return training_step(build, tokens, no_tensor_parallel=_ONE_MATRIX)


_ONE_MATRIX = "its queries, keys and values come from one matrix, whose columns cannot be split by heads as they are"


def _llama_stage(model: Llama, mesh: DeviceMesh) -> nn.Module:
    from memfit.presets.pipeline import LlamaStage

    return LlamaStage(model, mesh)


def _share_sequences(length: int, model: Any, mesh: DeviceMesh) -> None:
    from memfit.presets.context_parallel import check_length  # loads DTensor

    check_length(length, mesh.size())
    model.context_mesh = mesh


def _parallelize_llama(sizes: LlamaSizes, length: int, model: Llama, mesh: DeviceMesh) -> None:
    from memfit.presets.tensor_parallel import parallelize_llama  # loads DTensor, which takes a second

    shared = getattr(model, "context_mesh", None)
    parallelize_llama(sizes, length if shared is None else length // shared.size(), model, mesh)
