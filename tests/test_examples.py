"""The examples run as they are shipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
WIDE = {**os.environ, "COLUMNS": "140"}


def test_demo_tells_whether_the_step_fits_and_what_to_do() -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--layers", "2", "--length", "4096", "--budget", "16GiB"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=WIDE)
    assert result.returncode == 0, result.stderr
    assert "fits: needs" in result.stdout
    assert "layers.*.feed_forward" in result.stdout
    assert "plan for NVIDIA H100 SXM5 80GB, 1 rank, budget 16.00 GiB: optimal" in result.stdout
    assert "checkpointed:" in result.stdout
    assert "captured in" in result.stdout
