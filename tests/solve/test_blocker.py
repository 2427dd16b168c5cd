"""What stands in the way of a lower peak."""

from __future__ import annotations

import torch
from llama import Shape, training_step

import memfit
from memfit.capture import Phase
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.solve import Problem, find_blocker
from memfit.solve.min_budget import min_budget

SHAPE = Shape(layers=2, hidden=64, heads=4, key_value_heads=2, feed_forward=128, vocabulary=4096)


def test_what_stands_in_the_way_is_the_highest_point_of_the_plan_that_needs_least() -> None:
    trace = memfit.trace(training_step(SHAPE, length=512, dtype=torch.float32), target="h100-sxm")
    problem = Problem.of(Runtime.of(trace, Roofline()), Target.parse("h100-sxm"))
    least = min_budget(problem.program(1))
    assert least is not None
    blocker = find_blocker(problem, least.choice)
    assert blocker.peak_bytes == least.peak_bytes == sum(blocker.by_category.values())
    assert blocker.phase is Phase.BACKWARD and blocker.name == "aten._log_softmax_backward_data.default"
    assert "llama.py:" in blocker.source and "of the backward" in str(blocker)
