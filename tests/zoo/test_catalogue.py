"""The generic maker of docs/zoo.md: a few of its models; `python -m tests.zoo.catalogue` examines all."""

from __future__ import annotations

import pytest

from tests.zoo.catalogue.examination import Untrainable, examine, seed, train_plainly
from tests.zoo.catalogue.libraries import LIBRARIES

pytestmark = [pytest.mark.zoo, pytest.mark.usefixtures("frozen_heap")]


@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param("transformers", "qwen3", marks=pytest.mark.zoo_slice),
        ("transformers", "gpt_oss"),
        ("transformers", "whisper"),
        ("transformers", "vit"),
        ("diffusers", "UNet2DModel"),
    ],
)
def test_a_model_that_nobody_tuned_for_holds(library: str, name: str) -> None:
    seed()
    step = LIBRARIES[library].build(name)
    train_plainly(step)
    found = examine(library, name, step)
    assert found.holds, found


def test_what_pytorch_cannot_train_is_not_examined() -> None:
    step = LIBRARIES["transformers"].build("qwen3")
    step.batch["input_ids"] = step.batch["input_ids"][:, :1]  # labels of another length
    with pytest.raises(Untrainable):
        train_plainly(step)
