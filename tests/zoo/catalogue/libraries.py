"""The libraries whose models are examined."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from memfit import Step
from tests.zoo.catalogue import diffusers_models, transformers_models, vision_models


@dataclass(frozen=True, slots=True)
class Library:
    """Which models a library has for the maker, and how one becomes a step."""

    names: Callable[[], list[str]]
    build: Callable[[str], Step]
    beside: bool = False
    """Whether it is in a folder of its own: transformers and diffusers would load a torchvision that they see."""


FOLDER = os.path.join(sys.prefix, "zoo")
"""Where `make zoo` installs torchvision and timm."""

LIBRARIES = {
    "transformers": Library(transformers_models.architectures, transformers_models.build),
    "diffusers": Library(diffusers_models.model_names, diffusers_models.build),
    "timm": Library(vision_models.timm_families, vision_models.build_timm, beside=True),
    "torchvision": Library(vision_models.torchvision_families, vision_models.build_torchvision, beside=True),
}
