"""Comparing plans and traces: what changed and what it did, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from llama import Shape, training_step
from torch import nn

import memfit
from memfit.analysis.comparison import Comparison, compare
from memfit.capture import Category, Trace
from memfit.cost import Roofline
from memfit.hardware import Target
from memfit.plans import Plan
from memfit.solve import SolveOptions
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)


@lru_cache
def traced(batch: int = 2, layers: int = 3, device: str = "h100-sxm") -> Trace:
    shape = dataclasses.replace(SMALL, layers=layers)
    return memfit.trace(training_step(shape, batch=batch, length=512), target=without_workspaces(device))


@lru_cache
def planned(budget: str = "34MiB", ranks: int = 1, batch: int = 2, layers: int = 3) -> Plan:
    return memfit.plan(traced(batch, layers), ranks=ranks, budget=budget, progress=False)


def changed(found: Comparison) -> dict[str, tuple[str | None, str | None]]:
    return {each.name: (each.first, each.second) for each in found.changed}


def memory(found: Comparison) -> dict[str, tuple[int | None, int | None]]:
    return {each.name: (each.first_bytes, each.second_bytes) for each in found.memory}


def test_equal_plans_and_equal_traces_differ_in_nothing() -> None:
    for one, other in ((planned(), Plan.from_json(planned().to_json())), (traced(), traced())):
        found = compare(one, other)
        assert found.same and not found.changed and not found.effects
        assert str(found).splitlines()[-1] == "nothing differs"


def test_another_budget_shows_its_peak_its_time_and_the_decisions_that_differ() -> None:
    first, second = planned(), planned("30MiB")
    assert first.predicted is not None and second.predicted is not None
    found = compare(first, second)
    assert changed(found) == {"budget": ("34.00 MiB", "30.00 MiB")}
    assert memory(found)["peak"] == (first.predicted.peak_bytes, second.predicted.peak_bytes)
    times = {each.name: (each.first_ms, each.second_ms) for each in found.times}
    assert times["step"] == (first.predicted.step_ms, second.predicted.step_ms)
    for side, plan in (("first", first), ("second", second)):
        kept = {entry.unit for entry in plan.checkpoint}
        shown = [each for each in found.decisions if getattr(each, f"{side}_bytes") is not None]
        assert sum(each.count for each in shown) == len(kept)
        took = sum(getattr(each, f"{side}_ms") for each in shown)
        assert took == pytest.approx(plan.predicted.recompute_ms, abs=1e-5)
        dropped = sum(each.count * getattr(each, f"{side}_bytes") for each in shown)
        assert dropped == sum(entry.discarded_bytes for entry in plan.checkpoint)
    assert found.decisions[0].units == "layers.0-2.feed_forward"


def test_units_that_had_to_be_checkpointed_are_named() -> None:
    units = ("layers.0", "layers.1")
    free, forced = (
        memfit.plan(traced(), budget="1GiB", options=SolveOptions(force=force), progress=False) for force in ((), units)
    )
    found = compare(free, forced)
    assert changed(found) == {"forced units": (None, "layers.0-1")} and found.note is None
    assert "layers.0-1" in str(found)


@pytest.mark.parametrize("unit", ["layers.*", "layers.0"])
def test_what_plans_do_not_record_is_said_where_it_must_have_changed(unit: str) -> None:
    names = tuple(unit.replace("*", str(number)) for number in range(3))
    other = memfit.plan(traced(), budget="34MiB", options=SolveOptions(ac_units=names), progress=False)
    assert (other.status == "infeasible") == (unit == "layers.0")
    found = compare(planned(), other)
    assert set(changed(found)) <= {"status"} and found.decisions
    assert found.note is not None and "--units" in found.note and found.to_dict()["note"] == found.note
    assert "--units" in str(found) and "nothing of what they were made from" not in str(found)
    assert compare(planned(), planned("30MiB")).note is None
    timed = memfit.plan(traced(), budget="34MiB", cost=Slower(), progress=False)
    note = compare(planned(), timed).note
    assert note is not None and "--cost" in note


class Slower:
    """Ops that take twice as long as the device's figures say."""

    def op_ms(self, trace: Trace) -> np.ndarray:
        return 2 * Roofline.of(Target.parse(trace.hardware)).op_ms(trace)


def test_sharding_that_keeps_other_units_gathered_is_named() -> None:
    first = planned(ranks=4)
    assert first.shard is not None
    units = tuple(msgspec.structs.replace(unit, reshard_after_forward=False) for unit in first.shard.units)
    second = msgspec.structs.replace(first, shard=msgspec.structs.replace(first.shard, units=units, prefetch=2))
    assert changed(compare(first, second)) == {
        "gathered from forward to backward": ("(model)", "(model), layers.0-2"),
        "units gathered ahead": ("1", "2"),
    }


def test_other_ranks_show_sharding_and_waiting() -> None:
    found = compare(planned(), planned(ranks=4))
    assert changed(found) == {"ranks": ("1", "4"), "sharded units": (None, "(model), layers.0-2")}
    assert memory(found)["gathered parameter at the peak"][0] == 0
    (waiting,) = [each for each in found.times if each.name == "waiting for communication"]
    assert waiting.first_ms == 0 and waiting.second_ms > 0


def test_another_batch_is_named_with_its_shapes() -> None:
    found = compare(planned(), planned("60MiB", batch=4))
    assert changed(found)["batch tensor 0"] == ("int64[2, 512]", "int64[4, 512]")
    assert "ops" not in changed(found)


def test_another_number_of_layers_is_one_row_and_not_one_for_each_parameter() -> None:
    found = changed(compare(planned(), planned(layers=4)))
    assert found.pop("numbered parts of layers") == ("3", "4")
    assert set(found) == {"parameters", "ops"}


def test_an_infeasible_plan_has_no_figures_of_its_own() -> None:
    found = compare(planned(), planned("10MiB"))
    assert changed(found)["status"] == ("optimal", "infeasible")
    assert memory(found)["peak"][1] is None and memory(found)["smallest budget that works"][0] is None
    assert all(each.second_bytes is None for each in found.decisions)


def test_traces_show_peaks_modules_and_ops_to_the_byte() -> None:
    one, other = traced(), traced(batch=4)
    found = compare(one, other)
    sides = [memfit.memory.summarize(trace) for trace in (one, other)]
    assert memory(found)["peak"] == (sides[0].peak_bytes, sides[1].peak_bytes)
    assert memory(found)["reserved by the allocator"] == (sides[0].peak_reserved_bytes, sides[1].peak_reserved_bytes)
    activations = [side.peak_by_category[Category.ACTIVATION] for side in sides]
    assert memory(found)["activation at the peak"] == tuple(activations)
    rows = {each.module: each for each in found.modules}
    forward = rows["layers.0-2.feed_forward"]
    held = [[m for m in side.modules if m.module.endswith("feed_forward")] for side in sides]
    assert forward.first_activation_bytes == sum(m.activation_bytes for m in held[0])
    assert forward.second_activation_bytes == sum(m.activation_bytes for m in held[1])
    assert rows["(model)"].second_flops == 2 * rows["(model)"].first_flops > 0
    assert found.flops is not None and found.flops.first == sum(op.flops for op in one.ops)
    assert not found.ops
    more = compare(one, traced(layers=4))
    products = next(each for each in more.ops if each.name == "aten.mm.default")
    assert products.second - products.first == 21


def test_other_modules_optimizers_and_dtypes_are_named() -> None:
    class Other(nn.Module):
        def __init__(self, activation: type[nn.Module], bias: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=bias) for _ in range(3))
            self.activation = activation()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.activation(layer(x))
            return x

    def made(activation: type[nn.Module], bias: bool, **options: Any) -> Trace:
        batch = memfit.spec((32, 64))
        step = memfit.Step(partial(Other, activation, bias), batch, loss=lambda y, _: y.sum(), **options)
        return memfit.trace(step, target="cpu")

    found = changed(
        compare(made(nn.ReLU, True), made(nn.GELU, False, optimizer=torch.optim.SGD, autocast=torch.bfloat16))
    )
    assert found["module activation"] == ("ReLU", "GELU")
    assert found["parameters layers.0-2.bias (3)"] == ("float32[64]", None)
    assert found["optimizer"] == ("AdamW", "SGD") and found["autocast"] == ("off", "bfloat16")
    elsewhere = changed(compare(traced(), traced(device="a100-sxm-80gb")))
    assert elsewhere["captured for"] == ("h100-sxm", "a100-sxm-80gb")


def test_steps_that_only_the_fingerprint_tells_apart_do_not_count_as_the_same() -> None:
    def made(rate: float) -> Trace:
        step = memfit.Step(
            lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(rate)), memfit.spec((4, 16)), loss=lambda y, _: y.sum()
        )
        return memfit.trace(step, target=H100)

    found = compare(made(0.1), made(0.2))
    assert set(changed(found)) == {"fingerprint of the step"} and not found.same and not found.effects
    assert "nothing differs" not in str(found)


@pytest.mark.parametrize("columns", ["100", "80"])
def test_what_is_shown_fits_and_says_what_json_says(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for found in (compare(planned(), planned("30MiB", layers=4)), compare(traced(), traced(layers=4))):
        shown = str(found)
        assert max(map(len, shown.splitlines())) <= int(columns)
        assert "what changed" in shown and "what it did" in shown
        document = json.loads(found.to_json())
        assert document == json.loads(json.dumps(found.to_dict())) and document["same"] is False
        assert [row["name"] for row in document["changed"]] == [each.name for each in found.changed]
        assert found.to_json() == found.to_json()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("plan", "trace"), "a Plan and a Trace have too little in common"),
        (("trace", "plan"), "a Trace and a Plan have too little in common"),
        (("plan", "name"), "cannot compare a str; give two memfit.Plan"),
        (("model", "plan"), "cannot compare a Linear"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_can(pair: tuple[str, str], message: str) -> None:
    given: dict[str, Any] = {
        "plan": planned(),
        "trace": traced(),
        "name": "plan.json",
        "model": nn.Linear(2, 2),
    }
    with pytest.raises(memfit.InputError, match=message):
        compare(given[pair[0]], given[pair[1]])
