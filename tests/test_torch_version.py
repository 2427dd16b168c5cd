"""Which releases of torch are refused, warned about, or passed."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from memfit.torch_private.version import NEWEST_TRIED, OLDEST, TorchVersionError, check_torch_version


@pytest.mark.parametrize("version", ["1.13.1", "2.1.0+cu118", f"{OLDEST[0]}.{OLDEST[1] - 1}.1"])
def test_an_older_torch_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(TorchVersionError, match="torch>=") as caught:
        check_torch_version(version)
    assert version in str(caught.value)


def test_a_torch_newer_than_any_tried_gets_a_warning() -> None:
    with pytest.warns(UserWarning, match="newer than any"):
        check_torch_version(f"{NEWEST_TRIED[0]}.{NEWEST_TRIED[1] + 1}.0a0+git123")


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", f"{NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}.1"])
def test_a_torch_that_was_tried_passes(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch_version(version)


@pytest.mark.parametrize("name", ["Step", "shard"])
def test_the_installed_torch_is_checked_before_it_is_used(name: str) -> None:
    code = f"import torch; torch.__version__ = '2.4.0'; import memfit; memfit.{name}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode != 0
    assert "memfit needs torch" in ran.stderr and "2.4.0" in ran.stderr


def test_the_table_of_versions_covers_the_range() -> None:
    page = (Path(__file__).parents[1] / "docs" / "versions.md").read_text()
    for minor in range(OLDEST[1], NEWEST_TRIED[1] + 1):
        assert f"\n| {OLDEST[0]}.{minor}." in page
