"""Every way to name a step on a command line, and the step that it names."""

from __future__ import annotations

import os

from memfit.errors import InputError
from memfit.shapes.places import HOW, step_of_place
from memfit.shapes.shape import load_shape
from memfit.shapes.training import NamedStep, shape_step
from memfit.shapes.transformers_config import PREFIX, transformers_step
from memfit.trace import Step


def step_at(text: str, *, batch: int | None = None, seq: int | None = None) -> Step:
    """The step that a text names.

    `train.py:step` and `package.module:step` are functions that return one, `hf:config.json` is a configuration of
    transformers, anything else a built-in shape such as `llama3-8b`.
    """
    return named_step_at(text, batch=batch, seq=seq).step


def named_step_at(text: str, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
    """The same with what it is and what was chosen for want of an option."""
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"a step is named by a text, not {text!r}; {HOW}, or the name of a shape such as 'llama3-8b'")
    if text.startswith(PREFIX):
        return transformers_step(text, batch=batch, seq=seq)
    if ":" in text or text.endswith(".py") or os.sep in text:
        return NamedStep(step=step_of_place(text, batch=batch, seq=seq), title=text)
    return shape_step(load_shape(text), batch=batch, seq=seq)
