"""The processor's cache is what was measured, not what the system tells of a larger machine."""

from __future__ import annotations

import os

import pytest

from memfit.cost import processor_cache
from memfit.cost.processor_cache import measure_cache_bytes, told_cache_bytes


def test_the_cache_is_no_larger_than_the_system_tells() -> None:
    assert 0 < measure_cache_bytes() <= told_cache_bytes()


def test_a_cache_that_a_virtual_machine_does_not_own_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a machine that is told 480 MiB and has 32: a small op, its own share, memory."""
    rates = {1 << 20: 93e9, 2 << 20: 80e9, 4 << 20: 53e9, 8 << 20: 52e9, 16 << 20: 53e9, 32 << 20: 54e9}
    monkeypatch.setattr(os, "sysconf", lambda name: 480 << 20)
    monkeypatch.setattr(processor_cache, "_rate", lambda size: rates.get(size, 25e9))
    assert measure_cache_bytes() == 32 << 20


def test_where_nothing_is_faster_than_memory_others_have_half_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 16 << 20)
    monkeypatch.setattr(processor_cache, "_rate", lambda size: 25e9)
    assert measure_cache_bytes() == 8 << 20
