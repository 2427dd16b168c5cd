"""What models of transformers are trained for, and the batch that each task takes, by the names in their forward.

Nothing here knows a single architecture: the class of an architecture for a task is looked up in transformers' own
tables, and inputs are made for the names that the class's forward takes, in the sizes that the configuration names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture import spec
from memfit.presets.errors import WrongRequest
from memfit.text import close_names, did_you_mean


@dataclass(frozen=True, slots=True)
class Task:
    """What a model is trained for: `name` is how `--task` calls it, `table` how transformers' tables of classes do."""

    name: str
    table: str
    title: str

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes for this task, by the `model_type` of their configuration."""
        tables = importlib.import_module("transformers.models.auto.modeling_auto")
        found = getattr(tables, f"MODEL_FOR_{self.table}_MAPPING_NAMES", {})
        return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in found.items()}


TASKS = (
    Task("causal-lm", "CAUSAL_LM", "causal language model"),
    Task("masked-lm", "MASKED_LM", "masked language model"),
    Task("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM", "sequence to sequence"),
    Task("image-classification", "IMAGE_CLASSIFICATION", "image classification"),
    Task("speech-seq2seq", "SPEECH_SEQ_2_SEQ", "speech to text"),
    Task("ctc", "CTC", "speech recognition with CTC"),
    Task("image-text", "IMAGE_TEXT_TO_TEXT", "text about images"),
    Task("sequence-classification", "SEQUENCE_CLASSIFICATION", "sequence classification"),
    Task("token-classification", "TOKEN_CLASSIFICATION", "token classification"),
    Task("question-answering", "QUESTION_ANSWERING", "question answering"),
    Task("audio-classification", "AUDIO_CLASSIFICATION", "audio classification"),
    Task("video-classification", "VIDEO_CLASSIFICATION", "video classification"),
    Task("image-text-pairs", "ZERO_SHOT_IMAGE_CLASSIFICATION", "pairs of images and texts"),
    Task("semantic-segmentation", "SEMANTIC_SEGMENTATION", "semantic segmentation"),
    Task("depth-estimation", "DEPTH_ESTIMATION", "depth estimation"),
    Task("time-series", "TIME_SERIES_PREDICTION", "time series prediction"),
)
"""Of several that a class is for, or that a configuration without `architectures` has a class for, the first counts."""


def find_task(name: str) -> Task:
    """Return the task of that name."""
    found = {task.name: task for task in TASKS}
    if name not in found:
        near = close_names(name, found)
        raise WrongRequest(f"there is no task {name!r} (--task); {did_you_mean(near, f'there are {_listed(TASKS)}')}")
    return found[name]


def tasks_of(kind: str) -> tuple[Task, ...]:
    """Return the tasks that a `model_type` has a class for."""
    return tuple(task for task in TASKS if kind in task.classes)


def _listed(tasks: tuple[Task, ...]) -> str:
    return ", ".join(task.name for task in tasks)


# -- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSizes:
    """The sizes of a batch: `length` tokens of a text; sides, frames and samples where a configuration names none."""

    batch: int
    length: int
    side: int = 224
    frames: int = 16
    samples: int = 160_000
    """Of a recording: ten seconds at 16 kHz."""
    features: int = 1000
    """Frames of a spectrogram: ten seconds, a hundred in each."""
    transcript: int = 64
    """Tokens of what was said in a recording, for CTC."""


_CLASSIFICATION = (
    "AUDIO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
)


def input_specs(forward: Callable[..., Any], config: Any, table: str, sizes: InputSizes) -> dict[str, Any]:
    """Return a batch without data for a model of a task, by the names that its forward takes."""
    takes = inspect.signature(forward).parameters
    tokens = spec((sizes.batch, sizes.length), torch.int64)
    batch: dict[str, Any] = {}
    if "input_ids" in takes and "input_features" not in takes:
        batch["input_ids"] = tokens
    for name in ("pixel_values", "pixel_values_videos"):
        if name in takes and (
            "input_ids" not in takes or table in ("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")
        ):
            batch[name] = _images(config, sizes, video=table == "VIDEO_CLASSIFICATION")
            break
    if "input_values" in takes and "input_ids" not in takes:
        batch["input_values"] = _recording(config, sizes)
    if "input_features" in takes:
        batch["input_features"] = _spectrogram(config, sizes)
    if "past_values" in takes:
        batch |= _series(takes, config, sizes)
    if table == "QUESTION_ANSWERING":
        batch |= {name: spec((sizes.batch,), torch.int64) for name in ("start_positions", "end_positions")}
    elif "labels" in takes:
        batch["labels"] = _labels(config, table, sizes)
    if "return_loss" in takes and table == "ZERO_SHOT_IMAGE_CLASSIFICATION":
        batch["return_loss"] = True
    return batch


def image_sides(config: Any, side: int) -> tuple[int, int]:
    """Return height and width of the images that a configuration names, or `side` for both."""
    vision = getattr(config, "vision_config", config)
    named = getattr(vision, "image_size", None) or side
    return (named[0], named[-1]) if isinstance(named, list | tuple) else (named, named)


def _images(config: Any, sizes: InputSizes, *, video: bool) -> torch.Tensor:
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    frames = (next((n for name in ("num_frames", "frames_per_clip") if (n := getattr(config, name, None))), 16),)
    return spec((sizes.batch, *(frames if video else ()), channels, *image_sides(config, sizes.side)))


def _recording(config: Any, sizes: InputSizes) -> torch.Tensor:
    """Return samples, or a spectrogram where the configuration names its size."""
    bins = getattr(config, "num_mel_bins", None)
    if bins and getattr(config, "max_length", None):
        return spec((sizes.batch, config.max_length, bins))
    return spec((sizes.batch, sizes.samples))


def _spectrogram(config: Any, sizes: InputSizes) -> torch.Tensor:
    """Return a spectrogram: of fixed length and bins first, as Whisper's, or of any length and bins last."""
    audio = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    if getattr(audio, "num_mel_bins", None) and getattr(audio, "max_source_positions", None):
        return spec((sizes.batch, audio.num_mel_bins, 2 * audio.max_source_positions))
    named = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "num_mel_filters")
    bins = next((n for name in named if (n := getattr(audio, name, None))), 80)
    return spec((sizes.batch, sizes.features, bins))


def _series(takes: Any, config: Any, sizes: InputSizes) -> dict[str, torch.Tensor]:
    length = getattr(config, "context_length", sizes.length)
    channels = getattr(config, "num_input_channels", 1)
    found = {"past_values": spec((sizes.batch, length, channels) if channels > 1 else (sizes.batch, length))}
    if "future_values" in takes and hasattr(config, "prediction_length"):
        found["future_values"] = spec((sizes.batch, config.prediction_length, channels))
    return found


def _labels(config: Any, table: str, sizes: InputSizes) -> torch.Tensor:
    if table in _CLASSIFICATION:
        return spec((sizes.batch,), torch.int64)
    if table in ("SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION"):
        dtype = torch.int64 if table == "SEMANTIC_SEGMENTATION" else torch.float32
        return spec((sizes.batch, *image_sides(config, sizes.side)), dtype)
    if table == "CTC":
        return spec((sizes.batch, sizes.transcript), torch.int64)
    return spec((sizes.batch, sizes.length), torch.int64)
