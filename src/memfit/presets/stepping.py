"""Every way to name a step on a command line, and the step that it names."""

from __future__ import annotations

import os
from functools import partial
from typing import Protocol

from memfit.capture import Step
from memfit.presets.places import HOW, Place
from memfit.presets.problems import WrongRequest
from memfit.presets.shape import load_shape
from memfit.presets.training import NamedStep, shape_step
from memfit.presets.transformers_config import PREFIX, Configured


class NamedSteps(Protocol):
    """The steps that one text names: what it names is loaded once, a step is made for every batch and length."""

    def __call__(self, *, batch: int | None = None, seq: int | None = None) -> NamedStep: ...


def step_at(text: str, *, batch: int | None = None, seq: int | None = None) -> Step:
    """The step that a text names.

    `train.py:step` and `package.module:step` are functions that return one, `hf:config.json` is a configuration of
    transformers, `hf:org/name` that of a model in the local cache of Hugging Face, anything else a built-in shape such
    as `llama3-8b`.
    """
    return named_step_at(text, batch=batch, seq=seq).step


def named_step_at(text: str, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
    """The same with what it is and what was chosen for want of an option."""
    return named_steps_at(text)(batch=batch, seq=seq)


def named_steps_at(text: str) -> NamedSteps:
    """The same for any batch and length, without loading the user's file or configuration again for each."""
    if not isinstance(text, str) or not text.strip():
        raise WrongRequest(
            f"a step is named by a text, not {text!r}; {HOW}, or the name of a shape such as 'llama3-8b'"
        )
    if text.startswith(PREFIX):
        return Configured.at(text).step
    if ":" in text or text.endswith(".py") or os.sep in text:
        return partial(_of_place, Place.at(text))
    return partial(shape_step, load_shape(text))


def _of_place(place: Place, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
    return NamedStep(step=place.step(batch=batch, seq=seq), title=place.text)
