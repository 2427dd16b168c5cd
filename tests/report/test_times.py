"""What the terminal shows of a step's run time."""

from __future__ import annotations

import io

from llama import Shape, training_step
from rich.console import Console

import memfit
from memfit.cost import Roofline, Runtime
from memfit.report import print_time
from memfit.tradeoff import build_frontiers
from memfit.units import display_bytes, display_ms


def test_report_shows_the_step_its_layers_as_one_row_and_what_they_could_give_up() -> None:
    trace = memfit.trace(training_step(Shape(layers=3), length=2048), target="h100-sxm")
    runtime = Runtime.of(trace, Roofline())
    found = build_frontiers(trace, runtime.op_ms)
    output = io.StringIO()
    print_time(runtime, found, Console(file=output, width=160))
    text = output.getvalue()
    assert f"predicted time of one step: {display_ms(runtime.total_ms)}" in text
    layers = [runtime.modules[f"layers.{i}"] for i in range(3)]
    times, gives = [line for line in text.splitlines() if line.startswith("layers.* ")]
    assert [part.strip() for part in times.split("│")][1:4] == [
        "3",
        display_ms(sum(layer.forward_ms for layer in layers)),
        display_ms(sum(layer.backward_ms for layer in layers)),
    ]
    most = sum(found[f"layers.{i}"].policies[-1].discarded_bytes for i in range(3))
    assert [part.strip() for part in gives.split("│")][1:3] == ["3", display_bytes(most)]
