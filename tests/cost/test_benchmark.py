"""Benchmark mode: ops timed by themselves, remembered on disk, and what the caches do in a step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Step, spec
from memfit.capture import Trace, call_of
from memfit.cost import Benchmark, Roofline, Runtime, cost_model
from memfit.cost.benchmark import op_key
from memfit.cost.host import Size, routed_step
from memfit.cost.processor_cache import cold_fractions
from memfit.cost.timing import OpTimer, TimeCache, _move_ends
from memfit.errors import InputError, MissingFeatureError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(tokens)).square().mean()


@pytest.fixture(scope="module")
def captured() -> Trace:
    return memfit.trace(Step(Model(), spec((4, 8), torch.int64)), target="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_every_op_of_a_step_has_a_measured_time(captured: Trace, folder: Path) -> None:
    benchmark = Benchmark(folder=folder, progress=False)
    runtime = Runtime.of(captured, benchmark)
    assert benchmark.skipped == {}
    assert (runtime.op_ms > 0).all() and np.isfinite(runtime.op_ms).all()


def test_an_op_is_timed_once_and_then_remembered(captured: Trace, folder: Path, monkeypatch) -> None:
    first = Benchmark(folder=folder, progress=False).measure(captured)
    assert len(first) == len({op_key(op) for op in captured.ops if not op.view})

    def refuse(*_: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(OpTimer, "time", refuse)
    assert Benchmark(folder=folder, progress=False).measure(captured) == first


def test_times_of_another_number_of_threads_are_not_used(captured: Trace, folder: Path) -> None:
    threads = torch.get_num_threads()
    Benchmark(folder=folder, progress=False).measure(captured)
    try:
        torch.set_num_threads(threads + 1)
        Benchmark(folder=folder, progress=False).measure(captured)
    finally:
        torch.set_num_threads(threads)
    assert len(list(folder.glob("times-*.json"))) == 2


def test_the_generator_is_left_alone(captured: Trace, folder: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Benchmark(folder=folder, progress=False).measure(captured)
    assert torch.equal(torch.rand(3), expected)


def test_an_op_that_cannot_be_run_has_the_rooflines_time_and_is_named(captured: Trace, folder: Path) -> None:
    import msgspec

    broken = [
        msgspec.structs.replace(op, name="aten.gone_by_now.default") if op.name == "aten.gelu.default" else op
        for op in captured.ops
    ]
    trace = msgspec.structs.replace(captured, ops=tuple(broken))
    benchmark = Benchmark(folder=folder, progress=False)
    with pytest.warns(UserWarning, match="aten.gone_by_now.default"):
        kernel_ms = benchmark.kernel_ms(trace)
    index = next(i for i, op in enumerate(trace.ops) if op.name == "aten.gone_by_now.default")
    assert "aten.gone_by_now.default" in benchmark.skipped
    assert kernel_ms[index] == Roofline().kernel_ms(trace.ops, trace.hardware)[index]


def test_products_of_groups_are_timed_with_rows_in_every_group() -> None:
    size = Size(batch=1, length=16, width=32, layers=1)
    products = [op for op in memfit.trace(routed_step(size), target="cpu").ops if "_grouped_mm" in op.name]
    assert {tuple(len(ref.shape) for ref in op.inputs[:2]) for op in products} == {(2, 3), (2, 2)}
    for op in products:
        tensors = [OpTimer("cpu")._tensor(op, place, ref) for place, ref in enumerate(op.inputs)]
        assert tensors[2].tolist() == [8, 16, 24, 32]  # two experts of four for each of 16 tokens
        function, args, kwargs = call_of(op, tensors)
        assert (function(*args, **kwargs) > 0).all()


def test_groups_of_a_product_have_other_sizes_each_time_it_is_run() -> None:
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    seen = set()
    for _ in range(20):
        _move_ends(ends)
        seen.add(tuple(ends.tolist()))
        assert ends[-1] == 32 and (ends.diff(prepend=torch.zeros(1)) > 0).all()
    assert len(seen) > 5
    alone = torch.tensor([7], dtype=torch.int32)
    _move_ends(alone)
    assert alone.tolist() == [7]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    trace = memfit.trace(Step(Model(), spec((4, 8), torch.int64)), target="h100-sxm")
    with pytest.raises(InputError, match=r"no GPU here.*use the roofline"):
        Benchmark(folder=folder).op_ms(trace)


def test_a_damaged_cache_is_named(folder: Path) -> None:
    cache = TimeCache("a machine", folder)
    cache.times["op"] = [1.0, 2.0]
    cache.save()
    assert json.loads(cache.path.read_text()) == {"op": [1.0, 2.0]}
    cache.path.write_text("{")
    with pytest.raises(InputError, match="delete the file"):
        TimeCache("a machine", folder)


def test_two_writers_keep_each_others_times(folder: Path) -> None:
    one, two = TimeCache("a machine", folder), TimeCache("a machine", folder)
    one.times["a"], two.times["b"] = [1.0, 1.0], [2.0, 2.0]
    one.save()
    two.save()
    assert set(TimeCache("a machine", folder).times) == {"a", "b"}


@pytest.mark.parametrize("mode", ["roofline", "operator-level-cost-model"])
def test_the_roofline_goes_by_its_names(mode: str, captured: Trace) -> None:
    assert np.array_equal(cost_model(mode).op_ms(captured), Roofline().op_ms(captured))


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MissingFeatureError, match=r"'guess'.*roofline"):
        cost_model("guess")


def chain(size: int, depth: int) -> Trace:
    """Element-wise ops, each on the result of the one before."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(depth):
                x = x.sin()
            return x.sum()

    x = torch.zeros(size, requires_grad=True)
    return memfit.trace(Step(Chain(), x, optimizer=None, zero_grad=False), target="cpu")


def test_a_working_set_smaller_than_the_cache_is_found_in_it() -> None:
    assert not cold_fractions(chain(1 << 10, 8), 1 << 20).any()


def test_without_a_cache_everything_comes_from_memory() -> None:
    trace = chain(1 << 10, 8)
    moving = np.array([not op.view and op.read_bytes > 0 for op in trace.ops])
    assert (cold_fractions(trace, -1)[moving] == 1).all()


def test_what_was_just_made_is_in_the_cache_and_what_is_read_again_in_backward_is_not() -> None:
    trace = chain(1 << 18, 8)
    cold = cold_fractions(trace, 5 << 20)
    sines = [i for i, op in enumerate(trace.ops) if op.name == "aten.sin.default"]
    cosines = [i for i, op in enumerate(trace.ops) if op.name == "aten.cos.default"]
    assert all(cold[i] <= 0.5 for i in sines), "the input was written by the op before"
    assert cold[cosines[-1]] > 0, "the first input was last touched 16 MiB ago"
