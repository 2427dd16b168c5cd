"""The page in Chromium, opened from disk with the network off: it loads, answers to mouse and keys, and reads well."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from memfit.units import display_bytes, display_ms
from tests.browser.page_cases import CASES, HOSTILE

Open = Callable[..., Any]


def data_of(opened: Any) -> dict[str, Any]:
    return json.loads(opened.page.evaluate("document.getElementById('data').textContent"))


def peaks_of(opened: Any) -> dict[str, str]:
    return {name: display_bytes(line["peak_bytes"]) for name, line in data_of(opened)["timelines"].items()}


@pytest.mark.parametrize("case", [case for case in CASES if case != "deep"])
def test_it_loads_from_disk_without_a_network_or_a_word(opened: Open, case: str) -> None:
    page = opened(case)
    assert page.said == []
    assert page.asked == [page.url]
    assert page.page.is_visible("#memory") and page.page.is_visible("#modules") and page.page.is_visible("#assumed")
    painted = page.page.evaluate(
        "() => [...document.querySelectorAll('#areas, #tree')].map((canvas) => new Set(new Uint32Array("
        "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size)"
    )
    assert min(painted) > 3  # colours


def test_pointing_at_the_chart_shows_op_module_source_and_storages(opened: Open) -> None:
    page = opened("plain")
    page.page.locator("#chart").scroll_into_view_if_needed()
    data, box = data_of(page), page.page.locator("#chart").bounding_box()
    seen = set()
    for part in (0.06, 0.2, 0.5, 0.8, 0.99):
        page.page.mouse.move(box["x"] + part * box["width"], box["y"] + box["height"] / 2)
        page.settle()
        point = int(page.page.get_attribute("#chart", "aria-valuenow"))
        line, shown = data["timelines"]["planned"], page.text("#here")
        assert data["strings"][line["op"][point]] in shown
        assert data["phases"][line["phase"][point]] in shown
        if line["module"][point] >= 0:
            assert data["strings"][line["module"][point]] in shown
        if line["source"][point] >= 0:
            assert data["strings"][line["source"][point]] in shown
        total = sum(values[point] for values in line["bytes"].values())
        assert display_bytes(total) in shown
        largest = line["groups"][line["alive"][point][0]]
        assert data["strings"][largest[2]] in page.text("#alive")
        seen.add(shown)
    assert len(seen) == 5
    assert "optimizer" in page.text("#here")


def test_pointing_at_a_lane_says_what_it_is_and_how_many_bytes(opened: Open) -> None:
    page = opened("sharded")
    data = data_of(page)
    lanes = data["timelines"]["planned"]["lanes"]
    assert {"gather", "reduce"} <= set(lanes)
    page.page.locator("#chart").scroll_into_view_if_needed()
    box = page.page.locator("#chart").bounding_box()
    for number, (key, spans) in enumerate(lanes.items()):
        lane = box["y"] + box["height"] - 16 - 18 * (len(lanes) - number) + 7
        told = {f"{data['strings'][span[0]]}, {display_bytes(span[5])}" for span in spans}
        said = ""
        for part in range(72, int(box["width"]) - 10, 2):
            page.page.mouse.move(box["x"] + part, lane)
            if page.page.is_visible("#lane-note"):
                said = page.text("#lane-note")
                break
        assert said.startswith(data["lanes"][key]) and any(each in said for each in told), (key, said)
    page.page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.settle()
    assert not page.page.is_visible("#lane-note")


def test_switching_shows_the_peak_of_the_other_step(opened: Open) -> None:
    page = opened("plain")
    peaks = peaks_of(page)
    assert peaks["baseline"] != peaks["planned"]
    assert f"Peak {peaks['planned']}" in page.text("#drawn-peak")
    page.page.check("#variant-memory input[value=baseline]")
    assert f"Peak {peaks['baseline']}" in page.text("#drawn-peak") and "above the budget" in page.text("#drawn-peak")
    assert page.page.is_checked("#variant-modules input[value=baseline]")
    assert peaks["baseline"] in page.text("#tree-says")
    page.page.check("#variant-modules input[value=planned]")
    assert f"Peak {peaks['planned']}" in page.text("#drawn-peak")


def test_switching_the_axis_and_the_width_draws_again(opened: Open) -> None:
    page = opened("plain")
    for canvas, choice in (("#areas", "#axis input[value=instant]"), ("#tree", "#metric input[value=ms]")):
        before = page.page.evaluate("(id) => document.querySelector(id).toDataURL()", canvas)
        page.page.check(choice)
        page.settle()
        assert page.page.evaluate("(id) => document.querySelector(id).toDataURL()", canvas) != before
    step_ms = data_of(page)["estimates"][1]["step_ms"]
    assert page.text("#tree-says").startswith(f"{display_ms(step_ms)} a step")


@pytest.mark.parametrize("width", [640, 700, 900, 1101, 1280, 1600])
def test_categories_fit_their_box_and_are_ordered_as_in_the_answer(opened: Open, width: int) -> None:
    page = opened("sharded", width=width, height=900)
    box = page.page.locator("#by-category .scroll").evaluate("(it) => [it.scrollWidth, it.clientWidth]")
    assert box[0] <= box[1]
    first = "#estimates tbody tr:has(.swatch) th"
    answer, shown = (page.page.locator(each).all_inner_texts() for each in (first, "#by-category tbody th"))
    assert shown[: len(answer)] == answer and len(answer) > 3


def test_what_would_help_comes_right_after_the_answer(opened: Open) -> None:
    page = opened("infeasible")
    below = [page.page.locator(each).bounding_box()["y"] for each in ("#blocker", "#memory")]
    assert below[0] < below[1] and "for the budget" in page.text("#blocker")


def test_searching_a_module_lists_it_and_zooms_to_it(opened: Open) -> None:
    page = opened("plain")
    before = page.page.evaluate("document.querySelector('#tree').toDataURL()")
    page.page.fill("#search", "feed_forward.gate")
    page.settle()
    assert page.text("#found") == "3 modules found"
    assert page.page.evaluate("document.querySelector('#tree').toDataURL()") != before
    page.page.click("#matches li:nth-child(2) button")
    assert page.text("#crumbs").split("›")[-1].strip() == "gate" and "layers.1.feed_forward.gate" in page.text("#node")
    page.page.fill("#search", "no such module")
    assert "no module" in page.text("#found") and not page.page.is_visible("#matches")
    page.page.click("#crumbs button:first-child")
    assert "the step" in page.text("#node")


def test_keys_move_the_cursor_and_the_tree(opened: Open) -> None:
    page = opened("plain")
    now = lambda: int(page.page.get_attribute("#chart", "aria-valuenow"))  # noqa: E731
    page.page.focus("#chart")
    peak = now()
    assert peak == data_of(page)["timelines"]["planned"]["peak"]
    for key, expected in (("ArrowRight", peak + 1), ("ArrowLeft", peak), ("ArrowLeft", peak - 1), ("Home", 0)):
        page.page.keyboard.press(key)
        page.settle()
        assert now() == expected
    assert "embedding" in page.text("#here") and "embedding" in page.page.get_attribute("#chart", "aria-valuetext")
    page.page.keyboard.press("End")
    page.settle()
    assert "end of the step" in page.text("#here")
    page.page.keyboard.press("p")
    page.settle()
    assert now() == peak
    page.page.focus("#icicle")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.page.keyboard.press(key)
    assert page.text("#crumbs").replace("\n", "").endswith("layers")
    page.page.keyboard.press("Escape")
    assert page.text("#crumbs").replace("\n", "").endswith("(model)")


def test_every_control_can_be_reached_with_tab_and_shows_its_focus(opened: Open) -> None:
    page = opened("plain")
    reached = set()
    for _ in range(40):
        page.page.keyboard.press("Tab")
        found = page.page.evaluate(
            "() => { const it = document.activeElement; const style = getComputedStyle(it.closest('label') || it);"
            "return [it.id || it.name || it.textContent.trim(), style.outlineStyle, it.tagName]; }"
        )
        reached.add(found[0])
        assert found[1] != "none" or found[2] in ("circle", "BODY"), found
    assert {"Skip to the answer", "theme", "variant-memory", "axis", "chart", "search", "icicle"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "deep"])
def test_a_phone_needs_no_sideways_scrolling(opened: Open, case: str, scheme: str) -> None:
    page = opened(case, width=375, height=812, scheme=scheme)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 375
    answer = page.page.locator("#estimates .scroll").evaluate("(it) => [it.scrollWidth, it.clientWidth]")
    assert answer[0] <= answer[1], "the figures of the answer are all in sight"
    page.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.said == []


CONTRAST = """(selector) => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map((c) => linear(c / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const element = document.querySelector(selector);
  let ground = element;
  while (ground && channels(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(channels).map(light);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(opened: Open, scheme: str) -> None:
    page = opened("plain", scheme=scheme)
    for selector in (
        ".why p",
        ".subject",
        "h1 .verdict",
        ".line",
        "#here dt",
        "#here dd",
        "th",
        ".bars .scale span",
        "summary",
        ".keys",
        ".choice label",
        "#legend li",
        ".top nav a",
        ".tag",
        ".held small",
    ):
        ratio = page.page.evaluate(CONTRAST, selector)
        assert ratio >= 4.5, (selector, ratio)


def test_the_theme_can_be_switched(opened: Open) -> None:
    page = opened("plain", scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    areas = "document.querySelector('#areas').toDataURL()"
    before, drawn = page.page.evaluate(ground), page.page.evaluate(areas)
    page.page.click("#theme")
    assert page.page.evaluate(ground) != before and page.page.evaluate(areas) != drawn
    assert page.page.evaluate(CONTRAST, ".why p") >= 4.5
    page.page.click("#theme")
    assert page.page.evaluate(ground) == before


def test_a_name_that_would_be_markup_is_only_text(opened: Open) -> None:
    page = opened("hostile")
    assert page.said == [] and page.asked == [page.url]
    page.page.fill("#search", "<img")
    assert HOSTILE.replace("\u2028", "") in page.text("#matches").replace("\u2028", "").replace("\n", "")
    page.page.click("#matches button")
    page.page.focus("#chart")
    page.page.keyboard.press("Home")
    page.settle()
    assert "onerror" in page.text("#here")
    assert page.page.evaluate("document.images.length") == 0 and "broken" not in page.page.title()
    assert page.said == []


def test_a_plan_that_cannot_be_made_says_what_is_in_the_way(opened: Open) -> None:
    page = opened("infeasible")
    data = data_of(page)
    assert "Does not fit" in page.text("h1") and "smallest budget that works" in page.text(".why")
    assert display_bytes(data["blocker"]["minimum_budget_bytes"]) in page.text("#blocker-body")
    assert data["levers"][0]["name"] in page.text("#blocker-body") and not page.page.is_visible("#levers")
    assert not page.page.is_visible("#decisions") and not page.page.is_visible("#variant-memory")


def test_a_sharded_plan_shows_ranks_units_and_what_a_rank_has(opened: Open) -> None:
    page = opened("sharded")
    shown = page.text("#sharding-body")
    assert "layers.0-2" in shown and "(model)" in shown and "stays gathered" in shown
    assert display_bytes(data_of(page)["shard"]["units"][1]["shard_bytes"]) in shown
    assert "on each of 4 ranks" in page.text("#estimates")


def test_the_measured_step_stands_beside_the_predicted_one(opened: Open) -> None:
    page = opened("verified")
    found = data_of(page)["verification"]
    shown = page.text("#verified-body")
    assert "peak with the plan" in shown and display_bytes(found["bytes"][-1]["measured_bytes"]) in shown
    assert "bit for bit" in shown


def test_decisions_can_be_sorted_and_the_curve_read_with_the_keyboard(opened: Open) -> None:
    page = opened("plain")
    head = page.page.locator("#decisions th", has_text="drops")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    page.page.focus("#curve-chart circle.dot")
    assert display_bytes(data_of(page)["curve"]["points"][0]["budget_bytes"]) in page.text("#curve-says")


def test_it_prints_in_light_colours_without_controls(opened: Open) -> None:
    page = opened("plain", scheme="dark")
    page.page.emulate_media(media="print")
    assert not page.page.is_visible(".top") and not page.page.is_visible("#search")
    assert (
        page.page.evaluate(
            CONTRAST.replace("let ground = element;", "let ground = null;").replace(
                "getComputedStyle(ground).backgroundColor]", "'rgb(255, 255, 255)']"
            ),
            ".why p",
        )
        >= 4.5
    )


FRAMES = """async (selector) => {
  const target = document.querySelector(selector);
  const box = target.getBoundingClientRect();
  const next = () => new Promise(requestAnimationFrame);
  const took = [];
  let before = await next();
  for (let step = 0; step < 30; step += 1) {
    const place = { clientX: box.left + box.width * (0.1 + 0.025 * step), clientY: box.top + box.height * 0.6 };
    target.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, ...place }));
    const now = await next();
    took.push(now - before);
    before = now;
  }
  return took;
}"""


@pytest.mark.slow
def test_126_layers_answer_about_as_fast_as_3(opened: Open) -> None:
    small, deep = opened("plain"), opened("deep")
    data = data_of(deep)
    assert deep.said == [] and deep.asked == [deep.url]
    assert all(len(line["instant"]) < 3000 < line["instants"] for line in data["timelines"].values())
    for selector in ("#chart", "#icicle"):
        ratios = []
        for _ in range(2):
            times = [statistics.median(page.page.evaluate(FRAMES, selector)) for page in (small, deep)]
            ratios.append(times[1] / times[0])
        assert min(ratios) < 3, (selector, ratios)
