"""A step of a transformers configuration: `hf:path/to/config.json`, or `hf:org/name` from the local cache.

No weights, no download, no code of strangers.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memfit.capture import spec
from memfit.errors import InputError
from memfit.presets.errors import NotTaken, WrongRequest
from memfit.presets.parallel_model import TRANSFORMERS_STYLES, TensorParallel
from memfit.presets.shapes import BATCH, NO_BATCH, NamedStep, resolve_count, training_step
from memfit.text import close_names, did_you_mean

PREFIX = "hf:"
_LONGEST_UNASKED = 8192
"""A sequence is not longer than this unless asked for: many configurations name a limit that nobody trains with."""
_IMAGE = 224
_TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal language model",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked language model",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "sequence to sequence",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image classification",
}
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_source_positions")
_POSITIONS = re.compile("position|^wpe$")
_OWN = "for any model at all write path/to/file.py:function, a function that returns a memfit.Step"


@dataclass(frozen=True, slots=True)
class _Class:
    """A model class of transformers and what it is trained for."""

    name: str
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A configuration that was read, and the class of the model that it describes; `name` is how it was asked for."""

    name: str
    path: Path
    raw: dict[str, Any]
    transformers: ModuleType
    config: Any
    chosen: _Class

    @classmethod
    def at(cls, place: str) -> Configured:
        """Return the one in the file that `hf:path` names, or that of the model `hf:org/name` in the local cache."""
        name = place.removeprefix(PREFIX)
        path = _config_file(name, place)
        raw = _read(path)
        transformers = _transformers(place)
        return cls(
            name=str(path) if Path(name).expanduser().exists() else name,
            path=path,
            raw=raw,
            transformers=transformers,
            config=_config(raw, path),
            chosen=_class_of(raw, path),
        )

    def step(self, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
        """Return the training step of the model, built on meta in float32."""
        chosen = self.chosen
        size = resolve_count("batch", batch, BATCH)
        notes = [NO_BATCH] if batch is None else []
        build = partial(_build, self.transformers, chosen.name, self.config)
        if chosen.task == "image classification":
            if seq is not None:
                raise NotTaken(
                    f"seq={seq} (--seq) makes no sense for {chosen.name}, which takes images", "leave it out"
                )
            inputs, what = _images(self.config, size, notes)
        else:
            inputs, what = _tokens(self.config, size, seq, notes)
            if seq is not None:
                _check_positions(self.config, build, chosen.name, seq)
        notes += _saved_dtype(self.raw)
        parallel, why_not = _tensor_parallel(getattr(self.transformers, chosen.name), self.config)
        step = training_step(build, inputs, tensor_parallel=parallel, no_tensor_parallel=why_not)
        return NamedStep(step=step, title=f"{chosen.name} of {self.name}, batch {size}, {what}", notes=tuple(notes))


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


def _build(transformers: ModuleType, name: str, config: Any) -> nn.Module:
    """Return the model itself; its constructor takes torch's default dtype, not the one that weights were saved in."""
    model = getattr(transformers, name)(config)
    model.register_forward_hook(_only_loss)
    return model


def _only_loss(module: nn.Module, given: Any, output: Any) -> torch.Tensor:
    """Return the loss alone: logits are not held through backward, as in transformers' own training loop."""
    return output.loss


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


def _config(raw: dict[str, Any], path: Path) -> Any:
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    kind = raw["model_type"]
    if kind not in known:
        near = map(repr, close_names(kind, known.keys()))
        version = importlib.import_module("transformers").__version__
        hint = did_you_mean(near, "a newer one may.")
        own = "Code that comes with a model is never run; " if "auto_map" in raw else ""
        raise InputError(f"transformers {version} does not know the model_type {kind!r} of {path}; {hint} {own}{_OWN}")
    try:
        config = known[kind].from_dict({key: value for key, value in raw.items() if key != "auto_map"})
    except Exception as error:  # its checks raise errors of many kinds
        raise InputError(f"transformers refuses {path}: {error}") from error
    config.use_cache = False  # it is for generation
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # some token; which does not matter
    return config


def _class_of(raw: dict[str, Any], path: Path) -> _Class:
    """Return the class that the configuration names, if how it is trained is known; else the one for its type."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    named = raw.get("architectures") or []
    for table, task in _TASKS.items():
        mapping = getattr(tables, table)
        classes = mapping.get(raw["model_type"], ())
        classes = (classes,) if isinstance(classes, str) else tuple(classes)
        for name in named or classes[:1]:
            if name in classes:
                return _Class(name, task)
    what = f"its architectures are {', '.join(map(str, named))}" if named else f"its type is {raw['model_type']}"
    raise InputError(
        f"memfit does not know how {path} is trained: {what}. It knows {', '.join(_TASKS.values())}; {_OWN}"
    )


def _tokens(config: Any, size: int, seq: int | None, notes: list[str]) -> tuple[dict[str, torch.Tensor], str]:
    longest = _longest(config)
    default = min(longest or _LONGEST_UNASKED, _LONGEST_UNASKED)
    length = resolve_count("seq", seq, default)
    if seq is None:
        why = "the configuration's length" if default == longest else f"at most {_LONGEST_UNASKED}"
        notes.append(f"{why} since no --seq was given")
    ids = {name: spec((size, length), torch.int64) for name in ("input_ids", "labels")}
    return ids, f"sequences of {length}"


def _longest(config: Any) -> int | None:
    """Return the length that the configuration names; only a model with a table of positions ends there."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((n for name in _LENGTHS if isinstance(n := getattr(text, name, None), int) and n > 0), None)


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


def _images(config: Any, size: int, notes: list[str]) -> tuple[dict[str, torch.Tensor], str]:
    given = getattr(config, "image_size", None)
    if given is None:
        notes.append(f"images of {_IMAGE} x {_IMAGE}, since the configuration has no image_size")
    sides = tuple(given) if isinstance(given, list | tuple) else (given or _IMAGE,) * 2
    pixels = spec((size, getattr(config, "num_channels", 3), *sides))
    return {"pixel_values": pixels, "labels": spec((size,), torch.int64)}, f"images of {sides[0]} x {sides[1]}"


# -- `hf:org/name`: a configuration in the local cache of Hugging Face, nothing is downloaded --------------------------


_REPOSITORY = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_CONFIG = "config.json"


def names_repository(text: str) -> bool:
    """Return whether a text may be a model on the Hub, such as `org/name`, `gpt2` or `org/name@revision`."""
    return _REPOSITORY.fullmatch(text) is not None and not text.endswith(".json")


def cache_folder() -> Path:
    """Return where huggingface_hub keeps what it downloads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(os.environ.get("HF_HOME") or default) / "hub").expanduser()


def cached_config(text: str) -> Path:
    """Return the config.json of a model in the cache; `@revision` is a branch, a tag or a commit, by default `main`."""
    match = _REPOSITORY.fullmatch(text)
    if match is None:
        raise WrongRequest(f"'hf:{text}' names no model; write hf:org/name, or hf:path/to/config.json")
    name, revision = match["name"], match["revision"]
    cache = cache_folder()
    folder = cache / f"models--{name.replace('/', '--')}"
    if not folder.is_dir():
        raise WrongRequest(
            f"there is no file or folder {name}, and no model of that name in the cache of Hugging Face ({cache}). "
            f"Nothing is downloaded here: get it with `hf download {name} {_CONFIG}`, or write hf:path/to/{_CONFIG}"
        )
    commits = _commits(folder)
    wanted = _resolved(folder, revision or "main")
    if wanted is None and revision is None and len(commits) == 1:
        wanted = commits[0]  # downloaded by its commit, so that no branch leads to it
    if wanted is None:
        there = f"the cache has {', '.join(commits[:3])}" if commits else "the cache has no revision of it"
        raise WrongRequest(
            f"revision {revision or 'main'!r} of {name} is not in the cache of Hugging Face ({cache}); {there}. Write "
            f"hf:{name}@COMMIT, or get it with `hf download {name} {_CONFIG}{_option(revision)}`"
        )
    path = folder / "snapshots" / wanted / _CONFIG
    if not path.is_file():
        missing = (folder / ".no_exist" / wanted / _CONFIG).exists()
        why = f"the model has no {_CONFIG}" if missing else f"its {_CONFIG} was not downloaded"
        raise WrongRequest(
            f"{name} is in the cache of Hugging Face ({cache}) without a {_CONFIG}: {why}; "
            + (
                "for any model at all write path/to/file.py:function"
                if missing
                else f"get it with `hf download {name} {_CONFIG}{_option(revision)}`"
            )
        )
    return path


def _resolved(folder: Path, revision: str) -> str | None:
    """Return the commit that a branch, a tag or the beginning of a commit stands for, if the cache has it."""
    ref = folder / "refs" / revision
    if ref.is_file():
        return ref.read_text().strip()
    if len(revision) < 7:
        return None
    return next((commit for commit in _commits(folder) if commit.startswith(revision)), None)


def _commits(folder: Path) -> list[str]:
    snapshots = folder / "snapshots"
    return sorted(each.name for each in snapshots.iterdir() if each.is_dir()) if snapshots.is_dir() else []


def _option(revision: str | None) -> str:
    return "" if revision is None else f" --revision {revision}"
