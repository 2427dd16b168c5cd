"""The forward ops in the traces of real models are those that really run, and their results are laid out so."""

from __future__ import annotations

import warnings

import pytest
import torch

import memfit
from tests.capture.real_run import differences
from tests.zoo.zoo_models import STEPS

pytestmark = pytest.mark.usefixtures("frozen_heap")

SLICE = {"llama", "unet", "gru", "lstm", "resnet"}
"""The models that also run in `make test`."""


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo_slice] if name in SLICE else []) for name in STEPS]
)
def test_forward_ops_are_those_of_a_real_run(name: str) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    model = step.build_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = memfit.trace(step, target="cpu")
        found = differences(trace, step, model, layouts=True)
    assert not found, f"{name}\n{found}"
