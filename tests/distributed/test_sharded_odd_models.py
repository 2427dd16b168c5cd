from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed import sharded_odd_models as cases
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize(
    "case",
    [
        cases.replacements_are_written_back,
        cases.integer_parameters,
        cases.wrapped_in_checkpoints,
        cases.lists_of_modules,
        cases.optimizers_in_backward,
        cases.state_of_other_units,
    ],
    ids=lambda case: case.__name__,
)
def test_odd_models_train_or_are_refused(case: Callable[[], None], two_ranks: Ranks) -> None:
    two_ranks.run(case)
