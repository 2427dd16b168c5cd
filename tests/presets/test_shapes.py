"""Built-in shapes: their sizes are those that were published, and they train as torchtitan does."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Category, Phase, Trace
from memfit.errors import InputError
from memfit.presets import Shape, list_shapes, load_shape, named_step_at, shape_step, step_at
from memfit.presets.library_models import LibraryModel
from memfit.presets.models.llama import Llama, LlamaSizes
from memfit.presets.models.mixtral import Experts, MixtralSizes

SHAPES = tuple(shape for shape in list_shapes() if not isinstance(shape.sizes, LibraryModel))
NAMES = [shape.name for shape in SHAPES]


def small(name: str) -> Shape:
    """A shape with two layers."""
    shape = load_shape(name)
    return replace(shape, sizes=replace(shape.sizes, layers=2))


def captured(name: str, *, target: str = "h100-sxm", seq: int | None = 64) -> Trace:
    shape = small(name)
    return memfit.trace(shape_step(shape, batch=2, seq=seq if shape.seq else None).step, target=target)


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_parameters_are_as_many_as_published(shape: Shape) -> None:
    model = shape_step(shape).step.build_model()
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_the_shapes_that_people_ask_for_are_there() -> None:
    asked = "llama3-8b llama3-70b llama3-405b llama3.2-1b llama3.2-3b gpt2 gpt2-medium gpt2-large gpt2-xl bert-base "
    asked += "bert-large vit-base vit-large vit-huge qwen3-8b mixtral-8x7b"
    assert set(asked.split()) <= set(NAMES) and len(set(NAMES)) == len(NAMES)


def test_a_shape_is_data_with_a_source_and_a_date() -> None:
    for shape in SHAPES:
        assert dataclasses.is_dataclass(shape) and shape.source and shape.date and shape.title
        with pytest.raises(dataclasses.FrozenInstanceError):
            shape.parameters = 1  # type: ignore[misc]


@pytest.mark.parametrize("spelling", ["llama3-8b", "Llama-3 8B", "LLAMA3_8B", "llama3.1-8b"])
def test_a_name_may_be_spelt_as_people_do(spelling: str) -> None:
    assert load_shape(spelling).name == "llama3-8b"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3-8", "did you mean llama3-8b"),
        ("lama3-8b", "llama3-8b"),
        ("gpt-2-medum", "gpt2-medium"),
        ("vit_hge", "vit-huge"),
        ("resnet", r"there are .*gpt2.*path/to/file\.py:function.*hf:"),
    ],
)
def test_a_name_that_is_no_shape_is_told_what_may_have_been_meant(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"there is no shape '{name}'; .*{hint}"):
        step_at(name)


@pytest.mark.parametrize(
    "name", ["llama3-8b", "llama3.2-1b", "qwen3-8b", "mixtral-8x7b", "gpt2", "bert-base", "vit-base"]
)
def test_compute_is_bfloat16_and_what_is_kept_is_float32(name: str) -> None:
    trace = captured(name)
    assert {parameter.dtype for parameter in trace.parameters} == {"float32"}
    matmuls = [op for op in trace.ops if op.name in ("aten.mm.default", "aten.addmm.default")]
    assert matmuls and {ref.dtype for op in matmuls for ref in op.outputs} == {"bfloat16"}
    states = [storage for storage in trace.storages if storage.category is Category.OPTIMIZER_STATE]
    elements = sum(torch.Size(parameter.shape).numel() for parameter in trace.parameters)
    assert 8 * elements <= sum(storage.bytes for storage in states) < 8 * elements + 1024 * len(states)
    stepped = [op.name for op in trace.ops if op.phase is Phase.OPTIMIZER]
    assert "aten._fused_adamw_.default" in stepped and "aten._foreach_norm.Scalar" in stepped


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "bert-base", "vit-base"])
def test_what_flows_between_layers_is_bfloat16(name: str) -> None:
    """As FSDP2's mixed precision has it; autocast alone would leave norms and embeddings in float32."""
    trace = captured(name)
    norms = [op for op in trace.ops if op.name in ("aten._fused_rms_norm.default", "aten.native_layer_norm.default")]
    assert norms and {op.outputs[0].dtype for op in norms} == {"bfloat16"}


def test_logits_are_not_held_through_backward() -> None:
    trace = captured("llama3-8b", seq=128)
    vocabulary = load_shape("llama3-8b").sizes
    assert isinstance(vocabulary, LlamaSizes)
    logits_bytes = 2 * 128 * vocabulary.vocabulary * 2
    first = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    made = [each for each in trace.storages if each.bytes == logits_bytes and 0 <= each.alloc_at < first]
    assert made and all(0 <= each.free_after <= first for each in made)


def test_embeddings_are_tied_where_the_real_model_ties_them() -> None:
    for name, tied in (("llama3.2-1b", True), ("llama3-8b", False), ("qwen3-0.6b", True), ("qwen3-8b", False)):
        model = shape_step(small(name)).step.build_model()
        assert isinstance(model, Llama) and (model.head.weight is model.embedding.weight) is tied


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2", "bert-base"])
def test_a_shape_is_a_real_model_that_learns(name: str) -> None:
    """At a small size, on real tensors: the loss of one batch falls."""
    shape, seq = small(name), 16
    sizes = {"hidden": 32, "heads": 2, "feed_forward": 64, "vocabulary": 50}
    sizes |= {"key_value_heads": 1, "head": 16} if isinstance(shape.sizes, LlamaSizes) else {"dropout": 0.0}
    step = shape_step(replace(shape, sizes=replace(shape.sizes, **sizes)), batch=2, seq=seq).step
    torch.manual_seed(0)
    assert not isinstance(step.model, nn.Module)
    model = step.model()
    tokens = torch.randint(50, (2, seq))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    real = replace(step, model=model, batch=batch, optimizer=optimizer, autocast=None)
    before = float(model(**batch).detach())
    for _ in range(8):
        real.execute(model, optimizer, "cpu")
    assert float(model(**batch).detach()) < before - 0.5
    assert model(tokens).shape == (2, seq, 50)


def test_every_token_goes_through_its_experts_and_no_other() -> None:
    torch.manual_seed(0)
    sizes = load_shape("mixtral-8x7b").sizes
    assert isinstance(sizes, MixtralSizes)
    layer = Experts(replace(sizes, hidden=16, feed_forward=32, experts=4))
    x = torch.randn(2, 8, 16)
    gate, up, down = (weight.unflatten(0, (4, -1)) for weight in (layer.gate, layer.up, layer.down))
    shares, experts = layer.router(x).softmax(-1).topk(2)
    shares = shares / shares.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for row, place, each in itertools.product(range(2), range(8), range(2)):
        expert, token = experts[row, place, each], x[row, place]
        through = (F.silu(token @ gate[expert]) * (token @ up[expert])) @ down[expert]
        expected[row, place] += shares[row, place, each] * through
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_a_step_needs_nothing_but_memfit_and_torch() -> None:
    """No other modelling package is imported, and nothing is allocated whatever the size."""
    code = (
        "import sys, resource; from memfit.presets import step_at; import memfit\n"
        "memfit.trace(step_at('llama3-8b', batch=2, seq=8192), target='h100-sxm')\n"
        "assert 'transformers' not in sys.modules and 'torchvision' not in sys.modules\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_was_not_given_is_chosen_and_said() -> None:
    found = named_step_at("llama3-8b")
    assert found.step.batch["tokens"].shape == (1, 8192)
    assert found.notes == (
        "one sample since no --batch was given",
        "that long since no --seq was given",
    )
    assert found.title == "Llama 3 8B, 8.03 billion parameters, batch 1, sequences of 8192"
    assert named_step_at("gpt2", batch=2, seq=128).notes == ()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit-large", {"seq": 512}, r"seq=512 \(--seq\) makes no sense for vit-large.*224 x 224; leave it out"),
        ("gpt2", {"seq": 2048}, r"seq=2048 \(--seq\) is more than gpt2 has positions for; give at most 1024"),
        ("gpt2", {"batch": 0}, r"batch \(--batch\) is 0; write a whole number"),
        ("gpt2", {"batch": "4"}, r"batch \(--batch\) is '4'"),
        ("gpt2", {"seq": 1.5}, r"seq \(--seq\) is 1.5"),
    ],
)
def test_options_that_a_shape_cannot_have_are_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        step_at(name, **options)


def test_sequences_may_be_longer_than_usual_where_positions_are_rotary() -> None:
    assert step_at("llama3-8b", seq=131072).batch["tokens"].shape == (1, 131072)
