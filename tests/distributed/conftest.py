from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Capture as the ranks run: CPU kernels take scratch memory for each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes with a Gloo group."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes with a Gloo group."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
