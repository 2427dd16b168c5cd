"""Behaviours of PyTorch's own tests of FSDP, which `docs/fsdp-tests.md` lists."""

from __future__ import annotations

import pytest

from tests.distributed import sharded_ported_gradients as gradients
from tests.distributed import sharded_ported_hybrid as hybrid
from tests.distributed import sharded_ported_meshes as meshes
from tests.distributed import sharded_ported_setup as setup
from tests.distributed import sharded_ported_state as state
from tests.distributed import sharded_ported_steps as steps
from tests.distributed import sharded_ported_units as units
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("name", setup.CASES)
def test_setup(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(setup.CASES[name])


@pytest.mark.parametrize("name", steps.CASES)
def test_steps(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(steps.CASES[name])


@pytest.mark.parametrize("name", gradients.CASES)
def test_gradients(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(gradients.CASES[name])


@pytest.mark.parametrize("name", state.CASES)
def test_state(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(state.CASES[name])


@pytest.mark.parametrize("name", hybrid.CASES)
def test_hybrid(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(hybrid.CASES[name])


@pytest.mark.parametrize("name", units.CASES)
def test_units(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(units.CASES[name])


@pytest.mark.parametrize("name", meshes.CASES)
def test_meshes(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(meshes.CASES[name])
