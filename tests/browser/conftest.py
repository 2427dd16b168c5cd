"""A real browser for the pages, without a network, and the pages that the tests open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page_cases import CASES, write_case

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOW = "install it with `apt-get install -y chromium` and `pip install playwright`"


def missing(what: str) -> None:
    """Without a browser the pages are not tested: that may happen on a desk and not where changes are judged."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}; {HOW}")
    pytest.skip(f"{what}; {HOW}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium as the system has it."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        missing(f"none of {', '.join(BROWSERS)} is there")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a case, written once."""
    folder, written = tmp_path_factory.mktemp("pages"), {}

    def path(case: str) -> Path:
        assert case in CASES
        if case not in written:
            written[case] = write_case(case, folder / f"{case}.html")
        return written[case]

    return path


class Opened:
    """A page that was opened offline, with everything that it said and asked for."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        self.url = path.resolve().as_uri()
        page.goto(self.url)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def opened(browser: Any, page_path: Callable[[str], Path]) -> Iterator[Callable[..., Opened]]:
    """Opens a case's page; width and colour scheme as asked."""
    contexts = []

    def open_case(case: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", offline=True
        )
        contexts.append(context)
        return Opened(context.new_page(), page_path(case))

    yield open_case
    for context in contexts:
        context.close()
