"""`search`: the same answers as trying every value, with few captures; what is refused; how an answer reads."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Step
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.plans.search_grid import round_between
from memfit.plans.search_result import Search, SearchInterrupted, SearchPoint
from memfit.plans.searching import search
from memfit.report import write_search_page
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from memfit.units import display_bytes
from tests.devices import without_workspaces

H100 = without_workspaces()

pytestmark = pytest.mark.slow


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def of_batch(batch: int) -> Step:
    return Step(Model, memfit.spec((batch, 512), torch.int64), loss=loss)


def of_seq(seq: int) -> Step:
    return Step(Model, memfit.spec((2, seq), torch.int64), loss=loss)


@functools.cache
def captured_seq(seq: int) -> memfit.Trace:
    return memfit.trace(of_seq(seq), target=H100)


class Counted:
    """A function of a value that counts how often it is asked."""

    def __init__(self, make: Any) -> None:
        self.make, self.asked = make, []

    def __call__(self, value: int) -> Step:
        self.asked.append(value)
        return self.make(value)


@pytest.fixture(scope="module")
def by_hand() -> dict[int, memfit.Plan]:
    """A plan for every batch size, until none fits."""
    plans: dict[int, memfit.Plan] = {}
    for batch in range(1, 40):
        plans[batch] = memfit.plan(of_batch(batch), target=H100, budget="190MiB")
        if plans[batch].status == "infeasible":
            return plans
    raise AssertionError("everything fits")


@pytest.fixture(scope="module")
def batches() -> tuple[Search, list[int]]:
    make = Counted(of_batch)
    return search(make, target=H100, budget="190MiB"), make.asked


def test_the_best_and_the_largest_batch_are_those_of_trying_every_one(
    by_hand: dict[int, memfit.Plan], batches: tuple[Search, list[int]]
) -> None:
    found, asked = batches
    rates = {batch: batch / plan.predicted.step_ms for batch, plan in by_hand.items() if plan.predicted is not None}
    best = max(rates, key=lambda batch: rates[batch])
    assert found.largest is not None and found.largest.value == max(rates) and found.exact
    assert found.best is not None and found.best.throughput_per_s is not None
    assert found.best.throughput_per_s == pytest.approx(rates[found.best.value] * 1e3)
    assert found.best.throughput_per_s >= 0.98 * rates[best] * 1e3
    assert len(asked) == len(set(asked)) < len(by_hand) and not found.tried_all


@pytest.fixture(scope="module")
def watched() -> tuple[Search, list[int], list[SearchPoint]]:
    """A search among few batch sizes, the sizes that it asked for, and what it told of them."""
    make, heard = Counted(of_batch), list[SearchPoint]()
    return search(make, target=H100, budget="115MiB", watch=heard.append), make.asked, heard


def test_a_few_batch_sizes_are_all_tried(watched: tuple[Search, list[int], list[SearchPoint]]) -> None:
    found, _, _ = watched
    assert found.largest is not None and 4 < found.largest.value <= 8
    assert [point.value for point in found.points if point.fits] == list(range(1, found.largest.value + 1))
    assert found.exact and found.tried_all and "tried among" not in str(found)


def test_points_are_what_plan_says(by_hand: dict[int, memfit.Plan], batches: tuple[Search, list[int]]) -> None:
    recomputing = 0
    for point in batches[0].points:
        plan = by_hand.get(point.value)
        if plan is None:
            assert not point.fits
            continue
        assert (point.status, point.baseline_peak_bytes) == (plan.status, plan.baseline.peak_bytes)
        if plan.predicted is None:
            assert point.minimum_budget_bytes == plan.minimum_budget_bytes and point.step_ms is None
        else:
            assert point.peak_bytes == plan.predicted.peak_bytes
            assert point.step_ms == pytest.approx(plan.predicted.step_ms)
            recomputing += plan.predicted.recompute_ms > 0
    assert recomputing


def test_the_longest_sequence_is_that_of_trying_every_one() -> None:
    make = Counted(of_seq)
    found = search(make, over="seq", target=H100, budget="90MiB")
    fits = [n for n in range(128, 1664, 128) if memfit.plan(captured_seq(n), budget="90MiB").predicted]
    assert found.largest is not None and found.largest.value == max(fits) and found.exact
    assert found.grid == 128 and found.counts == "tokens"
    assert len(make.asked) < len(fits)
    point = found.largest
    assert point.step_ms is not None
    assert point.throughput_per_s == pytest.approx(2 * point.value * 1e3 / point.step_ms)


def test_a_sequence_shorter_than_the_first_that_is_tried_is_found() -> None:
    found = search(of_seq, over="seq", target=H100, budget="60MiB")
    fits = [n for n in range(128, 1024, 128) if memfit.plan(captured_seq(n), budget="60MiB").predicted]
    assert fits and found.largest is not None and found.largest.value == max(fits) and found.exact


def test_nothing_that_fits_is_an_answer() -> None:
    found = search(of_batch, target=H100, budget="10MiB")
    assert not found.fits and found.best is None and found.largest is None and not found.exact
    (point,) = found.points
    assert point.status == "infeasible" and (point.minimum_budget_bytes or 0) > 10 << 20
    words = " ".join(str(found).split())
    assert "nothing fits" in words and "the smallest budget that works is" in words
    assert "a smaller batch" not in words
    larger = " ".join(str(search(of_batch, target=H100, budget="10MiB", values=[4])).split())
    assert "at batch 4; give a smaller batch, a larger budget" in larger
    assert json.loads(found.to_json())["best"] is None


def test_ranks_double_and_one_capture_serves_all() -> None:
    found = search(of_batch(1), over="ranks", target=H100, budget="36MiB", largest=8)
    assert [point.value for point in found.points] == [1, 2, 4, 8]
    peaks = [point.minimum_budget_bytes for point in found.points]
    assert peaks == sorted(peaks, key=lambda each: -(each or 0))
    for point in found.points:
        plan = memfit.plan(of_batch(1), target=H100, ranks=point.value, budget="36MiB")
        assert point.status == plan.status
        if plan.predicted is not None and point.throughput_per_s is not None:
            assert point.throughput_per_s == pytest.approx(point.value * 1e3 / plan.predicted.step_ms)
    assert found.smallest is not None and 1 < found.smallest.value < 8
    assert f"{found.smallest.value} or more" in str(found)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_parameters_are_cast_as_plan_casts_them(autocast: torch.dtype | None) -> None:
    options = SolveOptions(shard=ShardOptions(param_dtype="bfloat16"))
    step = Step(Model, memfit.spec((1, 512), torch.int64), loss=loss, autocast=autocast)
    found = search(step, over="ranks", target=H100, budget="1GiB", values=[1, 4, 8], options=options)
    for point in found.points:
        plan = memfit.plan(step, target=H100, ranks=point.value, budget="1GiB", options=options)
        assert plan.predicted is not None
        assert (point.peak_bytes, point.baseline_peak_bytes) == (plan.predicted.peak_bytes, plan.baseline.peak_bytes)
        assert point.step_ms == pytest.approx(plan.predicted.step_ms)


def test_throughput_counts_all_ranks_and_accumulation() -> None:
    def make(batch: int) -> Step:
        tokens = memfit.spec((batch, 64), torch.int64)
        return Step(Model, tokens, loss=loss, accumulation_steps=3)

    (point,) = search(make, target=H100, ranks=4, values=[2]).points
    assert point.step_ms is not None and point.throughput_per_s == pytest.approx(2 * 3 * 4 * 1e3 / point.step_ms)


def test_values_are_tried_in_order_until_one_does_not_fit() -> None:
    make = Counted(of_batch)
    found = search(make, target=H100, budget="120MiB", values=[64, 2, 32, 128])
    assert make.asked == [2, 32]
    assert found.largest is not None and found.largest.value == 2 and not found.exact
    assert "64, 128 not tried: batch 32 does not fit" in found.notes


def test_a_search_ends_where_it_is_told_and_says_so() -> None:
    found = search(of_batch, target=H100, largest=3)
    assert found.largest is not None and found.largest.value == 3 and not found.exact
    assert any("ended at batch 3" in note for note in found.notes)


def test_values_without_a_step_end_the_search() -> None:
    def make(seq: int) -> Step:
        if seq > 1300:
            raise InputError("the model has 1300 positions")
        return of_seq(seq)

    found = search(make, over="seq", target=H100)
    assert found.largest is not None and found.largest.value == 1280 and found.refused == 1408 and found.exact
    assert found.notes == ("there is no step for seq 1408: the model has 1300 positions",)
    assert "1408 has none" in str(found)
    with pytest.raises(InputError, match="1300 positions"):
        search(make, over="seq", target=H100, values=[2048])


def test_every_value_is_told_of_when_it_has_been_tried(watched: tuple[Search, list[int], list[SearchPoint]]) -> None:
    found, asked, heard = watched
    assert heard[0].value == asked[0] and {point.value for point in heard} == {p.value for p in found.points}
    assert set(found.points) <= set(heard)


def test_an_interrupted_search_has_what_was_found_so_far() -> None:
    def make(batch: int) -> Step:
        if batch > 2:
            raise KeyboardInterrupt
        return of_batch(batch)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        search(make, target=H100, budget="115MiB", values=[1, 2, 4, 8])
    found = interrupted.value.found
    assert isinstance(interrupted.value, SearchInterrupted)
    assert [point.value for point in found.points] == [1, 2] and not found.complete
    assert found.best is not None and found.best.value == 2
    words = " ".join(str(found).split())
    assert "interrupted after 2 values" in words and "up to here" in words
    assert json.loads(found.to_json())["complete"] is False


def test_the_best_value_is_solved_to_the_end(
    batches: tuple[Search, list[int]], by_hand: dict[int, memfit.Plan]
) -> None:
    found = batches[0]
    assert found.complete and found.best is not None
    assert (found.best.status, found.best.gap) == ("optimal", 0.0)
    plan = by_hand[found.best.value]
    assert plan.predicted is not None and found.best.recompute_ms == pytest.approx(
        plan.predicted.recompute_ms, abs=1e-6
    )


def test_values_between_are_round_and_strictly_between() -> None:
    for low in range(0, 40, 3):
        for high in range(low + 2, 90):
            assert low < round_between(low, high, 1) < high
    assert round_between(8, 64, 1) == 32 and round_between(1024, 2048, 128) == 1536


def test_an_answer_is_read_and_kept(batches: tuple[Search, list[int]]) -> None:
    found, _ = batches
    assert found.best is not None and found.largest is not None
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 100
    words = " ".join(shown.split())
    assert f"{found.best.value} is best" in words and f"largest that fits: {found.largest.value} (exact" in words
    kept = json.loads(found.to_json())
    assert kept["best"] == found.best.value and kept["largest"] == found.largest.value and kept["exact"] is True
    assert [point["value"] for point in kept["points"]] == [point.value for point in found.points]
    assert f"best {found.best.value}" in repr(found)


def test_a_budget_above_what_is_usable_is_lowered() -> None:
    found = search(of_batch, target=H100, budget="80GB", values=[1])
    assert found.budget_bytes == min(80 * 10**9, Target.parse(H100).usable_bytes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"over": "width"}, "over is 'width'; write 'batch', 'seq', 'ranks', 'mesh' or 'device'"),
        ({"over": "ranks", "ranks": 8}, "ranks=8 is what the search over ranks finds"),
        ({"values": []}, "values has nothing in it"),
        ({"values": [1, 0]}, "values has 0; write whole numbers"),
        ({"values": 4}, "values is 4; write whole numbers"),
        ({"values": [1], "largest": 2}, "values and largest were both given"),
        ({"largest": 0}, "largest is 0"),
        ({"over": "seq", "largest": 100}, "largest is 100; sequences are searched in steps of 128"),
        ({"budget": "1TiB"}, "does not fit h100-sxm"),
        ({"options": SolveOptions(optimizer=True)}, "leave optimizer=True out"),
        ({"make_step": 3}, "make_step is a int; give a function"),
        ({"make_step": of_batch(1)}, "a Step has one batch; give a function, lambda batch"),
        ({"make_step": lambda value: value}, r"make_step\(1\) returned a int, not a memfit\.Step"),
        ({"make_step": Model(8, 1)}, "make_step is a model"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], message: str) -> None:
    given.setdefault("make_step", of_batch)
    with pytest.raises(InputError, match=message):
        search(given.pop("make_step"), target=H100, **given)


def test_many_given_values_are_captured_at_few_sizes_and_found_as_by_planning_each() -> None:
    make = Counted(of_batch)
    found = search(make, target=H100, budget="190MiB", values=range(2, 14))
    fits = [point for point in found.points if point.fits]
    assert len(make.asked) == len(set(make.asked)) == found.captured <= 4 < len(found.points)
    assert found.best is not None and found.largest is not None
    assert found.largest.value in make.asked or found.best.value in make.asked  # a capture has checked the traces
    for point in (fits[1], fits[-1]):
        plan = memfit.plan(of_batch(point.value), target=H100, budget="190MiB")
        assert plan.predicted is not None and point.peak_bytes == plan.predicted.peak_bytes
        assert point.step_ms == pytest.approx(plan.predicted.step_ms, rel=1e-3)
        assert point.baseline_peak_bytes == plan.baseline.peak_bytes
    assert "4 values captured" in " ".join(str(found).split()) or len(make.asked) < 4


def test_values_are_all_captured_where_a_check_finds_that_traces_do_not_scale() -> None:
    def make(batch: int) -> Step:
        # the ends are alike, what is between has another length
        return Step(Model, memfit.spec((batch, 512 if batch in (2, 14) else 384), torch.int64), loss=loss)

    found = search(make, target=H100, values=[2, 4, 6, 8, 10, 14])
    assert found.captured == len(found.points) == 6
    assert any("traces do not scale with batch" in note for note in found.notes)
    for point in found.points:
        assert point.baseline_peak_bytes == memfit.plan(make(point.value), target=H100).baseline.peak_bytes


def test_the_budget_of_each_number_of_ranks_is_shown() -> None:
    found = search(of_batch(1), over="ranks", target="h100-sxm", values=[1, 8])
    alone, several = (Target.parse("h100-sxm", ranks=ranks).usable_bytes for ranks in (1, 8))
    assert [point.allowed_bytes for point in found.points] == [alone, several] and several < alone
    assert f"budget {display_bytes(several)} to {display_bytes(alone)} a rank" in " ".join(str(found).split())
    assert "the budget was lowered" not in str(found)


def test_the_frontier_is_drawn(batches: tuple[Search, list[int]], tmp_path: Path) -> None:
    found, _ = batches
    assert "● nothing recomputed" in str(found)
    page = write_search_page(found, tmp_path / "search.html").read_text()
    assert page.count("<polyline") == 4 and "<script" not in page and f"{found.best.value} is best" in page
    assert page.count("<tr class=") == len(found.points)


def waiting(rows: int) -> Step:
    """Few rows for large units: ranks of an L40S wait for the bus."""
    layers = functools.partial(nn.Linear, 2048, 2048)
    spec = memfit.spec((rows, 2048))
    return Step(lambda: nn.Sequential(*(layers() for _ in range(4))), spec, loss=lambda output, _: output.mean())


@pytest.mark.parametrize(
    ("target", "fixed", "told"), [("l40s", (), True), ("l40s", ("reshard", "prefetch"), False), ("cpu", (), False)]
)
def test_a_search_says_where_a_plan_may_gather_in_a_faster_way(target: str, fixed: Any, told: bool) -> None:
    options = SolveOptions(shard=ShardOptions(units=("0", "1", "2", "3")), fixed=fixed)
    found = search(waiting, over="batch", values=(64, 128), target=target, ranks=4, options=options, progress=False)
    assert any("gathered as given" in note for note in found.notes) == told
    plan = memfit.plan(waiting(64), target=target, ranks=4, options=options, progress=False)
    assert plan.predicted is not None and found.points[0].step_ms is not None
    assert (plan.predicted.step_ms < found.points[0].step_ms * (1 - 1e-6)) == told
