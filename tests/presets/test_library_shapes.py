"""Built-in shapes whose model is a class of transformers or diffusers: configuration, parameters, capture and plan."""

from __future__ import annotations

import sys

import pytest

import memfit
from memfit.errors import InputError
from memfit.presets import Shape, list_shapes, load_shape, shape_step
from memfit.presets.library_models import LibraryModel
from tests.presets.few_layers import LIBRARY_LAYERS, few_library_layers

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

SHAPES = [shape for shape in list_shapes() if isinstance(shape.sizes, LibraryModel)]
SMALLEST = [next(shape for shape in SHAPES if shape.family == family) for family in LIBRARY_LAYERS]


def test_the_models_of_the_last_years_are_there() -> None:
    asked = "deepseek-v3 llama4-scout llama4-maverick qwen3-30b-a3b qwen3-235b-a22b gpt-oss-20b gpt-oss-120b "
    asked += "gemma3-27b sdxl flux-dev sd3-medium whisper-large-v3 dinov3-large"
    assert set(asked.split()) <= {shape.name for shape in list_shapes()}
    assert {shape.family for shape in SHAPES} == set(LIBRARY_LAYERS)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_count_is_what_the_makers_say(shape: Shape) -> None:
    """Within two percent: they round, and some count a vision part that is left out here."""
    unit = {"B": 1e9, "M": 1e6}[shape.published[-1]]
    assert shape.parameters == pytest.approx(float(shape.published[:-1]) * unit, rel=0.02)


@pytest.mark.parametrize("shape", SMALLEST, ids=lambda shape: shape.name)
def test_a_shape_with_few_layers_is_captured_and_planned_for_a_gpu(shape: Shape) -> None:
    step = shape_step(few_library_layers(shape), batch=1, seq=128 if shape.seq else None).step
    trace = memfit.trace(step, target="h100-sxm")
    plan = memfit.plan(trace, target="h100-sxm", ranks=8, progress=False)
    assert plan.status == "optimal" and plan.predicted is not None
    assert {parameter.dtype for parameter in trace.parameters} == {"float32"}


@pytest.mark.zoo
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_whole_shape_is_captured_and_planned_for_gpus(shape: Shape) -> None:
    """On so many that parameters, gradients and AdamW's state take a third of each."""
    ranks = max(8, -(-shape.parameters * 16 * 3 // (80 << 30)))
    step = shape_step(shape, batch=1).step
    assert sum(parameter.numel() for parameter in step.build_model().parameters()) == shape.parameters
    plan = memfit.plan(step, target="h100-sxm", ranks=ranks, progress=False)
    assert plan.status in ("optimal", "feasible") and plan.predicted is not None
    assert plan.predicted.peak_bytes <= plan.budget_bytes


def test_a_length_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match=r"seq=8 \(--seq\) makes no sense for Stable Diffusion XL"):
        shape_step(load_shape("sdxl"), seq=8)
    with pytest.raises(InputError, match=r"seq=500 \(--seq\) is more than whisper-small has positions for.*448"):
        shape_step(load_shape("whisper-small"), seq=500)


@pytest.mark.parametrize(("name", "library"), [("sdxl", "diffusers"), ("gpt-oss-20b", "transformers")])
def test_a_library_that_is_missing_is_named(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=f"needs {library}, which is not installed: pip install {library}"):
        shape_step(load_shape(name))
