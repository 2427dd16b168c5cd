"""Out of memory at each phase of a step, under a real limit of the process; in child processes."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's")
REPLANNED = ["loss", "backward", "second run", "forward"]


@functools.cache
def outcomes(group: str) -> dict[str, dict[str, Any]]:
    """Run the cases of a group. Large tensors are mapped by themselves, so that the limit counts them."""
    script = Path(__file__).with_name("fault_steps.py")
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), group], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
@pytest.mark.parametrize("where", REPLANNED)
def test_a_step_without_memory_is_taken_back_planned_tighter_and_run_again(where: str) -> None:
    found = outcomes("activations")[where]
    assert found["limited"] and found["attempts"] > 1 and found["error"] is None
    assert found["peaks"][1] < found["peaks"][0]
    assert found["differs at the end"] == [], "ten steps later it must be the run that never failed"


@linux
def test_when_nothing_takes_less_it_is_explained_and_everything_is_as_before_the_step() -> None:
    found = outcomes("activations")["no way out"]
    assert found["restored"] and found["differs after the failure"] == []
    assert found["differs at the end"] == []
    assert "DefaultCPUAllocator" in found["cause"]
    # Which of the first allocations the limit refuses depends on what the process has mapped by then.
    failed = re.search(r"out of memory: an allocation of .+ failed in forward, in (stem|\(model\))", found["error"])
    assert failed is not None
    if failed[1] == "stem":
        assert "aten.native_batch_norm.default of stem" in found["error"] and "self.stem(x)" in found["error"]
    for part in (
        "the process may map (RLIMIT_AS)",
        "are taken",
        "what the plan expected there",
        f"the step failed in forward, in {failed[1]} and was taken back",
        "it ran with the lowest peak that any plan of this step has",
        "halve the micro-batch",
    ):
        assert part in found["error"]


@linux
def test_an_optimizer_that_would_not_get_its_temporaries_does_not_begin_and_then_makes_fewer() -> None:
    found = outcomes("states")["optimizer"]
    assert found["limited"] and found["attempts"] == 2 and found["error"] is None
    assert found["foreach"] is False
    assert found["differs at the end"] == []


@linux
def test_a_first_step_without_memory_for_optimizer_state_leaves_no_state() -> None:
    found = outcomes("states")["first optimizer step"]
    assert found["restored"] and "failed in the optimizer" in found["error"]
    assert found["differs after the failure"] == []
    assert found["differs at the end"] == []


@linux
def test_an_optimizer_that_has_begun_to_write_is_not_run_again_and_the_error_says_so() -> None:
    found = outcomes("states")["inside the optimizer"]
    assert found["restored"] is False and found["attempts"] == 1
    assert found["differs after the failure"], "the limit came too late to be an example"
    assert "could not be taken back, because it had written to" in found["error"]
    assert "copies=True" in found["error"]


@linux
def test_with_copies_an_optimizer_that_has_begun_to_write_is_taken_back() -> None:
    found = outcomes("states")["inside the optimizer, with copies"]
    assert found["limited"] and found["attempts"] == 2 and found["error"] is None
    assert found["differs at the end"] == []
