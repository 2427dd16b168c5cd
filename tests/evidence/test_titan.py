"""Published torchtitan runs are predicted from its own code as near as docs/evidence.md says."""

from __future__ import annotations

import importlib.util

import pytest

from tests.evidence import titan, titan_captures

_RUNS = {run.run.name: run for run in titan_captures.read_runs()}
_MISSING = importlib.util.find_spec("torchtitan") is None or importlib.util.find_spec("triton") is None
_titan = pytest.mark.skipif(_MISSING, reason="make titan installs torchtitan")


@_titan
@pytest.mark.zoo
def test_the_same_code_reserves_as_much_by_both_ways() -> None:
    ((kind, published, planned, captured),) = _RUNS["titan-3b39-nn-rmsnorm"].figures()
    assert kind == "reserved, GiB"
    assert captured == pytest.approx(planned, rel=0.001) and captured == pytest.approx(published, rel=0.03)


@_titan
@pytest.mark.zoo
@pytest.mark.parametrize("name", ["titan-perf-8B-layer", "titan-perf-8B-op"])
def test_published_speeds_of_64_gpus_are_predicted(name: str) -> None:
    ((kind, published, _, captured),) = _RUNS[name].figures()
    assert kind == "tokens/s" and captured == pytest.approx(published, rel=0.08)


def test_runs_are_those_of_llama_under_fsdp2() -> None:
    assert {"titan-165-fsdp2-ac", "titan-40f8-a100-fused", "pt-129721-after", "titan-perf-8B-op"} <= set(_RUNS)
    assert not any("fsdp1" in name or "qwen3" in name for name in _RUNS)
    assert _RUNS["titan-perf-8B-op"].memory is not None and _RUNS["titan-perf-8B-op"].speed is not None


def test_the_table_has_both_ways_beside_what_was_published() -> None:
    lines = titan.table([("one", "reserved, GiB", 10.0, 11.0, 9.0), ("one", "tokens/s", 1000.0, 990.0, 1020.0)])
    assert "| one | reserved, GiB | 10.00 | 11.00 | +10.0% | 9.00 | -10.0% |" in lines
    assert "| one | tokens/s | 1,000 | 990 | -1.0% | 1,020 | +2.0% |" in lines
    assert lines[-1] == "Tokens each second, 1 figures: the planner's median error -1.0%, captured +2.0%."
