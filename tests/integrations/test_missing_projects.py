"""Projects that memfit works with are no dependencies: without them their integration says what to install."""

from __future__ import annotations

import importlib.util

import pytest

import memfit


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_torchtitan_that_is_missing_is_named() -> None:
    with pytest.raises(memfit.InputError, match=r"pip install 'memfit\[torchtitan\]'"):
        memfit.integrations.torchtitan.step("llama3_8b.toml")


def test_an_integration_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="megatron"):
        _ = memfit.integrations.megatron
