"""Installs a wheel into an empty virtualenv outside the repository, and checks what it gives: `make wheel`.

python tests/packaging/empty_environment.py dist/memfit-0.1.0-py3-none-any.whl
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).with_name("installed_memfit.py")
ROUNDS = 5


def main(wheel: Path) -> None:
    """Install, check, and print what importing memfit costs beside importing torch."""
    with tempfile.TemporaryDirectory(prefix="memfit-wheel-") as home:
        environment = Path(home) / "venv"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, "-c", ROOT / "constraints.txt", wheel.resolve()], check=True, cwd=home)
        subprocess.run([python, CHECKS], check=True, cwd=home)
        shown = subprocess.run([environment / "bin" / "memfit", "version"], check=True, cwd=home, capture_output=True)
        print(f"the command: {shown.stdout.decode().strip()}")
        times: dict[str, list[float]] = {name: [] for name in ("memfit", "torch")}
        for _ in range(ROUNDS):
            for name, found in times.items():
                begin = time.perf_counter()
                subprocess.run([python, "-c", f"import {name}"], check=True, cwd=home)
                found.append(time.perf_counter() - begin)
        ours, theirs = (statistics.median(times[name]) for name in ("memfit", "torch"))
        print(f"import memfit {ours:.2f} s, import torch {theirs:.2f} s: {ours / theirs:.2f} of it")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
