"""The context is measured where a GPU is, and told from the processes of others."""

from __future__ import annotations

import pytest
import torch

from memfit.hardware import measure_context
from memfit.hardware.context import used_by_process


def test_the_process_is_found_among_those_that_the_driver_lists() -> None:
    listed = "4242, 1234\n77, 30000\n 42 , 512\n43, [N/A]\n"
    assert used_by_process(listed, 42) == 512 << 20
    assert used_by_process(listed, 4242) == 1234 << 20
    assert used_by_process(listed, 424) is None and used_by_process(listed, 43) is None
    assert used_by_process("", 42) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    assert measure_context() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_with_a_gpu_it_is_more_than_nothing_and_less_than_the_device() -> None:
    found = measure_context()
    assert found is not None and 100 << 20 < found.size_bytes < torch.cuda.get_device_properties(0).total_memory
