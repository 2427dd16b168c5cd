"""Built-in models and transformers configurations on a mesh; that they compute the same is in tests/distributed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import memfit
from memfit.errors import InputError
from memfit.presets import ParallelModel, in_autocast, step_at

LAYERS = 2
CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}


def configured(folder: Path, **values: object) -> memfit.Step:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **values}))
    return step_at(f"hf:{path}", batch=2, seq=64)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_models_are_split_by_their_own_plan(tmp_path: Path, model_type: str, tied: bool) -> None:
    step = configured(tmp_path, model_type=model_type, tie_word_embeddings=tied)
    assert isinstance(step.model, ParallelModel) and step.model.mesh_dims == ("dp", "tp")
    trace = memfit.trace(step, target="h100-sxm", mesh={"dp": 2, "tp": 2})
    calls = Counter((each.kind, each.dims) for each in trace.collectives)
    assert calls["all_gather", ("dp",)] == 2 * LAYERS + 1 and calls["reduce_scatter", ("dp",)] == LAYERS + 1
    assert calls["all_gather", ("tp",)] == 1, "the logits, as transformers gathers them"
    plain = memfit.trace(step, target="h100-sxm")
    assert len(trace.parameters) == len(plain.parameters), "a tied head stays tied"
    whole = {each.names[0]: plain.storages[each.storage].bytes for each in plain.parameters}
    alike = sum(n for name, n in whole.items() if "norm" in name or ("embed" in name and not tied))
    held = sum(trace.storages[each.storage].bytes for each in trace.parameters)
    assert held == (sum(whole.values()) - alike) // 4 + alike // 2, "what the plan leaves out is on both of a pair"
    with pytest.raises(InputError, match="tp 4: 2 key and value heads cannot be divided by 4"):
        memfit.trace(step, target="h100-sxm", mesh={"dp": 1, "tp": 4})


def test_what_has_no_plan_for_tensor_parallelism_says_so(tmp_path: Path) -> None:
    for step, why in (
        (step_at("gpt2", batch=1, seq=16), "queries, keys and values come from one matrix"),
        (configured(tmp_path, model_type="mixtral", num_local_experts=4), "styles that PyTorch has not"),
        (configured(tmp_path, model_type="opt"), "has no base_model_tp_plan"),
    ):
        assert isinstance(step.model, ParallelModel) and step.model.mesh_dims == ("dp",)
        with pytest.raises(InputError, match=why):
            memfit.trace(step, target="h100-sxm", mesh={"dp": 1, "tp": 2})
    with pytest.raises(InputError, match="the mesh has 'ep', and the model knows dp"):
        memfit.trace(step, target="h100-sxm", mesh={"dp": 1, "ep": 2})


def test_parameters_are_gathered_in_the_dtype_of_the_compute(tmp_path: Path) -> None:
    step = configured(tmp_path, model_type="llama")
    gathered = {
        dtype: sum(
            each.bytes
            for each in memfit.trace(in_autocast(step, dtype), target="h100-sxm", mesh={"dp": 2}).collectives
            if each.kind == "all_gather"
        )
        for dtype in (torch.bfloat16, None)
    }
    assert gathered[None] == 2 * gathered[torch.bfloat16]
