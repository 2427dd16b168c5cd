"""The fitted curve: nothing fits better, and its numbers mean what the prototype's do."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.compat import SACStats, greedy_order, tradeoff_curve
from memfit.compat.tradeoff_curve import fit_piecewise
from memfit.errors import InputError


@st.composite
def points(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Rising points, as curves of memory against time are."""
    steps = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=4, max_size=20))
    x, y = np.cumsum(np.array(steps, np.float64), axis=0).T
    return x / x[-1], y / max(y[-1], 1.0)


def error_at(x: np.ndarray, y: np.ndarray, place: float) -> float:
    """The squared error of the best two segments with a break here, from the textbook."""
    design = np.column_stack((np.ones_like(x), x, np.maximum(x - place, 0.0)))
    return float(((design @ np.linalg.lstsq(design, y, rcond=None)[0] - y) ** 2).sum())


@settings(max_examples=100, deadline=None)
@given(points())
def test_no_break_fits_better_than_the_one_found(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = drawn
    line = fit_piecewise(x, y, 2)
    least = min(error_at(x, y, place) for place in np.linspace(x[0], x[-1], 400)[1:-1])
    assert line.squared_error <= least + 1e-12
    assert line.squared_error == pytest.approx(sum((line(a) - b) ** 2 for a, b in zip(x, y, strict=True)), abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(points(), st.integers(2, 4))
def test_segments_meet_and_more_of_them_fit_no_worse(drawn: tuple[np.ndarray, np.ndarray], segments: int) -> None:
    x, y = drawn
    line, fewer = fit_piecewise(x, y, segments), fit_piecewise(x, y, segments - 1)
    assert line.breaks[0] == x[0] and line.breaks[-1] == x[-1]
    assert list(line.breaks) == sorted(line.breaks)
    assert len(line.breaks) == len(line.slopes) + 1 == len(line.intercepts) + 1
    assert line.squared_error <= fewer.squared_error + 1e-12
    for place, left, right in zip(line.breaks[1:-1], range(segments), range(1, segments), strict=False):
        before = line.slopes[left] * place + line.intercepts[left]
        assert before == pytest.approx(line.slopes[right] * place + line.intercepts[right], abs=1e-6)


def test_a_curve_of_two_lines_is_found() -> None:
    x = np.linspace(0.0, 1.0, 11)
    y = np.where(x < 0.63, 0.5 * x, 0.5 * 0.63 + 3.0 * (x - 0.63))
    line = fit_piecewise(x, y, 2)
    assert line.breaks[1] == pytest.approx(0.63)
    assert line.slopes == pytest.approx((0.5, 3.0))
    assert line.intercepts == pytest.approx((0.0, 0.5 * 0.63 - 3.0 * 0.63))


def test_many_points_are_fitted_exactly_too() -> None:
    x = np.linspace(0.0, 1.0, 1500)
    y = np.where(x < 0.31234, x, 0.31234 + 4.0 * (x - 0.31234))
    assert fit_piecewise(x, y, 2).breaks[1] == pytest.approx(0.31234)


STATS = SACStats(
    func_names=["view", "a", "b", "c", "d", "e_"],
    runtimes=[1.0, 1.0, 2.0, 4.0, 8.0, 0.0],
    memory=[0, 80, 80, 40, 0, 0],
    view_like_ops=[0],
    rand_ops=[],
    saved_autograd_ops=[],
    inplace_ops=[(5, 5)],
    force_store_random=False,
)


def test_the_curve_adds_up_the_greedy_order() -> None:
    curve = tradeoff_curve(STATS, greedy_order(STATS))
    assert curve.sac_memory == 200 and curve.sac_runtime == 16.0
    expected = OrderedDict([(0.01, 1 / 16), (0.41, 2 / 16), (0.81, 4 / 16), (1.01, 16 / 16)])
    assert list(curve.tradeoff_curve) == pytest.approx(list(expected))
    assert list(curve.tradeoff_curve.values()) == pytest.approx(list(expected.values()))


def test_the_fit_is_to_the_time_of_the_next_point() -> None:
    curve = tradeoff_curve(STATS, greedy_order(STATS), n_segments=1)
    assert curve.n_segments == 1
    slope, intercept = np.polyfit([0.01, 0.41, 0.81], [2 / 16, 4 / 16, 16 / 16], 1)
    assert curve.slopes == pytest.approx([slope])
    assert curve.intercepts == pytest.approx([intercept])
    assert curve.fit_breaks == pytest.approx([0.01, 0.81])


def test_few_points_get_few_segments() -> None:
    curve = tradeoff_curve(STATS, greedy_order(STATS), n_segments=5)
    assert curve.n_segments == len(curve.slopes) == 1
    with pytest.raises(InputError, match="n_segments"):
        tradeoff_curve(STATS, greedy_order(STATS), n_segments=0)
