"""The captured peak of real models equals the one that the allocator saw."""

from __future__ import annotations

import dataclasses
import gc
import warnings

import pytest
import torch

import memfit
from memfit.capture import check_trace
from memfit.capture.environment import no_garbage_collection
from memfit.memory import Timeline, measured
from tests.zoo.zoo_models import STEPS

pytestmark = pytest.mark.usefixtures("frozen_heap")

SLICE = {"llama", "gpt2-autocast", "mlp", "lstm", "resnet", "llama-checkpointed"}
"""The models that also run in `make test`."""


def resident_bytes(*values: object) -> int:
    """Bytes of all distinct storages among tensors, modules and optimizer states."""
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        elif isinstance(value, torch.nn.Module):
            visit([*value.parameters(), *value.buffers()])
        elif isinstance(value, torch.optim.Optimizer):
            visit(list(value.state.values()))
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(list(values))
    return sum(storages.values())


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo_slice] if name in SLICE else []) for name in STEPS]
)
def test_captured_peak_equals_the_measured_one(name: str, record_property) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    model = step.build_model().train()
    optimizer = step.build_optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step.execute(model, optimizer, "cpu")
        resident = resident_bytes(model, optimizer, step.batch)
        gc.collect()
        with no_garbage_collection(), measured() as truth:  # or cycles die at other ops from run to run
            step.execute(model, optimizer, "cpu")
        trace = memfit.trace(dataclasses.replace(step, optimizer=optimizer), target="cpu")
    check_trace(trace)
    timeline = Timeline.of(trace)
    measured_peak = resident + truth.peak_bytes
    error = (timeline.peak_bytes - measured_peak) / measured_peak
    record_property("peak_bytes", measured_peak)
    record_property("error_bytes", timeline.peak_bytes - measured_peak)
    assert timeline.start_bytes == resident
    assert timeline.peak_bytes == measured_peak, f"{name}: {100 * error:+.4f} %"
