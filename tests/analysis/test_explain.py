"""explain: what fills the peak of a step, what holds it, why checkpointing does not release it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from functools import partial
from typing import Any

import pytest
import torch
from llama import Shape, training_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.analysis.explaining import explain
from memfit.capture import Category, Step, Trace
from memfit.hardware import Target
from memfit.memory import reserved
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=4096)
explained = partial(explain, progress=False, levers=False)


@pytest.fixture(scope="module")
def step() -> Step:
    return training_step(SMALL, batch=4, length=256)


@pytest.fixture(scope="module")
def trace(step: Step) -> Trace:
    return memfit.trace(step, target=H100)


class Blocks(nn.Module):
    """Blocks that may be checkpointed by the model itself, and may keep what they make."""

    def __init__(self, *, checkpoints: bool = False, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
            for _ in range(4)
        )
        self.checkpoints = checkpoints
        self.keeps = keeps
        self.kept: list[torch.Tensor] = []
        if keeps:
            for layer in self.layers:
                layer[1].register_forward_hook(lambda module, args, output: self.kept.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return x.square().mean()


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_parts_of_the_peak_add_up_to_it(trace: Trace, ranks: int) -> None:
    found = explained(trace, ranks=ranks)
    plan = memfit.plan(trace, ranks=ranks, progress=False)
    assert found.peak_bytes == plan.baseline.peak_bytes and found.step_ms == pytest.approx(plan.baseline.step_ms)
    assert found.by_category == plan.baseline.peak_by_category
    assert sum(found.by_category.values()) == found.peak_bytes
    assert sum(each.size_bytes for each in found.by_module) == found.peak_bytes
    for category, size_bytes in found.by_category.items():
        assert sum(each.by_category.get(category, 0) for each in found.by_module) == size_bytes
    assert sum(each.size_bytes for each in found.by_line) <= found.peak_bytes


def test_it_is_called_as_plan_is() -> None:
    planned, own = (inspect.signature(each).parameters for each in (memfit.plan, explain))
    assert [name for name in own if name != "levers"] == [name for name in planned if name != "start"]
    assert {"inputs", "budget"} <= set(own)
    for name in set(own) - {"model", "levers"}:
        assert own[name] == planned[name], name


def test_options_say_how_the_step_is_sharded(trace: Trace) -> None:
    options = SolveOptions(shard=ShardOptions(units=("layers.0", "layers.1"), param_dtype="bfloat16"))
    found = explained(trace, ranks=4, options=options)
    plan = memfit.plan(trace, ranks=4, options=options, progress=False)
    assert {each.module for each in found.gathered} == {"", "layers.0", "layers.1"}
    assert found.peak_bytes == plan.baseline.peak_bytes != explained(trace, ranks=4).peak_bytes
    with pytest.raises(memfit.InputError, match="SolveOptions"):
        explained(trace, options={"force": ("layers.0",)})


def test_lines_and_place_are_the_users(trace: Trace) -> None:
    found = explained(trace)
    assert found.at.phase == "backward" and found.at.module is None and "next_token_loss" in found.at.source
    assert all("llama.py:" in each.source for each in found.by_line[:5])
    assert found.by_line[0].size_bytes == max(each.size_bytes for each in found.by_line)


def test_what_holds_the_largest_storages(trace: Trace) -> None:
    found = explained(trace)
    sizes = [each.size_bytes for each in found.largest]
    assert len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
    softmax = next(each for each in found.largest if each.born_by == "_log_softmax")
    assert softmax.holder == "autograd" and "backward of _log_softmax in <loss>" in softmax.held_by
    assert softmax.shape == (4 * 255, 4096) and softmax.dtype == "float32"
    assert (
        softmax.alloc_at is not None
        and softmax.free_after is not None
        and softmax.alloc_at < found.at.op <= softmax.free_after
    )
    logits = next(each for each in found.largest if each.module == "head" and each.category is Category.ACTIVATION)
    assert logits.holder == "python" and logits.born_by == "mm"
    running = [each for each in found.largest if each.holder == "running"]
    assert running and all(each.category is Category.TEMPORARY for each in running)


def test_parameters_state_and_gradients_are_held_by_name() -> None:
    model = Blocks()
    found = explained(model, memfit.spec((2, 64)), target=H100, optimizer=torch.optim.AdamW)
    assert found.at.phase == "optimizer"
    said = {each.holder: each.held_by for each in found.largest}
    assert said["optimizer"].startswith("optimizer state of layers.")
    names = dict(model.named_parameters())
    assert all(each.held_by.rpartition(" ")[2] in names for each in found.largest if each.holder == "optimizer")


def test_the_module_that_holds_the_most_activations(trace: Trace) -> None:
    found = explained(trace)
    whole = {each.module: each for each in found.activations}
    assert found.activations[0].module == "" and "layers" not in whole
    inside = [each for each in found.activations if each.module.startswith("layers.0")]
    assert whole["layers.0"].size_bytes == sum(each.own_bytes for each in inside)
    assert sum(each.own_bytes for each in found.activations) == found.activations[0].size_bytes


def test_sharded_units_say_what_they_gather(trace: Trace) -> None:
    assert explained(trace).gathered == ()
    found = explained(trace, ranks=4)
    whole = {each.module: each for each in found.gathered}
    held = sum(2 * torch.Size(each.shape).numel() for each in trace.parameters if each.names[0].startswith("layers.1."))
    assert whole["layers.1"].gathered_bytes == held and whole["layers.1"].shard_bytes == held // 4
    assert sum(each.at_peak_bytes for each in found.gathered) == found.by_category[Category.GATHERED_PARAMETER]
    assert any(each.holder == "sharding" and "gathered parameters of unit" in each.held_by for each in found.largest)


def test_a_plan_is_explained_as_it_runs(step: Step) -> None:
    trace = memfit.trace(step, target="h100-sxm")
    free = memfit.plan(trace, progress=False).baseline
    whole, workspaces = free.peak_bytes, free.peak_by_category[Category.WORKSPACE]
    plan = memfit.plan(trace, budget=workspaces + int(0.8 * (whole - workspaces)), progress=False)
    assert plan.predicted is not None and plan.checkpoint
    for given in (step, trace):
        found = explained(plan, given)
        assert found.planned and found.peak_bytes == plan.predicted.peak_bytes
        assert found.step_ms == pytest.approx(plan.predicted.step_ms)
    held = found.checkpointing
    assert held is not None and held.units == tuple(entry.unit for entry in plan.checkpoint)
    assert held.peak_without_bytes == whole and held.peak_bytes == found.peak_bytes
    assert held.still_held_bytes == sum(each.size_bytes for each in held.still_held)
    assert any("the peak is in the loss" in finding for finding in held.findings)


@pytest.mark.parametrize("own", ["module", "function"])
def test_a_loss_that_the_model_computes_is_seen_at_the_peak(own: str) -> None:
    class Talker(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.loss = nn.Linear(64, 4096, bias=False), nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            labels = torch.zeros(len(x), dtype=torch.int64)
            return (self.loss if own == "module" else nn.functional.cross_entropy)(self.head(x), labels)

    held = forced(Talker(), 1024, "layers.0", optimizer=torch.optim.SGD)
    assert any("the peak is in the loss, outside" in finding for finding in held.findings)


def test_a_plan_by_itself_says_what_its_document_knows(trace: Trace) -> None:
    plan = memfit.plan(trace, progress=False)
    found = explained(plan)
    assert plan.predicted is not None and found.peak_bytes == plan.predicted.peak_bytes
    assert found.by_category == plan.predicted.peak_by_category and found.largest == ()
    hopeless = memfit.plan(trace, budget="1MiB", progress=False)
    assert hopeless.blocker is not None
    found = explained(hopeless)
    assert not found.fits and not found.planned
    assert found.levers == () and any("explain(plan, step) says the rest" in note for note in found.notes)


def forced(model: nn.Module, rows: int, *units: str, **options: Any) -> Any:
    step = Step(model, memfit.spec((rows, 64)), **options)
    trace = memfit.trace(step, target=H100)
    plan = memfit.plan(trace, options=SolveOptions(force=units), progress=False)
    assert [entry.unit for entry in plan.checkpoint] == list(units)
    return explained(plan, trace).checkpointing


def test_checkpointing_cannot_lower_a_peak_in_the_optimizers_step() -> None:
    held = forced(Blocks(), 64, "layers.0", optimizer=torch.optim.AdamW)
    assert held.peak_bytes == held.peak_without_bytes
    assert any("optimizer's step" in finding for finding in held.findings)
    assert any("as high as without" in finding for finding in held.findings)


def test_checkpointing_does_not_release_what_python_holds() -> None:
    units = ("layers.0", "layers.1", "layers.2")
    held = forced(Blocks(keeps=True), 4096, *units, optimizer=torch.optim.SGD)
    kept = [each for each in held.still_held if each.name == "tanh"]
    assert {each.unit for each in kept} == set(units) and {each.reason for each in kept} == {"held by Python"}
    assert all(each.size_bytes == 4096 * 128 * 4 for each in kept)
    released = forced(Blocks(), 4096, *units, optimizer=torch.optim.SGD)
    assert not [each for each in released.still_held if each.name == "tanh"]


def test_the_models_own_checkpoints_are_seen() -> None:
    batch = memfit.spec((4096, 64))
    plain = explained(Blocks(), batch, target=H100, optimizer=torch.optim.SGD)
    assert plain.checkpointing is None
    found = explained(Blocks(checkpoints=True), batch, target=H100, optimizer=torch.optim.SGD)
    assert found.peak_bytes < plain.peak_bytes
    held = found.checkpointing
    assert held is not None and held.by_the_model and held.units == tuple(f"layers.{number}" for number in range(4))


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ("plan", {"target": "h100-sxm"}, "part of the plan"),
        ("plan", {"batch": nn.Linear(2, 2)}, "memfit.Step or memfit.Trace"),
        ("trace", {"loss": lambda output, _: output}, "part of the Trace"),
        ("step", {}, "name the hardware"),
        ("trace", {"budget": "1000TiB"}, "does not fit"),
    ],
)
def test_what_cannot_be_explained_says_what_to_write(
    step: Step, trace: Trace, given: str, options: dict[str, Any], says: str
) -> None:
    plan = memfit.plan(trace, progress=False)
    with pytest.raises(memfit.InputError, match=says):
        explained({"plan": plan, "trace": trace, "step": step}[given], options.pop("batch", None), **options)


@pytest.mark.parametrize("ranks", [1, 4])
def test_it_prints_within_a_hundred_columns(
    step: Step, trace: Trace, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    found = explain(trace, ranks=ranks, budget="16MiB", progress=False)
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 100
    assert "layers.0-2.feed_forward" in shown and "does not fit" in shown and "levers" in shown
    assert ("sharded units" in shown) == (ranks > 1)
    for lever in found.levers:
        assert lever.name.split(" ")[0] in shown


def test_to_json_has_everything(trace: Trace) -> None:
    found = explain(trace, progress=False)
    read = json.loads(found.to_json())
    assert read == json.loads(json.dumps(found.to_dict()))
    assert read["measured"] is False and read["peak_bytes"] == found.peak_bytes
    assert {each["basis"] for each in read["levers"]} == {"captured", "estimated"}
    assert read["by_category"]["parameter"] == found.by_category[Category.PARAMETER]
    assert read["largest"][0]["held_by"] == found.largest[0].held_by


def test_a_step_whose_allocator_has_no_room_does_not_fit() -> None:
    """Below the budget, but between what is available and what is usable: only without the margin."""
    whole = without_workspaces()
    step = Step(lambda: nn.Linear(512, 512), memfit.spec((64, 512)), loss=lambda out, _: out.sum())
    trace = memfit.trace(step, target=whole)
    held = reserved(trace, whole).peak_reserved_bytes
    small = dataclasses.replace(whole, memory_total_bytes=int(held * 1.01))
    found = explain(trace, target=Target.parse(small, context=0), budget=held, levers=False, progress=False)
    assert found.reserved_bytes == held and not found.has_room and not found.fits
    assert "with care: the caching allocator reserves" in str(found)
    roomy = dataclasses.replace(whole, memory_total_bytes=int(held * 1.05))
    assert explain(trace, target=Target.parse(roomy, context=0), budget=held, levers=False, progress=False).fits
