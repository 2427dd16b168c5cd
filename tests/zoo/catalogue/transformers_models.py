"""Makes a small training step of any architecture of transformers from its configuration class alone.

Sizes of the default configuration are shrunk by the names of its fields, also inside of nested configurations, and
inputs are made by the names that the model's forward takes. Nothing here knows a single architecture.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit import Step
from memfit.presets.transformers_tasks import InputSizes, input_specs

BATCH, LENGTH, VOCABULARY, SIDE, FRAMES, LAYERS = 4, 64, 160, 32, 4, 2

TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "IMAGE_TEXT_TO_TEXT",
    "TIME_SERIES_PREDICTION",
)
"""Which class of an architecture is taken: the first of these that it has."""

_SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (LAYERS, ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")),
    (LAYERS, ("num_decoder_layers", "num_encoder_layers", "encoder_num_layers", "decoder_num_layers", "num_blocks")),
    (
        128,
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "model_dim", "word_embed_proj_dim"),
    ),
    (128, ("projection_dim", "encoder_hidden_size", "decoder_hidden_size", "emb_dim", "text_embed_dim", "logit_dim")),
    (
        4,
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    ),
    (2, ("num_key_value_heads", "num_kv_heads", "n_kv_heads")),
    (
        32,
        ("head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim", "attention_head_dim"),
    ),
    (256, ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")),
    (128, ("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "expert_intermediate_size")),
    (4, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (2, ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")),
    (1, ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace")),
    (32, ("q_lora_rank", "kv_lora_rank", "lora_rank", "state_size", "mamba_d_state", "ssm_state_size", "rotary_dim")),
    (VOCABULARY, ("vocab_size", "encoder_vocab_size", "decoder_vocab_size", "n_vocab", "text_vocab_size")),
    (SIDE, ("image_size", "img_size", "input_size")),
    (8, ("patch_size",)),
    (128, ("max_position_embeddings", "n_positions", "max_target_positions", "max_length_positions")),
    (64, ("max_source_positions",)),
    (16, ("num_mel_bins", "feature_size_mel", "input_feat_per_channel")),
    (FRAMES, ("num_frames",)),
    (1, ("tubelet_size",)),
)
_SHRUNK = {name: size for size, names in _SIZES for name in names}
_TOKENS = ("_token_id", "_token_index", "_id")
_LEAST_TOKEN = 3
"""Below it are the special tokens of a shrunk configuration."""


def architectures() -> list[str]:
    """Return the types of configuration that have a class for one of the tasks, in alphabetical order."""
    found = {kind for task in TASKS for kind in _classes(task)}
    return sorted(kind for kind in found)


def build(kind: str) -> Step:
    """Return a small step of the architecture."""
    import transformers

    task, name = next((task, _classes(task)[kind]) for task in TASKS if kind in _classes(task))
    with _quiet():
        config = shrink(transformers.AutoConfig.for_model(kind))
        model = getattr(transformers, name)(config)
    return Step(model.train(), inputs(model, config, task), loss=loss)


def loss(output: Any, batch: Any) -> torch.Tensor:
    """Return the model's own loss; without labels, the mean square of the first result that can be trained."""
    found = getattr(output, "loss", None)
    if found is not None:
        return found.mean()
    values = output.values() if isinstance(output, dict) else output
    first = next(each for each in values if isinstance(each, torch.Tensor) and each.grad_fn is not None)
    return first.float().square().mean()


def _classes(task: str) -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return {kind: names if isinstance(names, str) else names[0] for kind, names in table.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def shrink(config: Any) -> Any:
    """Return a configuration of the same class that is small, with the ones inside it.

    It is made anew, because constructors derive sizes from others.
    """
    from transformers import PreTrainedConfig

    given = dict(_small_fields(config))
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            given[name] = shrink(value).to_dict()
    return type(config)(**given)


def _small_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Give the fields of a configuration that have another value in a small one."""
    renamed = {own: theirs for theirs, own in (getattr(config, "attribute_map", None) or {}).items()}
    for name, value in vars(config).items():
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int):
            size = _SHRUNK.get(name, _SHRUNK.get(renamed.get(name, "")))
            if size is not None and value > size:
                yield name, size
            elif name.endswith(_TOKENS) and value >= VOCABULARY:
                yield name, value % _LEAST_TOKEN
        elif isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            yield from _small_list(name, list(value))
        elif name == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            yield name, (kinds * LAYERS)[:LAYERS]
    if hasattr(config, "use_cache"):
        yield "use_cache", False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        yield "decoder_start_token_id", 0
    if getattr(config, "pad_token_id", 0) is None:
        yield "pad_token_id", 0


def _small_list(name: str, values: list[int]) -> Iterator[tuple[str, list[int]]]:
    if name in ("depths", "num_layers", "layers", "encoder_depths", "num_blocks"):
        yield name, [min(each, 1) for each in values]
    elif name in ("image_size", "img_size"):
        yield name, [min(each, SIDE) for each in values]
    elif re.search("size|dim|channels", name) and not re.search("patch|kernel|window", name) and min(values) >= 32:
        yield name, [max(16, 16 * round(each / min(values))) for each in values]


def inputs(model: nn.Module, config: Any, task: str) -> dict[str, Any]:
    """Return a batch by the names that the model's forward takes; without images where they belong to a text."""
    sizes = InputSizes(batch=BATCH, length=LENGTH, side=SIDE, frames=FRAMES, samples=1600, features=64, transcript=6)
    found = input_specs(model.forward, config, task, sizes)
    if task == "IMAGE_TEXT_TO_TEXT" and "input_ids" in found:
        found.pop("pixel_values", None)
    if (
        task in ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
        and "attention_mask" in inspect.signature(model.forward).parameters
    ):
        found["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    return {name: _filled(name, each, config, task) for name, each in found.items()}


def _filled(name: str, given: Any, config: Any, task: str) -> Any:
    """Return random values in the shape of a tensor that has none."""
    if not isinstance(given, torch.Tensor) or not given.is_meta:
        return given
    if given.is_floating_point():
        return torch.rand(given.shape) if name == "labels" else torch.randn(given.shape)
    if name == "labels" and task == "CTC":
        return torch.randint(1, 8, given.shape)
    if name == "labels" and (given.dim() == 1 or task == "SEMANTIC_SEGMENTATION"):
        return torch.randint(0, config.num_labels, given.shape)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(getattr(text, "vocab_size", VOCABULARY) or VOCABULARY, VOCABULARY)
    return torch.randint(_LEAST_TOKEN, vocabulary, given.shape)
