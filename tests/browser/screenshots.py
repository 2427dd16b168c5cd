"""Makes the pictures of docs/images: the page of a Llama-3-8B step on eight H100s, on a desk and on a phone.

python tests/browser/screenshots.py
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import training_step

import memfit
from memfit.report.explain import explain
from memfit.report.facts import Report
from memfit.report.page import write_page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZES = {"desktop": (1280, 2060, 1), "phone": (375, 1500, 2)}


def write_example(path: Path) -> Path:
    """The page of the example, with its trade-off and its levers."""
    trace = memfit.trace(training_step(batch=2, length=8192), target="h100-sxm")
    plan = memfit.plan(trace, ranks=8, budget="64GiB", progress=False)
    report = Report.of(plan, trace).with_curve(points=10)
    return write_page(report, path, levers=explain(plan, trace, progress=False).levers)


def main() -> None:
    """Write the page to a folder of its own and take four pictures of it."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_example(Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for device, (width, height, scale) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
                )
                page.goto(path.as_uri())
                shot = Image.open(io.BytesIO(page.screenshot()))
                few = shot.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                few.save(IMAGES / f"page-{device}-{scheme}.png", optimize=True)
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
