from __future__ import annotations

from typing import Any

import pytest

from memfit.sharded import UnitOptions
from tests.distributed.ranks import Ranks
from tests.distributed.sharded_memory import measured_and_expected

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

_EQUAL, _UNEQUAL = [1024] * 4, [512, 2048, 768, 1536, 1024]


@pytest.mark.parametrize(
    ("widths", "options", "schedule", "half"),
    [
        (_EQUAL, UnitOptions(), {}, False),
        (_EQUAL, UnitOptions(), {"forward_prefetch": 0, "backward_prefetch": 0}, False),
        (_EQUAL, UnitOptions(), {"forward_prefetch": 3, "backward_prefetch": 2}, False),
        (_EQUAL, UnitOptions(keep=True), {}, False),
        (_EQUAL, UnitOptions(), {}, True),
        (_UNEQUAL, UnitOptions(), {}, False),
        (_UNEQUAL, UnitOptions(), {"backward_prefetch_at": "after"}, False),
        (_UNEQUAL, UnitOptions(keep=True), {}, True),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_takes_what_its_schedule_says(
    two_ranks: Ranks, widths: list[int], options: UnitOptions, schedule: dict[str, Any], half: bool, optimizer: str
) -> None:
    units = {str(number): options for number in range(len(widths))}
    for measured, expected, at in two_ranks.run(
        measured_and_expected, widths, units, schedule, half=half, optimizer=optimizer
    ):
        assert measured == pytest.approx(expected, rel=0.01), at


@pytest.mark.parametrize("options", [UnitOptions(), UnitOptions(reshard_ranks=2), UnitOptions(keep=True)])
def test_a_step_on_four_ranks_takes_what_its_schedule_says(four_ranks: Ranks, options: UnitOptions) -> None:
    units = {str(number): options for number in range(len(_EQUAL))}
    for measured, expected, at in four_ranks.run(
        measured_and_expected, _EQUAL, units, {}, half=False, optimizer="adamw"
    ):
        assert measured == pytest.approx(expected, rel=0.01), at
