"""`search(over="mesh")` against real processes over Gloo: the peak of every shape, to the byte."""

from __future__ import annotations

import pytest

import memfit
from tests.distributed import mesh_shapes
from tests.distributed.measured_steps import bounds_of, check_peak
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def test_peaks_of_shapes_are_those_of_every_rank_to_the_byte(four_ranks: Ranks) -> None:
    four_ranks.begin(mesh_shapes.measured)
    found = memfit.search(
        mesh_shapes.step_of,
        over="mesh",
        target="cpu",
        values=mesh_shapes.SHAPES,
        global_batch=mesh_shapes.GLOBAL_BATCH,
        progress=False,
    )
    answers = four_ranks.answers()
    assert all(isinstance(each, tuple) for each in answers), answers
    assert found.fits and len(found.points) == len(mesh_shapes.SHAPES)
    for place, shape in enumerate(mesh_shapes.SHAPES):
        point = next(each for each in found.points if each.mesh == shape)
        assert point.peak_bytes is not None and point.batch == mesh_shapes.GLOBAL_BATCH // shape["dp"]
        for (measured,) in answers:
            own = measured[place]
            bounds = [own["resident_bytes"] + rise for rise in bounds_of(own["steps"])]
            check_peak(point.peak_bytes, bounds, shape)


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_on_a_mesh_computes_what_the_plain_one_does(four_ranks: Ranks, tied: bool) -> None:
    four_ranks.run(mesh_shapes.compared, tied=tied)


def test_stages_of_a_decoder_train_as_the_plain_one_does(four_ranks: Ranks) -> None:
    four_ranks.run(mesh_shapes.pipelined)


def test_pipelines_are_planned_by_their_first_and_last_stage() -> None:
    shapes = [{"pp": 2, "dp": 2, "tp": 1}, {"pp": 4, "dp": 1, "tp": 1}]
    found = memfit.search(
        mesh_shapes.step_of, over="mesh", target="h100-sxm", values=shapes, global_batch=8, progress=False
    )
    point, none = found.points
    assert point.mesh == shapes[0] and none.reason == "pp 4: 2 layers cannot be divided by 4"
    step = mesh_shapes.step_of(4)
    plans = [
        memfit.plan(step, target="h100-sxm", mesh=shapes[0], rank={"pp": stage}, progress=False) for stage in (0, 1)
    ]
    predicted = [plan.predicted for plan in plans if plan.predicted is not None]
    assert point.peak_bytes == max(each.peak_bytes for each in predicted)
    # alone, each takes the other stage to be like itself; together, both wait for the slower one
    times = sorted(each.step_ms for each in predicted)
    assert point.step_ms is not None and times[0] < point.step_ms < times[1]
    assert predicted[0].peak_bytes != predicted[1].peak_bytes, "the last has the head and the loss"
