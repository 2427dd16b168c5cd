"""A step of a transformers configuration: `hf:path/to/config.json`, or `hf:org/name` from the local cache.

No weights, no download, no code of strangers.

Note [Without data]: a capture has shapes and no values, and some models look at values while they train. Left out of
their step are layers that are dropped by chance (`layerdrop`) and masks over recordings (`apply_spec_augment`), which
notes say, and the check that as many tokens of a text stand for images as there are. The loss of CTC is computed here
from the logits, as the models do it, for transcripts of equal length.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit.errors import InputError
from memfit.presets.errors import NotTaken, WrongRequest
from memfit.presets.hub_cache import cached_config, names_repository
from memfit.presets.parallel_model import TRANSFORMERS_STYLES, TensorParallel
from memfit.presets.training import BATCH, NO_BATCH, NamedStep, resolve_count, training_step
from memfit.presets.transformers_tasks import TASKS, InputSizes, Task, find_task, input_specs, tasks_of
from memfit.text import close_names, did_you_mean

PREFIX = "hf:"
_LONGEST_UNASKED = 8192
"""A sequence is not longer than this unless asked for: many configurations name a limit that nobody trains with."""
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_source_positions")
_RECORDINGS = ("AUDIO_CLASSIFICATION", "CTC")
"""Tables of tasks whose only sequence is a recording."""
_POSITIONS = re.compile("position|^wpe$")
_OWN = "for any model at all write path/to/file.py:function, a function that returns a memfit.Step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A configuration that was read, the class of the model that it describes, and what this is trained for."""

    name: str
    """How it was asked for."""
    raw: dict[str, Any]
    transformers: ModuleType
    config: Any
    class_name: str
    task: Task

    @classmethod
    def at(cls, place: str, *, task: str | None = None) -> Configured:
        """Return the one in the file that `hf:path` names, or that of the model `hf:org/name` in the local cache."""
        name = place.removeprefix(PREFIX)
        path = _config_file(name, place)
        return cls.of(
            _read(path), where=str(path), name=str(path) if Path(name).expanduser().exists() else name, task=task
        )

    @classmethod
    def of(cls, raw: dict[str, Any], *, where: str, name: str, task: str | None = None) -> Configured:
        """Return the one with these values; `where` is where they are from, for errors."""
        transformers = _transformers(where)
        config = _config(raw, where)
        class_name, found = _class_of(raw, where, transformers, None if task is None else find_task(task))
        return cls(name=name, raw=raw, transformers=transformers, config=config, class_name=class_name, task=found)

    @property
    def model_class(self) -> Any:
        """The class itself."""
        return getattr(self.transformers, self.class_name)

    def step(self, *, batch: int | None = None, seq: int | None = None, title: str | None = None) -> NamedStep:
        """Return the training step of the model, built on meta in float32."""
        size = resolve_count("batch", batch, BATCH)
        notes = [NO_BATCH] if batch is None else []
        config = _settle(self.config, self.task, notes)
        build = partial(_build, self.model_class, config, self.task)
        sizes = InputSizes(batch=size, length=resolve_count("seq", seq, _usual_length(config)))
        if self.task.table in _RECORDINGS and seq is not None:
            sizes = replace(sizes, samples=seq, features=seq)
        inputs = input_specs(self.model_class.forward, config, self.task.table, sizes)
        if not any(isinstance(each, torch.Tensor) for name, each in inputs.items() if name != "labels"):
            raise InputError(f"memfit does not know the inputs of {self.class_name}; {_OWN}")
        what = _described(inputs)
        if not _has_sequences(inputs):
            if seq is not None:
                raise NotTaken(
                    f"seq={seq} (--seq) makes no sense for {self.class_name}, which takes {what}", "leave it out"
                )
        elif seq is None:
            notes.append(_why_so_long(config, self.task))
        else:
            _check_positions(config, build, self.class_name, seq)
        notes += _saved_dtype(self.raw)
        parallel, why_not = _tensor_parallel(self.model_class, config)
        step = training_step(build, inputs, tensor_parallel=parallel, no_tensor_parallel=why_not)
        title = title or f"{self.class_name} of {self.name}"
        return NamedStep(step=step, title=f"{title}, batch {size}, {what}", notes=tuple(notes))


def _tensor_parallel(model_class: Any, config: Any) -> tuple[TensorParallel | None, str]:
    """Return what makes the model tensor parallel as its own plan says, or None and why it cannot be done."""
    base = getattr(config, "base_model_tp_plan", None) or {}
    if not base:
        return None, f"the configuration of {model_class.__name__} has no base_model_tp_plan"
    prefix = getattr(model_class, "base_model_prefix", "")
    plan = {f"{prefix}.{path}" if prefix else path: style for path, style in base.items()}
    plan |= getattr(model_class, "_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - TRANSFORMERS_STYLES)
    if unknown:
        return None, f"the base_model_tp_plan of {model_class.__name__} has styles that PyTorch has not: {unknown}"
    named = {
        "num_key_value_heads": "key and value heads",
        "num_attention_heads": "heads",
        "intermediate_size": "columns",
        "vocab_size": "words of the vocabulary",
    }
    counts = {what: getattr(config, name, None) for name, what in named.items()}
    return partial(_parallelize, plan, {what: count for what, count in counts.items() if count}), ""


def _parallelize(plan: dict[str, str], counts: dict[str, int], model: nn.Module, mesh: Any) -> None:
    from memfit.presets.tensor_parallel import parallelize_transformers  # loads DTensor, which takes a second

    parallelize_transformers(plan, counts, model, mesh)


def _saved_dtype(raw: dict[str, Any]) -> list[str]:
    """Return a note on the configuration's dtype, that of saved weights, which many take for the one of training."""
    named = raw.get("dtype") or raw.get("torch_dtype")
    if named in (None, "float32", "auto"):
        return []
    return [f"parameters in float32 and compute in bfloat16: {named} of the configuration is how weights were saved"]


def _build(model_class: Any, config: Any, task: Task) -> nn.Module:
    """Return the model itself; its constructor takes torch's default dtype, not the one that weights were saved in."""
    model = model_class(config)
    if task.table == "CTC":
        return _Transcribed(model, config)
    if task.table == "IMAGE_TEXT_TO_TEXT":
        model.forward = _without_checks(model.forward)
    model.register_forward_hook(_only_loss)
    return model


def _only_loss(module: nn.Module, given: Any, output: Any) -> torch.Tensor:
    """Return the loss alone: logits are not held through backward, as in transformers' own training loop."""
    loss = output.loss
    if loss is None:
        raise InputError(f"{type(module).__name__} returns no loss for its labels; {_OWN}")
    return loss


class _Transcribed(nn.Module):
    """A model with the loss of CTC outside of it: its own looks for the padding of the transcripts."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.blank: int = getattr(config, "pad_token_id", None) or 0
        self.reduction: str = getattr(config, "ctc_loss_reduction", "mean")
        self.zero_infinity: bool = getattr(config, "ctc_zero_infinity", False)

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(**inputs).logits
        rows, frames = logits.shape[:2]
        shares = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
        with torch.backends.cudnn.flags(enabled=False):
            return F.ctc_loss(
                shares,
                labels,
                [frames] * rows,  # type: ignore[arg-type]
                [labels.shape[1]] * rows,  # type: ignore[arg-type]
                blank=self.blank,
                reduction=self.reduction,
                zero_infinity=self.zero_infinity,
            )


_CHECKS_OFF = "TRANSFORMERS_DISABLE_TORCH_CHECK"


def _without_checks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that leaves out, while it runs, transformers' checks of values and values in their messages."""

    @wraps(forward)
    def unchecked(*args: Any, **kwargs: Any) -> Any:
        before, formatted = os.environ.get(_CHECKS_OFF), torch.Tensor.__format__
        os.environ[_CHECKS_OFF] = "1"
        torch.Tensor.__format__ = lambda *_: "?"  # type: ignore[method-assign]
        try:
            return forward(*args, **kwargs)
        finally:
            torch.Tensor.__format__ = formatted  # type: ignore[method-assign]
            if before is None:
                del os.environ[_CHECKS_OFF]
            else:
                os.environ[_CHECKS_OFF] = before

    return unchecked


def _config_file(name: str, place: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists() and names_repository(name):
        return cached_config(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise WrongRequest(
            f"there is no file {path}, which {place!r} names; give the config.json of a model, or the folder it is "
            "in. Nothing is downloaded"
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is no configuration of transformers: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise InputError(f"{path} has no model_type, which configurations of transformers have; {_OWN}")
    return raw


def _transformers(place: str) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"{place!r} needs transformers, which is not installed: pip install transformers. Built-in shapes such "
            "as llama3-8b do without"
        ) from error


def _config(raw: dict[str, Any], where: str) -> Any:
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    kind = raw["model_type"]
    if kind not in known:
        near = map(repr, close_names(kind, known.keys()))
        version = importlib.import_module("transformers").__version__
        hint = did_you_mean(near, "a newer one may.")
        own = "Code that comes with a model is never run; " if "auto_map" in raw else ""
        raise InputError(f"transformers {version} does not know the model_type {kind!r} of {where}; {hint} {own}{_OWN}")
    try:
        config = known[kind].from_dict({key: value for key, value in raw.items() if key != "auto_map"})
    except Exception as error:  # its checks raise errors of many kinds
        raise InputError(f"transformers refuses {where}: {error}") from error
    config.use_cache = False  # it is for generation
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # some token; which does not matter
    return config


def _class_of(raw: dict[str, Any], where: str, transformers: ModuleType, asked: Task | None) -> tuple[str, Task]:
    """Return the class that the configuration names, if how it is trained is known; else the one for its type."""
    kind, named = raw["model_type"], raw.get("architectures") or []
    if asked is not None:
        classes = asked.classes.get(kind, ())
        if not classes:
            there = ", ".join(task.name for task in tasks_of(kind)) or "none"
            raise WrongRequest(f"transformers has no class of {kind} for --task {asked.name}; it has: {there}")
        return next((name for name in named if name in classes), classes[0]), asked
    found = [(name, task) for task in TASKS for name in task.classes.get(kind, ()) if name in named]
    if not named:
        found = [(task.classes[kind][0], task) for task in tasks_of(kind)]
    for name, task in found:  # a class for texts and for images with texts is in the tables of both
        if task.table == "IMAGE_TEXT_TO_TEXT" and named and _takes_images(getattr(transformers, name)):
            return name, task
    if found:
        return found[0]
    what = f"its architectures are {', '.join(map(str, named))}" if named else f"its type is {kind}"
    there = ", ".join(task.name for task in tasks_of(kind))
    ask = f"; its type can be trained with --task: {there}" if there else ""
    raise InputError(f"memfit does not know how {where} is trained: {what}{ask}; {_OWN}")


def _takes_images(model_class: Any) -> bool:
    return "pixel_values" in inspect.signature(model_class.forward).parameters


def _settle(config: Any, task: Task, notes: list[str]) -> Any:
    """Return the configuration without what depends on chance or values (Note [Without data])."""
    changes: dict[str, Any] = {}
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            changes[name] = 0.0
            notes.append(f"without {name}, which drops layers by chance")
    spoken = task.table in (*_RECORDINGS, "SPEECH_SEQ_2_SEQ")
    if spoken and getattr(config, "apply_spec_augment", False):
        changes["apply_spec_augment"] = False
        notes.append("without apply_spec_augment, which masks what chance says")
    if task.table == "SEQUENCE_CLASSIFICATION" and getattr(config, "pad_token_id", 0) is None:
        changes["pad_token_id"] = 0  # by which the last token of a text is found
    if not changes:
        return config
    settled = type(config).from_dict(config.to_dict())
    for name, value in {"use_cache": False, **changes}.items():
        setattr(settled, name, value)
    return settled


def _described(inputs: dict[str, Any]) -> str:
    """Say what a batch is made of."""
    words = []
    if "input_ids" in inputs:
        words.append(f"sequences of {inputs['input_ids'].shape[1]}")
    for name in ("pixel_values", "pixel_values_videos"):
        if name in inputs:
            frames = f"{inputs[name].shape[1]} frames of " if inputs[name].dim() == 5 else ""
            words.append(f"{frames}images of {' x '.join(map(str, inputs[name].shape[-2:]))}")
    if "input_values" in inputs:
        words.append(f"recordings of {' x '.join(map(str, inputs['input_values'].shape[1:]))}")
    if "input_features" in inputs:
        words.append(f"spectrograms of {' x '.join(map(str, inputs['input_features'].shape[1:]))}")
        if inputs["labels"].dim() == 2:
            words.append(f"texts of {inputs['labels'].shape[1]}")
    if "past_values" in inputs:
        words.append(f"series of {' x '.join(map(str, inputs['past_values'].shape[1:]))}")
    return ", ".join(words)


def _has_sequences(inputs: dict[str, Any]) -> bool:
    """Return whether a length can be asked for: of texts, or of recordings that may be of any."""
    labels = inputs.get("labels")
    spoken = "input_features" in inputs and labels is not None and labels.dim() == 2
    return "input_ids" in inputs or spoken or ("input_values" in inputs and inputs["input_values"].dim() == 2)


def _usual_length(config: Any) -> int:
    return min(_longest(config) or _LONGEST_UNASKED, _LONGEST_UNASKED)


def _why_so_long(config: Any, task: Task) -> str:
    if task.table in _RECORDINGS:
        why = "ten seconds"
    elif _usual_length(config) == _longest(config):
        why = "the configuration's length"
    else:
        why = f"at most {_LONGEST_UNASKED}"
    return f"{why} since no --seq was given"


def _longest(config: Any) -> int | None:
    """Return the length that the configuration names; only a model with a table of positions ends there."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_target_positions", *_LENGTHS) if getattr(config, "is_encoder_decoder", False) else _LENGTHS
    return next((n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), None)


def _check_positions(config: Any, build: Callable[[], nn.Module], name: str, seq: int) -> None:
    """Refuse sequences longer than a table of positions: on meta nothing would notice that it ends."""
    longest = _longest(config)
    if longest is None or seq <= longest:
        return
    with torch.device("meta"):
        model = build()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(path.rpartition(".")[2]):
            raise WrongRequest(f"seq={seq} (--seq) is more than {name} has positions for; give at most {longest}")
