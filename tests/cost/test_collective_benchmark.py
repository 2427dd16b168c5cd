"""Measured collectives: real Gloo groups, interpolation, documents, and the link that explains them."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from memfit.cost.collective_benchmark import CollectiveBenchmark, CollectiveTime, CollectiveTimes, fit_line, fit_link
from memfit.cost.collectives import Collective, CollectiveCost, CollectiveModel, Group
from memfit.errors import InputError, StateError
from memfit.hardware import Link, Target

RANKS = 2


def times_of(points: dict[str, dict[int, float]], **changes) -> CollectiveTimes:
    given = {"backend": "gloo", "device": "cpu", "nodes": 1, "ranks_per_node": 2, "torch": "2.13", "threads": 1}
    times = tuple(
        CollectiveTime(kind=Collective(kind), n_bytes=n_bytes, ms=ms)
        for kind, sizes in points.items()
        for n_bytes, ms in sizes.items()
    )
    return CollectiveTimes(**{**given, "times": times, **changes})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        ranks = importlib.import_module("collective_ranks")
        mp.spawn(ranks.measure, (RANKS, str(folder)), nprocs=RANKS)
    return folder


@pytest.mark.distributed
def test_every_collective_is_measured_at_every_size_in_whole_elements(measured: Path) -> None:
    times = CollectiveTimes.from_json((measured / "times0.json").read_bytes())
    assert times.kinds == tuple(Collective)
    assert all(times.points(kind)[0] == [1000, 8 << 20] for kind in Collective)
    assert all(0 < point.ms < math.inf for point in times.times)
    assert times.group == Group(nodes=1, ranks_per_node=RANKS)
    assert (times.backend, times.device, times.threads) == ("gloo", "cpu", 1)
    assert times.torch == torch.__version__


@pytest.mark.distributed
def test_all_ranks_get_the_same_times(measured: Path) -> None:
    assert (measured / "times0.json").read_bytes() == (measured / "times1.json").read_bytes()


@pytest.mark.distributed
def test_ranks_that_were_asked_different_things_all_hear_of_it(measured: Path) -> None:
    errors = [json.loads((measured / f"errors{rank}.json").read_text()) for rank in range(RANKS)]
    assert all("same arguments" in error["different"] for error in errors)
    assert all("two sizes" in error["one size"] for error in errors)
    assert "one rank" in errors[0]["alone"] and "not in the group" in errors[1]["alone"]


@pytest.mark.distributed
def test_a_link_fitted_to_real_times_serves_as_a_device_file_s_link(measured: Path) -> None:
    link = fit_link(CollectiveTimes.from_json((measured / "times0.json").read_bytes()))
    assert 0 < link.latency_ms < math.inf and 0 < link.bandwidth_bytes_per_s < math.inf
    target = Target.parse("cpu", ranks=2, intra_node_link=link)
    assert 0 < CollectiveModel(target).collective_ms("all_gather", 1 << 20) < math.inf


def test_without_a_process_group_there_is_nothing_to_measure() -> None:
    with pytest.raises(StateError, match="init_process_group"):
        CollectiveBenchmark()


def test_times_are_read_on_straight_lines_between_measured_sizes() -> None:
    times = times_of({"all_gather": {100: 2.0, 300: 4.0, 500: 10.0}})
    assert [times.collective_ms("all_gather", n) for n in (100, 200, 300, 400, 500)] == [2.0, 3.0, 4.0, 7.0, 10.0]


def test_beyond_the_measured_sizes_latency_and_bandwidth_go_on() -> None:
    times = times_of({"all_reduce": {1000: 1.5, 2000: 2.5}})
    assert times.collective_ms("all_reduce", 10_000) == pytest.approx(10.5)
    assert times.collective_ms("all_reduce", 500) == pytest.approx(1.0)
    assert times.collective_ms("all_reduce", 1) == pytest.approx(0.501)


def test_nothing_takes_no_time_and_neither_does_one_rank() -> None:
    times = times_of({"all_reduce": {1000: 1.5, 2000: 2.5}})
    assert times.collective_ms("all_reduce", 0) == 0
    assert times.collective_ms("all_reduce", 1000, Group(nodes=1, ranks_per_node=1)) == 0


@pytest.mark.parametrize(
    ("kind", "n_bytes", "group", "message"),
    [
        ("gather", 1000, None, "choose one of all_gather"),
        ("broadcast", 1000, None, "broadcast was not measured"),
        ("all_reduce", -1, None, "n_bytes is -1"),
        ("all_reduce", 1.5, None, "n_bytes is 1.5"),
        ("all_reduce", 1000, Group(nodes=2, ranks_per_node=1), "measure that group"),
    ],
)
def test_what_was_not_measured_is_refused(kind: str, n_bytes: int, group: Group | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        times_of({"all_reduce": {1000: 1.5, 2000: 2.5}}).collective_ms(kind, n_bytes, group)


def test_the_model_and_measured_times_stand_in_for_each_other() -> None:
    costs: list[CollectiveCost] = [
        CollectiveModel(Target.parse("cpu", ranks=2)),
        times_of({"all_gather": {1000: 1.5, 2000: 2.5}}),
    ]
    group = Group(nodes=1, ranks_per_node=2)
    assert all(cost.collective_ms(Collective.ALL_GATHER, 1500, group) > 0 for cost in costs)


def test_a_document_reads_back_as_it_was_written() -> None:
    times = times_of({"all_gather": {100: 0.1, 300: 4.0}, "send": {7: 1e-3, 9: 2e-3}})
    assert CollectiveTimes.from_json(times.to_json()) == times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "unknown field"),
        ({"schema": 2}, "measure again"),
        ({"times": []}, "two sizes"),
        ({"times": [{"kind": "send", "n_bytes": 4, "ms": 1.0}]}, "send needs two sizes"),
        ({"times": [{"kind": "send", "n_bytes": n, "ms": -1.0} for n in (4, 8)]}, "not a time"),
        ({"times": [{"kind": "shout", "n_bytes": n, "ms": 1.0} for n in (4, 8)]}, "shout"),
        ({"backend": 3}, "backend"),
    ],
)
def test_a_document_that_is_not_one_of_times_is_refused(change: dict, message: str) -> None:
    document = json.loads(times_of({"send": {4: 1.0, 8: 2.0}}).to_json())
    with pytest.raises(InputError, match=message):
        CollectiveTimes.from_json(msgspec.json.encode({**document, **change}))


@given(
    latency_ms=st.floats(1e-4, 10),
    bandwidth=st.floats(1e6, 1e12),
    group=st.sampled_from([(1, 2), (1, 8), (4, 1), (1, 3)]),
    backend=st.sampled_from(["gloo", "nccl"]),
)
def test_fit_recovers_the_link_that_made_the_times(
    latency_ms: float, bandwidth: float, group: tuple[int, int], backend: str
) -> None:
    # Sizes at which latency and transfer are of one order, and all by the plain protocol.
    sizes = [round(latency_ms / 1e3 * bandwidth * factor) + 1 for factor in (1, 10, 100)]
    nodes, local = group
    ranks, fixed_ms = nodes * local, {"gloo": 0.03, "nccl": 0.008 + 0.0084}[backend]
    made = {
        "all_gather": {
            n: fixed_ms + (ranks - 1) * latency_ms + (ranks - 1) / ranks * n / bandwidth * 1e3 for n in sizes
        },
        "all_reduce": {
            n: fixed_ms + 2 * (ranks - 1) * latency_ms + 2 * (ranks - 1) / ranks * n / bandwidth * 1e3 for n in sizes
        },
    }
    link = fit_link(times_of(made, nodes=nodes, ranks_per_node=local, backend=backend))
    assert link.latency_ms == pytest.approx(latency_ms, rel=1e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)


@given(link=st.builds(lambda a, b: (a, b), st.floats(1e-3, 1), st.floats(1e8, 1e11)))
def test_a_fitted_link_makes_the_model_repeat_the_times(link: tuple[float, float]) -> None:
    real = Link(name="real", kind="measured", latency_ms=link[0], bandwidth_bytes_per_s=link[1])
    model = CollectiveModel(Target.parse("cpu", ranks=2, intra_node_link=real))
    sizes = (1 << 10, 1 << 20, 1 << 28)
    made = {kind.value: {n: model.collective_ms(kind, n) for n in sizes} for kind in Collective}
    fitted = fit_link(times_of(made), kinds=Collective)
    again = CollectiveModel(Target.parse("cpu", ranks=2, intra_node_link=fitted))
    for kind in Collective:
        assert [again.collective_ms(kind, n) for n in sizes] == pytest.approx(list(made[kind.value].values()))


def test_a_line_through_noise_never_has_a_negative_latency_or_slope() -> None:
    assert fit_line([1, 1000], [5.0, 1.0])[1] == 0
    assert fit_line([1000, 2000], [1.0, 3.0])[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 2, "ranks_per_node": 4}, "one rank on each"),
        ({"backend": "mpi"}, "known are"),
    ],
)
def test_times_that_say_nothing_of_one_link_are_not_fitted(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_link(times_of({"all_gather": {1000: 1.0, 2000: 2.0}}, **changes))


def test_times_that_do_not_grow_give_no_bandwidth() -> None:
    with pytest.raises(InputError, match="larger sizes"):
        fit_link(times_of({"all_gather": {1000: 2.0, 2000: 1.0}}))
    with pytest.raises(InputError, match="measured are"):
        fit_link(times_of({"all_gather": {1000: 1.0, 2000: 2.0}}), kinds=["send"])
