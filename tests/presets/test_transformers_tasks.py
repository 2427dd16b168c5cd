"""`hf:` configurations of every kind of task: the task is what the architecture says, or what is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import InputError
from memfit.presets import named_step_at, step_at
from memfit.presets.transformers_tasks import TASKS

pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
BERT = {"model_type": "bert", **TEXT}
LLAMA = {"model_type": "llama", "num_key_value_heads": 1, **TEXT}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 8}
WHISPER = {"model_type": "whisper", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
WHISPER |= {"vocab_size": 100, "max_source_positions": 50, "max_target_positions": 24, "pad_token_id": 0}
WHISPER |= {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "begin_suppress_tokens": [2]}
WAV2VEC2 = {"model_type": "wav2vec2", **TEXT, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]}
WAV2VEC2 |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
LLAVA = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **VISION}}
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "LlamaForCausalLM": (LLAMA, {"input_ids": (2, 16), "labels": (2, 16)}, "sequences of 16"),
    "BertForMaskedLM": (BERT, {"input_ids": (2, 16), "labels": (2, 16)}, "sequences of 16"),
    "BertForSequenceClassification": (BERT, {"input_ids": (2, 16), "labels": (2,)}, "sequences of 16"),
    "LlamaForSequenceClassification": (LLAMA, {"input_ids": (2, 16), "labels": (2,)}, "sequences of 16"),
    "BertForTokenClassification": (BERT, {"input_ids": (2, 16), "labels": (2, 16)}, "sequences of 16"),
    "BertForQuestionAnswering": (
        BERT,
        {"input_ids": (2, 16), "start_positions": (2,), "end_positions": (2,)},
        "sequences of 16",
    ),
    "WhisperForConditionalGeneration": (
        WHISPER,
        {"input_features": (2, 8, 100), "labels": (2, 16)},
        "spectrograms of 8 x 100, texts of 16",
    ),
    "LlavaForConditionalGeneration": (
        LLAVA,
        {"input_ids": (2, 16), "pixel_values": (2, 3, 32, 32), "labels": (2, 16)},
        "sequences of 16, images of 32 x 32",
    ),
    "CLIPModel": (
        {"model_type": "clip", "text_config": TEXT, "vision_config": VISION, "projection_dim": 16},
        {"input_ids": (2, 16), "pixel_values": (2, 3, 32, 32)},
        "sequences of 16, images of 32 x 32",
    ),
}


def config(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return f"hf:{path}"


@pytest.mark.parametrize("name", CASES)
def test_a_task_is_inferred_and_its_step_is_captured(name: str, tmp_path: Path) -> None:
    values, shapes, described = CASES[name]
    found = named_step_at(config(tmp_path, {**values, "architectures": [name]}), batch=2, seq=16)
    batch = {key: tuple(each.shape) for key, each in found.step.batch.items() if isinstance(each, torch.Tensor)}
    assert batch == shapes
    assert found.title.startswith(f"{name} of ") and found.title.endswith(f"batch 2, {described}")
    trace = memfit.trace(found.step, target="rtx-4090")
    assert trace.parameters and any(op.phase.name == "BACKWARD" for op in trace.ops)


def test_ctc_is_trained_on_recordings(tmp_path: Path) -> None:
    """Without what depends on chance or on values, which notes say; `--seq` is samples."""
    text = config(tmp_path, {**WAV2VEC2, "architectures": ["Wav2Vec2ForCTC"], "layerdrop": 0.1})
    found = named_step_at(text, batch=2, seq=4000)
    assert found.step.batch["input_values"].shape == (2, 4000) and found.title.endswith("recordings of 4000")
    assert [note.partition(",")[0] for note in found.notes] == ["without layerdrop", "without apply_spec_augment"]
    trace = memfit.trace(found.step, target="rtx-4090")
    assert "aten._ctc_loss.default" in {op.name for op in trace.ops}
    assert named_step_at(text, batch=2).step.batch["input_values"].shape == (2, 160_000)


def test_the_loss_of_ctc_is_that_of_the_model(tmp_path: Path) -> None:
    import transformers

    values = {key: value for key, value in WAV2VEC2.items() if key != "model_type"}
    values |= {"layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean"}
    step = step_at(config(tmp_path, {**WAV2VEC2, **values, "architectures": ["Wav2Vec2ForCTC"]}), batch=2, seq=4000)
    torch.manual_seed(0)
    model = step.model().eval()  # type: ignore[operator]
    labels = torch.randint(1, 100, (2, 64))
    recordings = torch.randn(2, 4000)
    assert isinstance(model.model, transformers.Wav2Vec2ForCTC)
    with torch.no_grad():
        own = model.model(input_values=recordings, labels=labels).loss
        assert torch.equal(model(input_values=recordings, labels=labels), own)


def test_a_task_may_be_asked_for(tmp_path: Path) -> None:
    text = config(tmp_path, {**BERT, "architectures": ["BertForPreTraining"]})
    with pytest.raises(InputError, match=r"does not know how .* is trained: .*BertForPreTraining.*--task: .*masked-lm"):
        step_at(text)
    assert named_step_at(text, task="token-classification").title.startswith("BertForTokenClassification of")
    assert named_step_at(config(tmp_path, {**BERT, "architectures": ["BertForMaskedLM"]}), task="causal-lm")
    with pytest.raises(InputError, match=r"transformers has no class of bert for --task ctc; it has: causal-lm"):
        step_at(text, task="ctc")
    with pytest.raises(InputError, match=r"there is no task 'masked_lm' \(--task\); did you mean masked-lm"):
        step_at(text, task="masked_lm")
    with pytest.raises(InputError, match=r"task='causal-lm' \(--task\) is for configurations of transformers"):
        step_at("gpt2", task="causal-lm")


def test_checks_of_values_are_back_after_a_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("TRANSFORMERS_DISABLE_TORCH_CHECK", raising=False)
    text = config(tmp_path, {**LLAVA, "architectures": ["LlavaForConditionalGeneration"]})
    memfit.trace(step_at(text, seq=16), target="cpu")
    assert "TRANSFORMERS_DISABLE_TORCH_CHECK" not in os.environ
    assert f"{torch.ones(())}" == "1.0"


def test_every_task_has_classes_in_transformers() -> None:
    assert all(task.classes for task in TASKS) and len({task.name for task in TASKS}) == len(TASKS)
