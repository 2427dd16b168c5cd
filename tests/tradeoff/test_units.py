"""Units: which parts of a step a plan may checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from llama import Shape, training_step
from torch import nn

import memfit
from memfit.capture import NO_INDEX, Phase, Step, Trace
from memfit.tradeoff import LOSS, Unit, find_units
from tests.zoo import zoo_models

SMALL = Shape(layers=2, hidden=32, heads=4, key_value_heads=2, feed_forward=64, vocabulary=128)


def by_name(trace: Trace) -> dict[str, Unit]:
    return {unit.name: unit for unit in find_units(trace)}


def names_of(trace: Trace, unit: Unit) -> list[str]:
    return [trace.ops[op].name.split(".")[1] for op in range(unit.begin, unit.end)]


def test_units_are_calls_with_a_backward_outer_ones_first() -> None:
    trace = memfit.trace(training_step(SMALL, length=16), target="h100-sxm")
    found = find_units(trace)
    names = [unit.name for unit in found]
    assert names[:5] == ["", "embedding", "layers.0", "layers.0.attention_norm", "layers.0.attention"]
    assert names[-1] == LOSS
    assert len(set(names)) == len(names)
    for unit in found[:-1]:
        call = trace.calls[unit.call]
        assert (unit.module, unit.kind, unit.begin, unit.end) == (call.module, call.kind, call.begin, call.end)
        assert unit.end <= unit.backward_begin < unit.backward_end


def test_a_loss_function_is_the_loss_region() -> None:
    trace = memfit.trace(training_step(SMALL, length=16), target="h100-sxm")
    loss = by_name(trace)[LOSS]
    assert loss.call == NO_INDEX
    assert loss.begin == trace.calls[0].end
    assert trace.ops[loss.end].phase is Phase.BACKWARD
    assert names_of(trace, loss)[-2:] == ["_log_softmax", "nll_loss_forward"]
    assert trace.ops[loss.backward_begin].forward_op == loss.end - 1


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_a_loss_inside_the_model_is_what_runs_after_its_last_child(model: str) -> None:
    """In T5 the loss is a module made on the fly, which is no child."""
    trace = memfit.trace(zoo_models.STEPS[model](), target="cpu")
    found = by_name(trace)
    loss = found[LOSS]
    assert loss.begin == found["lm_head"].end
    assert loss.end == found[""].end
    assert names_of(trace, loss)[-2:] == ["_log_softmax", "nll_loss_forward"]


def test_accumulated_passes_have_units_of_their_own() -> None:
    trace = memfit.trace(zoo_models.STEPS["llama-accumulated"](), target="cpu")
    found = by_name(trace)
    passes = [found[name] for name in ("", "#1", "#2")]
    losses = [found[name] for name in (LOSS, f"{LOSS}#1", f"{LOSS}#2")]
    for model, loss in zip(passes, losses, strict=True):
        assert model.begin < loss.begin < loss.end <= model.end <= loss.backward_begin
    assert passes[0].backward_end <= passes[1].begin
    assert "model.layers.2.mlp#2" in found


def test_a_second_call_has_a_number() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x).relu()).sum()

    trace = memfit.trace(Step(Twice(), torch.ones(2, 4)), target="cpu")
    found = by_name(trace)
    assert {"inner", "inner#1"} <= found.keys()
    assert found["inner"].end <= found["inner#1"].begin
    assert found["inner#1"].backward_begin < found["inner"].backward_begin


def test_what_has_no_backward_or_no_ops_is_no_unit() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.same, self.head = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.same(self.frozen(x))).sum()

    trace = memfit.trace(Step(Partly(), torch.ones(2, 4)), target="cpu")
    assert {"frozen", "same"} & by_name(trace).keys() == set()
    assert "head" in by_name(trace)


def test_recomputed_calls_of_a_checkpointed_model_are_no_units() -> None:
    trace = memfit.trace(zoo_models.STEPS["llama-checkpointed"](), target="cpu")
    for unit in find_units(trace):
        assert all(trace.ops[op].phase is not Phase.BACKWARD for op in range(unit.begin, unit.end))
    assert not any("#" in unit.name for unit in find_units(trace))


def test_a_call_that_computes_gradients_itself_is_no_unit() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.softplus(self.head(x)).sum()
            (gradient,) = torch.autograd.grad(y, self.head.weight, create_graph=True)
            return y + gradient.square().sum()

    trace = memfit.trace(Step(Penalised(), torch.ones(2, 4)), target="cpu")
    assert "" not in by_name(trace)
