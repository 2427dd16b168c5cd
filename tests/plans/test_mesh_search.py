"""`search(over="mesh")`: every shape of so many ranks, each with its own plan, compared at the same amount of work."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memfit
from memfit import Step, spec
from memfit.capture.mesh_groups import find_dims
from memfit.cost import Group
from memfit.errors import InputError
from memfit.plans import MeshPoint, MeshSearch, SearchInterrupted
from memfit.plans.mesh_search import shapes_of
from memfit.sharding import group_along

RANKS, HEADS, WIDTH = 16, 4, 128


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def build(mesh: DeviceMesh) -> nn.Module:
    assert HEADS % mesh["tp"].size() == 0, f"{HEADS} heads on {mesh['tp'].size()} ranks"
    model = Model()
    for layer in model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step_of(batch: int, factory: Any = build) -> Step:
    return Step(factory, spec((batch, 64), torch.int64), loss=lambda output, _: output.square().mean())


def search(step: Any = step_of, **options: Any) -> MeshSearch:
    given = {"ranks": RANKS, "dims": ("dp", "tp"), **options}
    return memfit.search(step, over="mesh", target="h100-sxm", progress=False, **given)


@pytest.fixture(scope="module")
def found() -> tuple[MeshSearch, list[MeshPoint]]:
    heard: list[MeshPoint] = []
    return search(global_batch=32, watch=heard.append), heard


def test_every_shape_is_there_the_best_first(found: tuple[MeshSearch, list[MeshPoint]]) -> None:
    result, heard = found
    assert [each.mesh["tp"] for each in heard] == [1, 2, 4, 8, 16], "told of in the order in which they are tried"
    assert sorted(each.mesh["tp"] for each in result.points) == [1, 2, 4, 8, 16]
    rates = [each.throughput_per_s for each in result.points if each.fits]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True)
    assert result.best is result.points[0] and result.complete and result.fits
    why = {each.mesh["tp"]: each.reason for each in result.points if each.status == "impossible"}
    assert "4 heads on 8 ranks" in why[8], "what the factory said"
    assert "does not lie in a node of 8" in why[16]
    assert [each.status for each in result.points[-2:]] == ["impossible"] * 2


def test_shapes_are_compared_at_the_same_global_batch(found: tuple[MeshSearch, list[MeshPoint]]) -> None:
    result, _ = found
    assert (result.fixed, result.samples, result.counts) == ("global batch", 32, "tokens")
    for point in result.points:
        if point.fits:
            assert point.batch == 32 // point.mesh["dp"] and point.step_ms is not None
            assert point.throughput_per_s == pytest.approx(32 * 64 * 1e3 / point.step_ms)
            assert point.throughput_per_rank_per_s == pytest.approx((point.throughput_per_s or 0) / RANKS)


def test_a_point_is_what_plan_says_of_the_mesh(found: tuple[MeshSearch, list[MeshPoint]]) -> None:
    point = next(each for each in found[0].points if each.mesh == {"dp": 8, "tp": 2})
    plan = memfit.plan(step_of(4), target="h100-sxm", mesh=point.mesh, progress=False)
    assert plan.predicted is not None
    assert point.peak_bytes == plan.predicted.peak_bytes
    assert point.peak_reserved_bytes == plan.predicted.peak_reserved_bytes
    assert point.step_ms == pytest.approx(plan.predicted.step_ms, abs=1e-6)
    assert point.exposed_ms == pytest.approx(plan.predicted.exposed_communication_ms, abs=1e-6)
    assert 0 < (point.exposed_share or 0) < 1 and point.nodes == {"dp": 2, "tp": 1}


def test_a_step_has_its_batch_on_every_data_parallel_rank() -> None:
    result = search(step_of(2), values=[{"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}], dims=None, ranks=None)
    assert (result.fixed, result.samples) == ("batch of a data-parallel rank", 2)
    assert {each.batch for each in result.points} == {2}
    rates = {each.mesh["dp"]: (each.throughput_per_s or 0) * (each.step_ms or 0) for each in result.points}
    assert rates[4] == pytest.approx(2 * rates[2]), "twice as many samples in a step"


def test_a_budget_that_only_some_shapes_meet_with_recompute() -> None:
    free = search(step_of(64), values=[{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], dims=None, ranks=None)
    without = {each.mesh["tp"]: each.baseline_peak_bytes or 0 for each in free.points}
    least = {each.mesh["tp"]: each.minimum_budget_bytes or 0 for each in free.points}
    budget = (max(least.values()) + min(without.values())) // 2
    assert max(least.values()) < budget < min(without.values())
    tight = search(step_of(64), values=[{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], dims=None, ranks=None, budget=budget)
    for point in tight.points:
        assert point.peak_bytes is not None and point.peak_bytes <= budget
        assert point.recompute_ms and point.recomputed_units
    none = search(step_of(64), values=[{"dp": 2, "tp": 1}], dims=None, ranks=None, budget=min(least.values()) // 2)
    assert not none.fits and none.best is None and none.points[0].status == "infeasible"
    assert "nothing fits" in str(none) and "smallest budget that works" in str(none)


def test_a_global_batch_that_cannot_be_divided_is_a_reason() -> None:
    result = search(global_batch=4, values=[{"dp": 8, "tp": 2}, {"dp": 4, "tp": 4}], dims=None, ranks=None)
    assert "a global batch of 4 cannot be divided among 8 ranks" in result.points[-1].reason
    assert result.best is not None and result.best.mesh == {"dp": 4, "tp": 4}


def test_the_factory_may_say_what_it_knows_and_shapes_beyond_a_node_may_be_asked_for() -> None:
    def along(mesh: DeviceMesh) -> nn.Module:
        return fully_shard(Model(), mesh=mesh)

    along.mesh_dims = ("dp",)  # type: ignore[attr-defined]
    result = search(lambda batch: step_of(batch, along), ranks=4, dims=None)
    assert [each.mesh for each in result.points] == [{"dp": 4}] and result.dims == ("dp",)
    with pytest.raises(InputError, match=r"build.mesh_dims = \('dp', 'tp'\)"):
        search(dims=None)

    def wide(mesh: DeviceMesh) -> nn.Module:
        model = Model()
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    result = search(step_of(1, wide), values=[{"dp": 1, "tp": 16}], dims=None, ranks=None)
    assert result.fits and result.points[0].nodes == {"dp": 1, "tp": 2}


def test_a_step_that_no_shape_can_run_raises_what_it_raised() -> None:
    step = Step(build, spec((2, 64), torch.int64), loss=lambda output, _: output)  # no number
    with pytest.raises(InputError, match="one number"):
        search(step, values=[{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], dims=None, ranks=None)


def test_an_interrupted_search_has_what_was_found_so_far() -> None:
    def stop(_: MeshPoint) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SearchInterrupted) as caught:
        search(global_batch=32, watch=stop)
    assert len(caught.value.found.points) == 1 and not caught.value.found.complete


def test_it_prints_and_is_kept(found: tuple[MeshSearch, list[MeshPoint]]) -> None:
    result, _ = found
    shown = str(result)
    assert "16 x NVIDIA H100 SXM5 80GB in 2 nodes of 8" in shown and "the global batch, 32 samples" in shown
    assert "4 heads on 8 ranks" in shown and "tp inside a node, dp from node to node" in shown
    kept = json.loads(result.to_json())
    assert kept["best"] == result.points[0].mesh and len(kept["points"]) == 5 and kept["over"] == "mesh"
    assert kept["points"][0]["exposed_share"] == result.points[0].exposed_share


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": None}, "needs the number of GPUs"),
        ({"dims": ()}, "write the names of a mesh's dimensions"),
        ({"dims": ("dp", "dp")}, "write the names of a mesh's dimensions"),
        ({"values": [{"dp": 2}, {"dp": 4}], "ranks": None, "dims": None}, "compare shapes of as many"),
        ({"values": [], "dims": None}, "values has nothing in it"),
        ({"values": [{"dp": 16}]}, "leave dims out"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"step": step_of(2), "global_batch": 8}, "a Step has the batch of one rank"),
        ({"step": Model()}, "takes a memfit.Step whose model is a factory"),
        ({"largest": 4}, "largest is for the other searches"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(**given)
    with pytest.raises(InputError, match="are for over='mesh'"):
        memfit.search(step_of, target="h100-sxm", dims=("dp",))  # type: ignore[call-overload]


def test_shapes_are_all_products() -> None:
    shapes = list(shapes_of(12, ("pp", "dp", "tp")))
    assert len(shapes) == len({tuple(each.items()) for each in shapes}) == 18
    assert all(math.prod(each.values()) == 12 and tuple(each) == ("pp", "dp", "tp") for each in shapes)


def test_groups_of_equal_size_have_the_links_of_their_place() -> None:
    """Of 8 x 8 ranks on nodes of 8, the last dimension lies in a node and the first on eight of them."""
    sizes = {"dp": 8, "tp": 8}
    assert find_dims(sizes, range(8)) == ("tp",) and find_dims(sizes, range(0, 64, 8)) == ("dp",)
    assert find_dims(sizes, range(64)) == ("dp", "tp") and find_dims(sizes, (0, 9)) == ()
    assert find_dims({"pp": 2, "dp": 2, "tp": 2}, (1, 3)) == ("dp",), "of any rank"
    assert group_along((("dp", 8), ("tp", 8)), ("tp",), 8) == Group(nodes=1, ranks_per_node=8)
    assert group_along((("dp", 8), ("tp", 8)), ("dp",), 8) == Group(nodes=8, ranks_per_node=1)
    assert group_along((("dp", 8), ("tp", 2)), ("dp",), 8) == Group(nodes=2, ranks_per_node=4)
    assert group_along((("dp", 2), ("tp", 4)), ("tp",), 6).nodes == 2, "the second group lies on two nodes"
