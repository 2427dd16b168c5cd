"""A built-in shape: the sizes of a well-known model, as data, and finding one by its name."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from memfit.presets.models.bert import BERTSizes
from memfit.presets.models.gpt2 import GPT2Sizes
from memfit.presets.models.llama import LlamaSizes
from memfit.presets.models.mixtral import MixtralSizes
from memfit.presets.models.vit import ViTSizes
from memfit.presets.problems import WrongRequest

Sizes = LlamaSizes | GPT2Sizes | BERTSizes | ViTSizes
_SIZES: dict[str, type[Any]] = {
    "llama": LlamaSizes,
    "qwen3": LlamaSizes,
    "mixtral": MixtralSizes,
    "gpt2": GPT2Sizes,
    "bert": BERTSizes,
    "vit": ViTSizes,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes and where they are from. `seq` is the length of a sequence unless another is given.

    `longest` is the most positions that the model has, 0 where nothing limits it; images have no sequence (`seq` 0).
    `seen` is how the count was read: stored, in stored copies of what was published.
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

    @property
    def takes_images(self) -> bool:
        """Whether the batch is images and not tokens."""
        return isinstance(self.sizes, ViTSizes)


def list_shapes() -> tuple[Shape, ...]:
    """Every built-in shape, those of a family together, small ones first."""
    return _shipped()


def load_shape(name: str) -> Shape:
    """The shape called `name`; case, spaces and dashes do not matter."""
    known = {_normal(spelling): shape for shape in _shipped() for spelling in (shape.name, *shape.aliases)}
    found = known.get(_normal(name))
    if found is None:
        raise WrongRequest(f"there is no shape {name!r}; {_near(name)}")
    return found


def _near(name: str) -> str:
    names = [shape.name for shape in _shipped()]
    spellings = {_normal(spelling): shape.name for shape in _shipped() for spelling in (shape.name, *shape.aliases)}
    close = [spellings[key] for key in difflib.get_close_matches(_normal(name), spellings, n=4, cutoff=0.7)]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"there are {', '.join(names)}; for a model of your own write path/to/file.py:function, or hf:config.json"


@cache
def _shipped() -> tuple[Shape, ...]:
    found: list[Shape] = []
    folder = resources.files("memfit.presets") / "data"
    for file in sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name):
        raw = msgspec.toml.decode(file.read_bytes())
        kind = _SIZES[raw["family"]]
        for each in raw["shapes"]:
            sizes = msgspec.convert(each.pop("sizes"), kind)
            aliases = tuple(each.pop("aliases", ()))
            found.append(Shape(family=raw["family"], task=raw["task"], sizes=sizes, aliases=aliases, **each))
    return tuple(sorted(found, key=lambda shape: (shape.family, shape.parameters)))


def _normal(name: str) -> str:
    """A name without what people write differently."""
    return re.sub(r"[^a-z0-9.]+", "", name.lower())
