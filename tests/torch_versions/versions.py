"""Tries memfit on every minor release of torch that it supports, and writes what came of it to docs/versions.md.

    make compat                                   # 2.10 to the newest that installs; gigabytes of downloads
    python tests/torch_versions/versions.py 2.12.1        # one version, beside the rows that the page already has

Each version gets a virtualenv of its own in `.compat/`, with memfit's dependencies and nothing else; `chain.py` runs
there. The results of earlier runs stay in `.compat/*.json`, so that versions can be tried one at a time.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import memfit
from memfit.torch_private.version import OLDEST

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat"
PAGE = ROOT / "docs" / "versions.md"
STAGES = ("capture", "plan", "apply", "verify", "capture for a GPU")
DEPENDENCIES = ("numpy", "msgspec", "rich", "tyro", "highspy")


def newest_of_each_minor() -> list[str]:
    """Return the newest patch release of each minor release from the oldest supported one on."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for text in re.findall(r"\b\d+\.\d+\.\d+\b", listing.partition("Available versions:")[2]):
        major, minor, patch = map(int, text.split("."))
        if (major, minor) >= OLDEST:
            found[major, minor] = max(found.get((major, minor), (-1, "")), (patch, text))
    return [text for _, (_, text) in sorted(found.items())]


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> bool:
    """Run a command with its output in a file; return whether it succeeded."""
    with log.open("a") as file:
        return subprocess.run(command, stdout=file, stderr=file, env=environment, cwd=ROOT).returncode == 0


def last_line(log: Path) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def try_version(version: str) -> dict[str, Any]:
    """Install a version and run the chain on it."""
    home, log, result = FOLDER / version, FOLDER / f"{version}.log", FOLDER / f"{version}.json"
    log.write_text("")
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    if not run([str(python), "-m", "pip", "install", "-q", f"torch=={version}", *DEPENDENCIES], log):
        return {"requested": version, "failed": f"does not install here: {last_line(log)}"}
    result.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ran = run([str(python), str(ROOT / "tests" / "torch_versions" / "chain.py"), str(result)], log, environment)
    if not ran or not result.exists():
        return {"requested": version, "failed": last_line(log)}
    return {"requested": version, **json.loads(result.read_text())}


def describe(found: dict[str, Any]) -> str:
    """Return the row of a version."""
    if "failed" in found:
        return f"| {found['requested']} |" + " – |" * (len(STAGES) + 2) + f" {found['failed']} |"
    steps = found["steps"]
    cells = [f"{sum(stage in step for step in steps)} of {len(steps)}" for stage in STAGES]
    errors = [step["error_percent"] for step in steps if "error_percent" in step]
    worst = f"{max(errors):.2f} %" if errors else "–"
    failures = [f"{step['step']}: {step['failed']}" for step in steps if "failed" in step]
    failures += [f"two ranks: {found['sharded']}"] if found["sharded"].startswith("failed") else []
    cells += [worst, found["sharded"].partition(":")[0], "; ".join(failures) or "works"]
    return f"| {found['torch']} | " + " | ".join(cells) + " |"


def write_page(rows: list[dict[str, Any]], steps: int) -> None:
    """Write the table."""
    today = datetime.date.today().isoformat()
    head = ["torch", *STAGES, "worst peak error", "two ranks", "remarks"]
    lines = [
        "# Versions of torch",
        "",
        "memfit follows torch closely: it runs torch's own dispatcher, autograd and optimizers to capture a step, and",
        "some of what it needs is private to torch. It is therefore tried with each minor release. It refuses versions",
        f"older than {'.'.join(map(str, OLDEST))} before anything is done, and warns once where torch is newer than",
        "the newest one tried.",
        "",
        f"`make compat` makes a virtualenv for each version and runs {steps} training steps of plain torch models",
        "through the whole chain: captured for this machine and for an H100, planned at the smallest budget that can",
        "be met, applied, verified (the same bits, the allocator's peak within the budget), and two steps on two Gloo",
        "ranks against DDP. The cells count the steps that passed.",
        "",
        f"{today}, memfit {memfit.__version__}, 2 cores, no GPU. Builds with `+cu` in their name have CUDA and found",
        "no driver, as on a laptop.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *(describe(row) for row in rows),
        "",
    ]
    PAGE.write_text("\n".join(lines))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for version in sys.argv[1:] or newest_of_each_minor():
        print(f"torch {version}: installing and running, log in {FOLDER.name}/{version}.log ...", flush=True)
        found = try_version(version)
        (FOLDER / f"{version}.json").write_text(json.dumps(found, indent=1))
        print(describe(found), flush=True)
    tried = sorted(FOLDER.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
    rows = [json.loads(path.read_text()) for path in tried]
    write_page(rows, max(len(row.get("steps", ())) for row in rows))
    print(f"written to {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
