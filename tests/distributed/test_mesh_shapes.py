"""`search(over="mesh")` against real processes over Gloo: the peak of every shape, to the byte."""

from __future__ import annotations

import pytest

import memfit
from tests.distributed import mesh_shapes
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
            # the bounds are equal, unless the profiler missed a free on a thread of Gloo's in every one of the steps
            step = min(own["steps"], key=lambda each: each["missing_bytes"])
            low, high = (own["resident_bytes"] + rise for rise in step["peak_bytes"])
            assert low <= point.peak_bytes <= high, f"{shape}: {point.peak_bytes - low}, {point.peak_bytes - high}"


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_on_a_mesh_computes_what_the_plain_one_does(four_ranks: Ranks, tied: bool) -> None:
    four_ranks.run(mesh_shapes.compared, tied=tied)
