"""torchtitan's own trainer with a plan in place of its activation checkpointing: same losses, within the budget."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError, reason="make titan installs torchtitan")

from tests.integrations.titan_training import STEPS

pytestmark = [pytest.mark.zoo, pytest.mark.distributed, pytest.mark.xdist_group("ranks")]
SCRIPT = Path(__file__).with_name("titan_training.py")
ROOT = Path(__file__).parents[2]


def trained(folder: Path, ranks: int, budget: int | None = None) -> dict[str, Any]:
    """Train in processes of their own, as torchrun starts them, and return what the first rank wrote."""
    path = folder / f"{ranks}-{budget}.json"
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    running = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(SCRIPT), str(path), *([] if budget is None else [str(budget)])]
        running.append(
            subprocess.Popen(
                command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [each.communicate()[0] for each in running]
    assert all(each.returncode == 0 for each in running), outputs[0][-3000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_under_a_plan_are_those_without_within_the_budget(ranks: int, tmp_path: Path) -> None:
    plain = trained(tmp_path, ranks)
    budget = plain["unplanned_bytes"] * 9 // 10
    planned = trained(tmp_path, ranks, budget)
    assert planned["losses"] == plain["losses"] and len(set(plain["losses"])) == len(plain["losses"]) == STEPS
    assert planned["checkpointed"] > 0
    assert planned["peak_bytes"] <= budget < plain["peak_bytes"]
