"""Every op of PyTorch's OpInfo database is captured to the byte, has a note or is refused: none is silently wrong."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.op_cases import cases, op_database
from tests.zoo.op_sweep import Verdict, judge, judge_cuda, quiet_heap

GROUPS = 24
SLICE = ("add", "nn.functional.layer_norm", "nn.functional.gelu", "index_select", "std")
"""Ops of the short run: element-wise, a norm, a kernel that copies, indexing, a reduction."""

SILENT = (Verdict.WRONG, Verdict.RAW)


def silently_wrong(name: str) -> list[str]:
    """The cases of an op that say nothing of what they get wrong."""
    found = [judge(case) for case in cases(name)] + [judge_cuda(case) for case in cases(name, quick=True)]
    return [str(each) for each in found if each.verdict in SILENT]


@pytest.mark.zoo
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_op_is_wrong_without_a_note(group: int) -> None:
    with quiet_heap():
        found = [line for name in sorted(op_database())[group::GROUPS] for line in silently_wrong(name)]
    assert not found, "\n".join(found)


@pytest.mark.zoo
@pytest.mark.zoo_slice
def test_common_ops_are_exact_in_every_layout() -> None:
    with quiet_heap():
        found = [judge(case) for name in SLICE for case in cases(name)]
    wrong = [str(each) for each in found if each.verdict not in (Verdict.EXACT, Verdict.INVALID)]
    assert not wrong, "\n".join(wrong)
    assert sum(each.verdict is Verdict.EXACT for each in found) > len(found) // 2


@pytest.mark.zoo
def test_threads_do_not_change_what_is_exact() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with quiet_heap():
                found = [line for name in SLICE for line in silently_wrong(name)]
            assert not found, "\n".join(found)
    finally:
        torch.set_num_threads(before)
