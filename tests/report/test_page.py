"""The page's data: exact where it is drawn, complete, small, the same every time, and harmless whatever it holds."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from llama import Shape, training_step

import memfit
from memfit.analysis.explaining import explain
from memfit.analysis.report import Report
from memfit.capture import Category
from memfit.cost import Runtime
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.memory import CATEGORIES
from memfit.report.headline import headline
from memfit.report.page import page_text, write_page
from memfit.report.page.data import page_data
from memfit.report.page.drawn import POINTS, choose_instants
from memfit.report.page.writing import safe_json
from memfit.report.tree import AGAIN
from memfit.units import display_bytes
from tests.devices import without_workspaces

H100 = without_workspaces()

SMALL = Shape(layers=3, hidden=256, heads=4, key_value_heads=2, feed_forward=512, vocabulary=512)


@cache
def report(ranks: int = 1, part: float = 0.8, layers: int = 3) -> Report:
    shape = Shape() if layers == 32 else SMALL
    trace = memfit.trace(training_step(shape, batch=2, length=512), target=H100)
    free = Report.of_trace(trace, target=Target.parse(trace.hardware, ranks=ranks))
    if part == 1:
        return free
    budget = int(free.baseline.peak_bytes * part)
    return Report.of(memfit.plan(trace, ranks=ranks, budget=budget, progress=False), trace)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_drawn_steps_have_the_exact_peaks_and_add_up(ranks: int) -> None:
    shown = report(ranks)
    data = page_data(shown)
    for name, timeline in (("baseline", shown.baseline), ("planned", shown.planned)):
        assert timeline is not None
        line = data["timelines"][name]
        total = np.sum(list(line["bytes"].values()), axis=0)
        assert total.max() == total[line["peak"]] == line["peak_bytes"] == timeline.peak_bytes
        assert np.array_equal(total, timeline.during_bytes[line["instant"]])
        estimate = shown.plan.baseline if name == "baseline" else shown.plan.predicted
        assert line["total_ms"] == pytest.approx(estimate.step_ms, abs=1e-5)
        assert line["ms"] == sorted(line["ms"])
        phases = [data["phases"][span[0]] for span in line["phases"]]
        assert phases == ["forward", "loss", "backward", "optimizer"]
    assert len(data["timelines"]["planned"]["runs"]) == len(shown.plan.checkpoint) > 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_alive_at_the_peak_is_what_a_replay_finds(ranks: int) -> None:
    shown = report(ranks)
    data, timeline = page_data(shown), shown.planned
    assert timeline is not None
    line = data["timelines"]["planned"]
    numbers = line["alive"][line["peak"]]
    held = [line["groups"][group][0] * count for group, count in zip(numbers[::2], numbers[1::2], strict=True)]
    assert held == sorted(held, reverse=True)
    largest = timeline.largest_at(timeline.peak_instant, 1)[0]
    each = max(line["groups"][group][0] for group in numbers[::2])
    assert each == largest.size_bytes


@pytest.mark.parametrize("seed", range(5))
def test_points_keep_the_peak_every_bucket_and_the_edges(seed: int) -> None:
    levels = np.random.default_rng(seed).integers(0, 1 << 40, 31_000)
    edges = [17, 9_999, 30_998]
    chosen = choose_instants(levels, edges)
    assert int(levels[chosen].max()) == int(levels.max())
    assert {0, 30_999, *edges, *(edge - 1 for edge in edges)} <= set(chosen.tolist())
    assert len(chosen) <= POINTS + 3 + 2 * len(edges)
    for part in np.array_split(np.arange(len(levels)), POINTS // 4):
        inside = chosen[(chosen >= part[0]) & (chosen <= part[-1])]
        assert len(inside)
    widest = np.diff(chosen).max()
    assert widest <= 2 * (31_000 // (POINTS // 2) + 1)


def test_a_short_step_is_drawn_whole() -> None:
    assert choose_instants(np.arange(POINTS), []).tolist() == list(range(POINTS))


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_tree_adds_up_to_the_peak_and_to_the_time(ranks: int) -> None:
    shown = report(ranks)
    tree = page_data(shown)["tree"]
    for name, timeline in (("baseline", shown.baseline), ("planned", shown.planned)):
        assert timeline is not None
        by_row = dict.fromkeys(range(len(CATEGORIES)), 0)
        for parts in tree[name]["bytes"].values():
            for row, n_bytes in parts.items():
                by_row[int(row)] += n_bytes
        found = {CATEGORIES[row]: n_bytes for row, n_bytes in by_row.items() if n_bytes}
        assert found == timeline.peak_by_category
        took = sum(ms for parts in tree[name]["ms"].values() for ms in parts.values())
        estimate = shown.plan.baseline if name == "baseline" else shown.plan.predicted
        assert took == pytest.approx(estimate.step_ms, rel=1e-4)
    assert all(parent < place for place, parent in enumerate(tree["parent"]))


def test_recomputing_in_the_tree_is_that_of_the_plan_also_where_the_host_takes_time() -> None:
    trace = memfit.trace(training_step(SMALL, batch=2, length=512), target="cpu")
    free = Report.of_trace(trace)
    shown = Report.of(memfit.plan(trace, budget=int(free.baseline.peak_bytes * 0.8), progress=False), trace)
    assert shown.plan.checkpoint and shown.target.device.efficiency.host.second_run_ms > 0
    times = page_data(shown)["tree"]["planned"]["ms"].values()
    again = sum(parts.get(str(AGAIN), 0.0) for parts in times)
    assert again == pytest.approx(shown.plan.predicted.recompute_ms, rel=1e-4)
    took = sum(ms for parts in times for ms in parts.values())
    assert took == pytest.approx(shown.plan.predicted.step_ms, rel=1e-4)


def test_a_title_says_what_the_step_is() -> None:
    shown = dataclasses.replace(report(), title="Llama 3 8B, batch 2")
    assert headline(shown).subject == "Llama 3 8B, batch 2, on NVIDIA H100 SXM5 80GB"
    assert shown.with_curve(points=2).title == shown.title


def test_what_the_allocator_reserves_is_shown_where_it_is_more() -> None:
    assert all(column["reserved_bytes"] for column in page_data(report())["estimates"])
    trace = memfit.trace(training_step(SMALL, batch=2, length=64), target="cpu")
    on_cpu = Report.of(memfit.plan(trace, progress=False), trace)
    assert all(column["reserved_bytes"] is None for column in page_data(on_cpu)["estimates"])
    facts = dict(page_data(on_cpu)["assumed"]["facts"])
    assert "storages as large as they are" in facts["allocator"]


def test_modules_are_coloured_by_what_becomes_of_them() -> None:
    shown = report()
    data = page_data(shown)
    names = [data["strings"][number] for number in data["tree"]["path"]]
    decision = dict(zip(names, data["tree"]["decision"], strict=True))
    for entry in shown.plan.checkpoint:
        assert decision[entry.module] == (2 if entry.saved_ops else 3)
    around = {"(model)", "layers"} | {entry.module.rpartition(".")[0] for entry in shown.plan.checkpoint}
    assert all(decision[path] == 0 for path in around)
    assert decision["embedding"] == 1
    again = {
        shown.runtime.trace.calls[shown.runtime.trace.ops[entry.begin + op.offset].call].module
        for entry in shown.plan.checkpoint
        for op in entry.recomputed_ops
        if not shown.runtime.trace.ops[entry.begin + op.offset].view
    }
    assert again and all(decision[path] >= 2 for path in again)


def test_decisions_are_folded_and_have_reasons() -> None:
    shown = report()
    rows = page_data(shown)["decisions"]
    done = [row for row in rows if row["decision"] != "kept"]
    assert sum(row["units"] for row in done) == len(shown.plan.checkpoint)
    assert sum(row["all_bytes"] for row in done) == sum(entry.discarded_bytes for entry in shown.plan.checkpoint)
    assert all(display_bytes(row["rate"]) in row["why"] for row in done)
    kept = [row for row in rows if row["decision"] == "kept"]
    assert kept and all(re.match("not needed: |no help: ", row["why"]) for row in kept)


def test_the_headline_says_whether_it_fits_and_what_is_done() -> None:
    planned, infeasible, unplanned = report(), report(1, 0.2), report(1, 1)
    words = headline(planned)
    assert words.verdict == "Fits" and display_bytes(planned.plan.predicted.peak_bytes) in words.figures
    assert any(f"checkpoints {len(planned.plan.checkpoint)} units" in each for each in words.sentences)
    words = headline(infeasible)
    assert words.verdict == "Does not fit" and infeasible.plan.status == "infeasible"
    least = display_bytes(infeasible.plan.minimum_budget_bytes)
    assert any(f"smallest budget that works is {least}" in each for each in words.sentences)
    assert headline(unplanned).verdict == "Fits" and "Llama on NVIDIA H100" in headline(unplanned).title


def test_a_plan_whose_allocator_reserves_too_much_fits_with_care() -> None:
    shown = report()
    usable = shown.target.usable_bytes
    much = msgspec.structs.replace(shown.plan.predicted, peak_reserved_bytes=usable + 1, room="margin")
    words = headline(dataclasses.replace(shown, plan=msgspec.structs.replace(shown.plan, predicted=much)))
    assert words.tone == "care" and "allocator would reserve" in words.sentences[0]
    assert headline(shown).tone == "good" and not any("Take care" in each for each in headline(shown).sentences)


def test_an_infeasible_plan_has_one_step_and_its_blocker() -> None:
    data = page_data(report(1, 0.2))
    assert list(data["timelines"]) == ["baseline"] and data["decisions"] == []
    assert data["blocker"]["peak_bytes"] > data["budget_bytes"] and "levers" not in data["blocker"]


def test_sharded_units_have_the_sizes_of_a_rank() -> None:
    shown = report(4)
    shard = page_data(shown)["shard"]
    assert sum(row["units"] for row in shard["units"]) == len(shown.plan.shard.units) == 4
    parameters = page_data(shown)["tree"]["planned"]["bytes"]
    parameter = str(CATEGORIES.index(Category.PARAMETER))
    held = sum(parts.get(parameter, 0) for parts in parameters.values())
    assert sum(row["units"] * row["shard_bytes"] for row in shard["units"]) == pytest.approx(held, rel=0.02)


def test_figures_of_the_device_have_values_sources_and_dates() -> None:
    figures = page_data(report())["assumed"]["figures"]
    by_key = {row["key"]: row for row in figures}
    assert by_key["memory.total_bytes"]["value"] == display_bytes(report().target.device.memory_total_bytes)
    assert all(row["value"] for row in figures), [row["key"] for row in figures if not row["value"]]
    assert all(row["source"] for row in figures) and by_key["flops.bf16"]["date"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_it_says_where_times_come_from(ranks: int) -> None:
    shown = report(ranks)
    assert dict(page_data(shown)["assumed"]["facts"])["times of ops"].startswith("roofline")
    slower = Runtime(shown.runtime.trace, shown.runtime.op_ms * 2)
    other = dataclasses.replace(shown, problem=dataclasses.replace(shown.problem, runtime=slower))
    assert dict(page_data(other)["assumed"]["facts"])["times of ops"].startswith("measured")


def test_levers_of_an_explanation_are_shown() -> None:
    shown = report()
    found = explain(shown.plan, shown.trace, progress=False)
    levers = page_data(shown, found.levers)["levers"]
    assert [lever["name"] for lever in levers] == [lever.name for lever in found.levers] and levers
    assert {"saves_bytes", "costs_ms", "how", "peak_bytes", "basis"} <= set(levers[0])
    assert page_data(shown)["levers"] == []


def test_the_same_report_is_the_same_page() -> None:
    first = report(4)
    assert page_text(first) == page_text(Report.of(first.plan, first.trace))


@pytest.mark.parametrize(
    "text", ["</script><img src=x onerror=alert(1)>", "<!-- <script>", "a\u2028b\u2029c", "&amp;\"'"]
)
def test_text_cannot_leave_the_data(text: str) -> None:
    safe = safe_json({text: [text]})
    assert not set("<>&\u2028\u2029") & set(safe)
    assert json.loads(safe) == {text: [text]}


def test_the_page_allows_its_own_script_and_style_and_no_address() -> None:
    page = page_text(report())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none';")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        inner = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not re.search(r"\b(src|href)=[\"']?(https?:)?//", page) and "<!--memfit:" not in page
    assert "innerHTML" not in page and "eval(" not in page


@pytest.mark.slow
def test_32_layers_are_far_below_three_megabytes(tmp_path: Path) -> None:
    path = write_page(report(8, 0.85, 32), tmp_path / "report.html")
    assert 100_000 < path.stat().st_size < 3_000_000


def test_it_is_written_to_a_file_and_nowhere_else(tmp_path: Path) -> None:
    path = write_page(report(), tmp_path / "report.html")
    assert path == tmp_path / "report.html" and path.read_text("utf-8") == page_text(report())
    with pytest.raises(InputError, match=r"is a folder; give the path of a file in it, such as .*report.html"):
        write_page(report(), tmp_path)
    with pytest.raises(InputError, match="no folder"):
        write_page(report(), tmp_path / "none" / "report.html")
