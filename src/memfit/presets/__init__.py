"""Steps by name: built-in models of well-known shapes, configurations of transformers, functions of the user's own."""

from memfit.presets.errors import NotTaken, WrongRequest
from memfit.presets.named_steps import NamedSteps, named_step_at, named_steps_at, step_at
from memfit.presets.parallel_model import ParallelModel, in_autocast
from memfit.presets.shapes import Shape, list_shapes, load_shape, shape_step
from memfit.presets.training import NamedStep

__all__ = [
    "NamedStep",
    "NamedSteps",
    "NotTaken",
    "ParallelModel",
    "Shape",
    "WrongRequest",
    "in_autocast",
    "list_shapes",
    "load_shape",
    "named_step_at",
    "named_steps_at",
    "shape_step",
    "step_at",
]
