"""`memfit.compiled.compile`: a step that Inductor compiles, measured within the budget; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.compiled import compiling
from memfit.compiled.program import SavedSetProblem
from memfit.errors import InputError
from memfit.torch_private.partitioner import has_cpp_compiler, recompiles_of_its_own
from memfit.verify import measure_rise
from tests.test_readme import python_blocks

WIDTH, LAYERS = 64, 5


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler: apt-get install g++")


@needs_compiler
def test_the_page_keeps_its_budget_and_the_compiled_model_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile("\n".join(python_blocks("docs/howto/compile.md")), "docs/howto/compile.md", "exec"), names)
    compiled, batch = names["compiled"], names["batch"]
    assert "measured peak" in capsys.readouterr().out
    assert compiled.planned
    assert compiled.peak_bytes <= compiled.budget_bytes < compiled.default_peak_bytes
    module = compiled.model.get_submodule("_orig_mod")
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not names["optimizer"].state
    names["loss"](compiled.model(batch), batch).backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    names["loss"](module(batch), batch).backward()
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-7)


@needs_compiler
def test_budgets_below_torchs_own_peak_are_kept_with_the_gradients_of_torchs_own_choice() -> None:
    model, batch = chain(), torch.randn(4096, WIDTH)
    resident = sum(tensor.nbytes for tensor in (*model.parameters(), batch))

    def gradients_and_peak(compiled: Any) -> tuple[list[torch.Tensor | None], int]:
        def run() -> None:
            model.zero_grad()
            loss(compiled(batch), batch).backward()

        run()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return gradients, resident + measure_rise(run, batch.device).rise_bytes

    expected, own_peak = gradients_and_peak(torch.compile(model, dynamic=False))
    model.zero_grad()
    for part in (0.75, 0.85, 0.95):
        compiled = memfit.compiled.compile(model, batch, loss=loss, optimizer=None, budget=int(own_peak * part))
        gradients, peak = gradients_and_peak(compiled.model)
        model.zero_grad()
        assert compiled.planned
        assert max(peak, compiled.peak_bytes) <= compiled.budget_bytes
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-7)


@needs_compiler
def test_sets_that_torch_finds_are_measured_where_the_estimate_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = chain(), torch.randn(8192, 64)
    free = memfit.compiled.compile(model, batch, loss=loss, budget="1GiB")
    tight = memfit.compiled.compile(model, batch, loss=loss, budget=free.peak_bytes - (1 << 20))
    assert tight.peak_bytes < free.peak_bytes
    monkeypatch.setattr(SavedSetProblem, "choose", lambda self, budget_bytes, others: others[0])
    found = memfit.compiled.compile(model, batch, loss=loss, budget=tight.budget_bytes)
    assert found.peak_bytes <= tight.budget_bytes
    assert found.chosen.found_by.startswith("torch at") and len(found.rounds) > 1


@needs_compiler
def test_of_the_saved_sets_that_fit_the_fastest_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = chain(), torch.randn(8192, 64)
    free = memfit.compiled.compile(model, batch, loss=loss, budget="1GiB")
    assert free.chosen.measured_ms is None, "torch's own choice fits and has no contender"
    monkeypatch.setattr(compiling, "_NEARLY", 1e3)
    monkeypatch.setattr(SavedSetProblem, "choose", lambda self, budget_bytes, others: self.judge((), "memfit"))
    found = memfit.compiled.compile(model, batch, loss=loss, budget=free.peak_bytes, rounds=6)
    timed = [each for each in found.rounds if each.measured_ms is not None]
    assert {each for each in found.rounds if each.measured_peak_bytes <= found.budget_bytes} == set(timed)
    assert len(timed) > 1 and any(each.found_by.startswith("torch at") for each in timed)
    assert found.chosen == min(timed, key=lambda each: each.measured_ms or 0.0)
    assert f"the fastest of {len(timed)} that fit" in str(found)


@needs_compiler
def test_the_model_can_be_compiled_anew_for_as_many_shapes_as_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    if not recompiles_of_its_own():
        pytest.skip("this torch counts the recompilations of all calls together")
    monkeypatch.setattr(compiling, "_NEARLY", 1e3)
    monkeypatch.setattr(SavedSetProblem, "choose", lambda self, budget_bytes, others: self.judge((), "memfit"))
    compiled = memfit.compiled.compile(chain(), torch.randn(8192, 64), loss=loss, budget="1GiB")
    assert len(compiled.rounds) > 1
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in (8, 9):  # three with the one that was planned
            compiled.model(torch.randn(rows, 64)).sum().backward()


class Breaks(nn.Module):
    """A model of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x).tanh()


@needs_compiler
def test_a_model_of_several_graphs_is_measured_and_says_how_far_eager_is_off() -> None:
    step = memfit.Step(Breaks(), torch.randn(1024, WIDTH), loss=loss, optimizer=None)
    compiled = memfit.compiled.compile(step, budget="1GiB")
    assert not compiled.planned
    assert "not planned: torch makes several graphs" in str(compiled) and "it by" in str(compiled)
    assert compiled.peak_bytes <= compiled.budget_bytes


def meta() -> memfit.Step:
    with torch.device("meta"):
        return memfit.Step(chain(), memfit.spec((4, WIDTH)), loss=loss)


def planned() -> memfit.Step:
    model, batch = chain(), torch.randn(64, WIDTH)
    memfit.plan(model, batch, loss=loss, target="cpu", budget="1GiB", progress=False).apply(model)
    return memfit.Step(model, batch, loss=loss)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (meta, "give a model and a batch with values"),
        (planned, "call plan.remove first"),
        (lambda: memfit.Step(chain, torch.randn(4, WIDTH), loss=loss), "takes the nn.Module itself"),
        (lambda: memfit.Step(torch.compile(chain()), torch.randn(4, WIDTH), loss=loss), "not compiled yet"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(make: Callable[[], memfit.Step], said: str) -> None:
    with pytest.raises(InputError, match=said):
        memfit.compiled.compile(make(), budget="1GiB")
