"""Steps by where they are: functions in files and modules, and configurations of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memfit
from memfit.capture import Trace
from memfit.errors import InputError
from memfit.presets import named_step_at, named_steps_at, step_at
from memfit.presets.errors import StepRaised, WrongRequest
from memfit.presets.hub_cache import cached_config

TRAIN = """
import torch
import memfit

def step():
    return sized(2)

def sized(batch, seq=8):
    model = torch.nn.Linear(seq, 4)
    return memfit.Step(model, memfit.spec((batch, seq)), loss=lambda out, _: out.sum())

def anything(**options):
    return sized(**options)

def other(rows):
    return sized(rows)

made = sized(3)
"""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
CAUSAL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, **SMALL}
MASKED = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL}
SEQ2SEQ = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 300,
}
IMAGES = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8}
IMAGES |= {key: value for key, value in SMALL.items() if key != "vocab_size"}


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train_of_shapes.py"
    path.write_text(TRAIN)
    return str(path)


def config(folder: Path, values: dict[str, Any] | str) -> str:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return f"hf:{path}"


def test_functions_of_files_and_modules(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_at(f"{train}:step").batch.shape == (2, 8)
    assert step_at(f"{train}:made").batch.shape == (3, 8)
    monkeypatch.chdir(Path(train).parent)
    assert step_at("train_of_shapes:step").batch.shape == (2, 8)
    assert named_step_at("train_of_shapes:step").title == "train_of_shapes:step"


def test_batch_and_seq_are_passed_to_functions_that_take_them(train: str) -> None:
    assert step_at(f"{train}:sized", batch=5).batch.shape == (5, 8)
    assert step_at(f"{train}:sized", batch=5, seq=16).batch.shape == (5, 16)
    assert step_at(f"{train}:anything", batch=5).batch.shape == (5, 8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("step", {"batch": 4}, r"batch=4 \(--batch\) cannot be passed to .*:step.*leave it out.*def step\(batch=4\)"),
        ("step", {"batch": 4, "seq": 2}, r"batch=4 \(--batch\) and seq=2 \(--seq\) cannot be passed"),
        ("made", {"seq": 4}, r"seq=4 \(--seq\) cannot be passed to .*which is no function"),
        ("sized", {}, r"sized needs batch; give --batch"),
        ("other", {}, r"other needs rows; give its arguments defaults"),
        ("stp", {}, "did you mean 'step'"),
    ],
)
def test_what_cannot_be_passed_is_refused(train: str, name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        step_at(f"{train}:{name}", **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.py", "'train.py' names no function"),
        ("org/name", "for a model in the cache of Hugging Face write hf:org/name"),
        ("", "a step is named by a text"),
        (None, "a step is named by a text"),
        ("no_such_file.py:step", "there is no file no_such_file.py"),
        ("no_such_package.train:step", "there is no module 'no_such_package'"),
        ("hf:no/such/config.json", r"there is no file no/such/config\.json.*Nothing is downloaded"),
    ],
)
def test_what_names_no_step_is_refused(text: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        step_at(text)


def test_verify_still_has_the_same_function() -> None:
    from memfit.verify import step_at as verified

    assert verified is step_at


@pytest.mark.parametrize(
    ("values", "seq", "inputs"),
    [
        (CAUSAL, 32, {"input_ids": (2, 32), "labels": (2, 32)}),
        (MASKED, 32, {"input_ids": (2, 32), "labels": (2, 32)}),
        (SEQ2SEQ, 32, {"input_ids": (2, 32), "labels": (2, 32)}),
        (IMAGES, None, {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
    ],
    ids=["causal", "masked", "seq2seq", "images"],
)
def test_configurations_of_transformers(
    tmp_path: Path, values: dict[str, Any], seq: int | None, inputs: dict[str, tuple[int, ...]]
) -> None:
    pytest.importorskip("transformers")
    text = config(tmp_path, {**values, "torch_dtype": "bfloat16"})
    step = step_at(text, batch=2, seq=seq)
    assert {name: tuple(tensor.shape) for name, tensor in step.batch.items()} == inputs
    trace = memfit.trace(step, target="h100-sxm")
    assert {parameter.dtype for parameter in trace.parameters} == {"float32"}
    assert any(op.name == "aten._fused_adamw_.default" for op in trace.ops)
    assert trace.modules[0].kind == values["architectures"][0]


def test_a_folder_and_a_type_without_architectures_will_do(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config(tmp_path, {key: value for key, value in CAUSAL.items() if key != "architectures"})
    found = named_step_at(f"hf:{tmp_path}")
    assert found.step.batch["input_ids"].shape == (1, 2048)
    assert found.title.startswith("LlamaForCausalLM of ") and len(found.notes) == 2
    assert "2048" in found.title and not any("2048" in note for note in found.notes)


def test_a_dtype_of_saved_weights_is_not_taken_for_the_one_of_training(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = named_step_at(config(tmp_path, {**CAUSAL, "torch_dtype": "bfloat16"}), batch=1, seq=8)
    assert found.notes == (
        "parameters in float32 and compute in bfloat16: bfloat16 of the configuration is how weights were saved",
    )


def test_what_a_file_raises_is_told_with_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "broken_train.py"
    path.write_text("import no_such_package_at_all\n")
    with pytest.raises(
        StepRaised, match=r"broken_train.py raised ModuleNotFoundError: .*broken_train.py:1\)"
    ) as caught:
        step_at(f"{path}:step")
    assert "memfit" not in str(caught.value).replace(str(tmp_path), "") and caught.value.__cause__ is not None


CLASSES = """
import pickle
from dataclasses import dataclass
import torch, memfit

@dataclass
class Sizes:
    width: "int" = 4
    def again(self):
        return pickle.loads(pickle.dumps(self))

def step():
    width = Sizes(8).again().width
    return memfit.Step(torch.nn.Linear(width, 1), memfit.spec((1, width)))
"""


@pytest.mark.parametrize("name", ["json.py", "statistics.py", "train-v2.final.py", "taken_by_another.py"])
def test_a_file_takes_the_name_of_no_other_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "taken_by_another", taken := ModuleType("taken_by_another"))
    (tmp_path / name).write_text(CLASSES)
    for _ in range(2):
        assert step_at(f"{tmp_path / name}:step").batch.shape == (1, 8)
    assert sys.modules["json"] is json and sys.modules["taken_by_another"] is taken
    found = sys.modules.get("statistics")
    assert found is None or "memfit" not in vars(found)


def test_a_file_has_its_own_name_where_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside it import it by that name, and get the same classes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "free_name_of_step.py").write_text(CLASSES + "import beside_free_name\nassert beside_free_name.ok()\n")
    (tmp_path / "beside_free_name.py").write_text(
        "import sys\ndef ok():\n    import free_name_of_step as found\n"
        "    return found.Sizes is sys._getframe(1).f_globals['Sizes']\n"
    )
    assert step_at(f"{tmp_path / 'free_name_of_step.py'}:step").batch.shape == (1, 8)


def test_a_file_that_fails_leaves_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fails_at_import.py").write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(StepRaised, match="ZeroDivisionError"):
        step_at(f"{tmp_path / 'fails_at_import.py'}:step")
    assert not {name for name in set(sys.modules) - before if "fails_at_import" in name}


def test_a_file_is_run_once_for_many_steps(tmp_path: Path) -> None:
    path = tmp_path / "train_for_many.py"
    path.write_text(f"{TRAIN}\nopen(__file__ + '.runs', 'a').write('once ')\n")
    steps = named_steps_at(f"{path}:sized")
    assert [steps(batch=batch).step.batch.shape[0] for batch in (1, 2, 3)] == [1, 2, 3]
    assert (tmp_path / "train_for_many.py.runs").read_text() == "once "


def test_a_sequence_ends_where_a_table_of_positions_does(tmp_path: Path) -> None:
    """On meta nothing would notice; rotary positions go on."""
    pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    text = config(tmp_path, {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    assert step_at(text, seq=32).batch["input_ids"].shape == (1, 32)
    with pytest.raises(InputError, match=r"seq=33 .* is more than GPT2LMHeadModel has positions for.*at most 32"):
        step_at(text, seq=33)
    text = config(tmp_path, {**CAUSAL, "max_position_embeddings": 32})
    assert step_at(text, seq=64).batch["input_ids"].shape == (1, 64)


def test_a_long_limit_is_no_default(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = named_step_at(config(tmp_path, {**CAUSAL, "max_position_embeddings": 131072}))
    assert found.step.batch["input_ids"].shape == (1, 8192) and "at most 8192" in found.notes[1]


def test_a_configuration_gives_the_trace_of_the_model_itself(tmp_path: Path) -> None:
    """But for logits, which are let go of when the loss is there."""
    transformers = pytest.importorskip("transformers")
    step = step_at(config(tmp_path, CAUSAL), batch=2, seq=32)
    values = {key: value for key, value in CAUSAL.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, use_cache=False))

    def names(trace: Trace) -> list[str]:
        return [op.name for op in trace.ops]

    own = memfit.Step(model, step.batch, optimizer=step.optimizer, autocast=torch.bfloat16, clip_grad_norm=1.0)
    assert names(memfit.trace(step, target="h100-sxm")) == names(memfit.trace(own, target="h100-sxm"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "is no configuration of transformers"),
        ("[]", "has no model_type"),
        ({"model_type": "lama"}, r"does not know the model_type 'lama'.*did you mean 'llama'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "Code that comes with a model is never run"),
        (
            {**MASKED, "architectures": ["BertForPreTraining"]},
            r"does not know how .* is trained: its architectures are BertForPreTraining.*file\.py:function",
        ),
        ({"model_type": "detr"}, "its type is detr"),
    ],
)
def test_configurations_that_cannot_be_used_are_refused(tmp_path: Path, values: Any, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=message):
        step_at(config(tmp_path, values))


def test_images_have_no_sequence(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=r"seq=8 \(--seq\) makes no sense for ViTForImageClassification"):
        step_at(config(tmp_path, IMAGES), seq=8)


def test_without_transformers_one_is_told_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="needs transformers, which is not installed: pip install transformers"):
        step_at(config(tmp_path, CAUSAL))


def cached(cache: Path, name: str, commit: str, *, ref: str | None = "main", config: bool = True) -> None:
    """A model as huggingface_hub keeps it: a blob, a snapshot that links to it, and a branch that names the commit."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "snapshots" / commit).mkdir(parents=True)
    if config:
        (folder / "blobs" / f"blob-{commit}").write_text(json.dumps(GPT2_CONFIG))
        (folder / "snapshots" / commit / "config.json").symlink_to(Path("../../blobs") / f"blob-{commit}")
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)


GPT2_CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 32,
    "vocab_size": 64,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_model_of_the_hub_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached(tmp_path / "hub", "org/tiny", COMMIT)
    found = named_step_at("hf:org/tiny", batch=2)
    assert found.title == "GPT2LMHeadModel of org/tiny, batch 2, sequences of 32"
    assert named_step_at(f"hf:org/tiny@{COMMIT[:8]}").title.startswith("GPT2LMHeadModel of org/tiny@")
    cached(tmp_path / "hub", "detached", COMMIT, ref=None)
    assert named_step_at("hf:detached").title.startswith("GPT2LMHeadModel of detached")


def test_huggingface_hub_finds_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "org/tiny", COMMIT)
    theirs = hub.try_to_load_from_cache("org/tiny", "config.json", cache_dir=tmp_path)
    assert cached_config("org/tiny").resolve() == Path(theirs).resolve()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:org/absent", r"no model of that name in the cache of Hugging Face.*`hf download org/absent config\.json`"),
        ("hf:org/tiny@v2", r"revision 'v2' of org/tiny is not in the cache.*0123456789.*--revision v2"),
        ("hf:org/bare", r"org/bare is in the cache.*its config\.json was not downloaded.*hf download org/bare"),
        ("hf:org/other", r"without a config\.json: the model has no config\.json.*path/to/file\.py:function"),
    ],
)
def test_what_the_cache_does_not_have_is_refused(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "org/tiny", COMMIT)
    for name in ("org/bare", "org/other"):
        cached(tmp_path, name, COMMIT, config=False)
    absent = tmp_path / "models--org--other" / ".no_exist" / COMMIT
    absent.mkdir(parents=True)
    (absent / "config.json").touch()
    with pytest.raises(WrongRequest, match=says):
        named_step_at(text)
