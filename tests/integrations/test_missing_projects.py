"""Projects that memfit works with are no dependencies: without them their integration says what to install."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import memfit
from memfit.integrations.planned_training import check_version

_LIBRARIES = ("accelerate", "lightning", "transformers")


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_torchtitan_that_is_missing_is_named() -> None:
    with pytest.raises(memfit.InputError, match=r"pip install 'memfit\[torchtitan\]'"):
        memfit.integrations.torchtitan.step("llama3_8b.toml")


@pytest.mark.parametrize("name", _LIBRARIES)
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"memfit.integrations.{name}", raising=False)
    with pytest.raises(memfit.InputError, match=rf"{name} cannot be imported.*pip install '{name}>="):
        importlib.import_module(f"memfit.integrations.{name}")


@pytest.mark.parametrize(("installed", "oldest"), [("4.49.0", "4.57"), ("1.9.0", "1.10"), ("2.4.0.post1", "2.5")])
def test_a_library_that_is_too_old_is_named(installed: str, oldest: str) -> None:
    with pytest.raises(memfit.InputError, match=f"{installed} is installed, and memfit works with {oldest} or newer"):
        check_version("transformers", installed, oldest)


@pytest.mark.parametrize(("installed", "oldest"), [("5.0.0", "4.57"), ("2.5", "2.5"), ("1.10.0rc1", "1.10")])
def test_a_library_that_is_new_enough_is_taken(installed: str, oldest: str) -> None:
    check_version("transformers", installed, oldest)


def test_no_library_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, memfit; memfit.integrations, memfit.plan, memfit.guard, memfit.search; "
        f"print(sorted({{*{_LIBRARIES!r}}} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_integration_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="megatron"):
        _ = memfit.integrations.megatron
