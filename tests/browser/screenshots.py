"""Makes the pictures of docs/images: the page that `make demo` writes, on a desk and on a phone.

python tests/browser/screenshots.py
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from memfit.cli import main as memfit_command

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
SIZES = {"desktop": (1280, 2060, 1), "phone": (375, 2050, 2)}


def write_demo(path: Path) -> Path:
    """The page of the demo, by its own command."""
    demo = re.search(r"^DEMO = (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    if demo is None:
        raise RuntimeError("the Makefile has no line DEMO = ...")
    if memfit_command(["plan", *shlex.split(demo[1]), "--curve", "--html", str(path)]) != 0:
        raise RuntimeError(f"memfit plan {demo[1]} failed")
    return path


def in_few_colours(shot: Image.Image) -> Image.Image:
    """A third as large: the colours that are there most as they are, the others as the nearest of these."""
    counts = shot.getcolors(shot.width * shot.height) or []
    most = sorted(counts, reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in most for part in colour])
    return shot.quantize(palette=palette, dither=Image.Dither.NONE)


def main() -> None:
    """Write the page to a folder of its own and take four pictures of it."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_demo(Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for device, (width, height, scale) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
                )
                page.goto(path.as_uri())
                shot = Image.open(io.BytesIO(page.screenshot()))
                in_few_colours(shot.convert("RGB")).save(IMAGES / f"page-{device}-{scheme}.png", optimize=True)
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
