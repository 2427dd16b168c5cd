"""`search(over="device")`: the answers of planning on each device, and costs by prices that are known or given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import int64

import memfit
from memfit.capture import Step
from memfit.errors import InputError
from memfit.hardware import list_devices, list_prices
from memfit.plans import DeviceSearch, search
from memfit.report import write_search_page
from tests.plans.test_searching import Model, loss

DEVICES = ["h100-sxm", "a100-sxm-40gb", "t4"]


def step() -> Step:
    return Step(Model, memfit.spec((2, 256), int64), loss=loss)


@pytest.fixture(scope="module")
def found() -> DeviceSearch:
    return search(step(), over="device", values=DEVICES, prices={"t4": 0.001}, progress=False)


def test_every_device_has_the_plan_of_planning_on_it(found: DeviceSearch) -> None:
    assert [point.device for point in found.points] == ["t4", "a100-sxm-40gb", "h100-sxm"]
    for point in found.points:
        plan = memfit.plan(step(), target=point.device, progress=False)
        assert plan.predicted is not None and point.peak_bytes == plan.predicted.peak_bytes
        assert point.step_ms == pytest.approx(plan.predicted.step_ms)


def test_the_fastest_the_cheapest_and_the_smallest_are_named(found: DeviceSearch) -> None:
    assert found.fastest is not None and found.smallest is not None and found.cheapest is not None
    assert found.fastest.step_ms == min(point.step_ms or 0.0 for point in found.points)
    assert found.smallest.device == "t4" and found.cheapest.device == "t4"
    point = found.cheapest
    assert point.step_ms is not None and point.usd_per_step == pytest.approx(0.001 * point.step_ms / 3.6e6)
    assert point.usd_per_million == pytest.approx(point.usd_per_step / (2 * 256) * 1e6)
    kept = json.loads(found.to_json())
    assert kept["cheapest"] == "t4" and kept["points"][0]["price"]["provider"] == "your price"
    words = " ".join(str(found).split())
    assert "cheapest: t4" in words and "the smallest that fits: t4" in words and "RunPod" in words


def test_the_page_shows_every_device(found: DeviceSearch, tmp_path: Path) -> None:
    page = write_search_page(found, tmp_path / "devices.html").read_text()
    assert page.count("<circle") == 3 and all(name in page for name in DEVICES) and "<script" not in page


def test_a_device_without_a_price_is_asked_for() -> None:
    unpriced = search(step(), over="device", values="t4", progress=False)
    assert unpriced.cheapest is None and unpriced.fastest is not None
    assert any("no price is known of t4; give it" in note for note in unpriced.notes)


def test_prices_name_devices_and_have_sources_and_dates() -> None:
    known = {device.name for device in list_devices()}
    for name, prices in list_prices().items():
        assert name in known
        for price in prices:
            assert price.usd_per_hour > 0 and price.source and price.date[:4].isdigit() and price.product
        assert [price.usd_per_hour for price in prices] == sorted(price.usd_per_hour for price in prices)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "t4"}, "target is not for over='device'"),
        ({"prices": {"t4": 0}}, "the price of t4 is 0; write dollars"),
        ({"prices": {"t5": 1.0}}, "unknown device 't5'"),
        ({"values": []}, "values has nothing in it"),
        ({"budget": "4GiB"}, "over devices it is a part of each"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(step(), over="device", **given)
