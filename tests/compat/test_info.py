"""`module_info` from one trace: calls, passes, names, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llama import Shape, training_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.capture import Phase, trace
from memfit.compat import ModStats, ModuleInfo, module_info, parse_module_info
from memfit.cost import Runtime
from memfit.errors import InputError
from memfit.memory import Timeline, module_memory
from tests.compat.graph_models import GPT, Frozen, Shared, Twice
from tests.compat.graph_peers import captured, timed


def by_name(info: ModuleInfo) -> dict[str, ModStats]:
    return {each["fqn"]: each for each in info["mod_stats"]}


def test_statistics_come_in_forward_order() -> None:
    info = module_info(timed(captured(GPT)))
    assert [each["fqn"] for each in info["mod_stats"]] == info["mod_order"]["fw_pre_order"]
    assert info["mod_stats"][0]["fqn"] == ""


def test_the_model_has_the_parameters_and_gradients_of_all_and_the_whole_time_of_its_ops() -> None:
    runtime = timed(captured(Frozen))
    root = by_name(module_info(runtime))[""]
    memory = module_memory(Timeline.of(runtime.trace))[""]
    assert root["param_per_module"] == memory.parameter_bytes
    assert root["grad_per_module"] == memory.gradient_bytes < memory.parameter_bytes
    placed = sum(
        time
        for op, time in zip(runtime.trace.ops, runtime.op_ms.tolist(), strict=True)
        if op.call != -1 and op.phase is not Phase.OPTIMIZER
    )
    assert root["fw_runtime_per_module"] + root["bw_runtime_per_module"] == pytest.approx(placed)


def test_calls_add_up_to_their_module() -> None:
    runtime = timed(captured(Twice))
    summed, calls = by_name(module_info(runtime)), by_name(module_info(runtime, each_call=True))
    assert list(calls) == [
        "", "block", "block.up", "block.act", "block.down", "between",
        "block#1", "block#1.up#1", "block#1.act#1", "block#1.down#1",
    ]  # fmt: skip
    for path in ("block", "block.up", "block.act", "block.down"):
        second = path.replace("block", "block#1") + ("#1" if "." in path else "")
        for key in ("act_fw_per_module", "input_per_module", "output_per_module"):
            assert summed[path][key] == calls[path][key] + calls[second][key], (path, key)
        for key in ("fw_runtime_per_module", "bw_runtime_per_module"):
            assert summed[path][key] == pytest.approx(calls[path][key] + calls[second][key]), (path, key)
        assert summed[path]["param_per_module"] == calls[path]["param_per_module"] == calls[second]["param_per_module"]
        assert summed[path]["sac_runtime"] == pytest.approx(calls[path]["sac_runtime"] + calls[second]["sac_runtime"])
        assert summed[path]["sac_memory"] == calls[path]["sac_memory"] + calls[second]["sac_memory"]


def test_names_of_calls_say_which_call_is_inside_which() -> None:
    graph = parse_module_info(module_info(timed(captured(Twice)), each_call=True))
    inside = {graph.nodes[i]["fqn"] for i in graph.ad_matrix.descendants(graph.name2node["block#1"]["index"])}
    assert inside == {"block#1.up#1", "block#1.act#1", "block#1.down#1"}


def test_a_module_in_two_places_is_two_modules() -> None:
    info = module_info(timed(captured(Shared)))
    graph = parse_module_info(info)
    assert {"left.inner", "right.inner", "left.inner.up", "right.inner.up"} <= graph.name2node.keys()
    assert len(info["mod_order"]["fw_pre_order"]) == len(graph.nodes)


def test_accumulated_passes_add_their_times_but_not_their_activations() -> None:
    def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        for _ in range(2):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    once, accumulated = (
        by_name(module_info(timed(captured(GPT)))),
        by_name(module_info(timed(captured(GPT, run=twice)))),
    )
    for path, expected in once.items():
        got = accumulated[path]
        assert got["act_fw_per_module"] == expected["act_fw_per_module"], path
        assert got["sac_memory"] == expected["sac_memory"], path
        assert got["fw_runtime_per_module"] == pytest.approx(2 * expected["fw_runtime_per_module"]), path
    assert accumulated[""]["grad_total"] == once[""]["grad_per_module"]


def test_only_modules_with_a_tradeoff_can_be_checkpointed() -> None:
    runtime = timed(captured(GPT))
    without = module_info(runtime, sac={})
    assert all(each["is_leaf"] and each["n_segments"] == 0 for each in without["mod_stats"])
    found = by_name(module_info(runtime))
    layer = found["layers.0"]
    assert not layer["is_leaf"]
    assert layer["n_segments"] == len(layer["slopes"]) == len(layer["intercepts"]) == len(layer["breakpoints"]) - 1
    assert layer["sac_memory"] >= layer["act_fw_per_module"] > 0
    assert layer["sac_runtime"] == pytest.approx(layer["fw_runtime_per_module"])


def test_sizes_are_rounded_as_the_device_does_unless_a_timeline_is_given() -> None:
    step = trace(training_step(Shape(layers=1, hidden=64, heads=2, key_value_heads=1, feed_forward=96, vocabulary=100),
                               length=8), target="h100-sxm")  # fmt: skip
    runtime = Runtime(step, np.ones(len(step.ops)))
    rounded = by_name(module_info(runtime, sac={}))
    exact = by_name(module_info(runtime, timeline=Timeline.of(step), sac={}))
    assert rounded["norm"]["param_per_module"] == 512
    assert exact["norm"]["param_per_module"] == 2 * 64


def test_times_and_timeline_of_different_traces_are_refused() -> None:
    one, other = captured(Twice), captured(Twice)
    with pytest.raises(InputError, match="different traces"):
        module_info(timed(one), timeline=Timeline.of(other))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_module_is_one_call_whose_backward_has_the_recomputation(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.inner = GPT()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=use_reentrant)

    runtime = timed(captured(Checkpointed))
    info = module_info(runtime, each_call=True)
    assert not any("#" in each["fqn"] for each in info["mod_stats"])
    plain, found = by_name(module_info(timed(captured(GPT)))), by_name(info)
    assert found["inner"]["act_fw_per_module"] < plain[""]["act_fw_per_module"]
    assert found["inner"]["bw_runtime_per_module"] > 1.2 * plain[""]["bw_runtime_per_module"]
    in_backward = sum(
        time
        for op, time in zip(runtime.trace.ops, runtime.op_ms.tolist(), strict=True)
        if op.phase is Phase.BACKWARD and op.call != -1
    )
    assert found[""]["bw_runtime_per_module"] == pytest.approx(in_backward)
    assert {"inner", "inner.layers.0", "first"} <= set(info["mod_order"]["bw_pre_order"])
    assert found["inner.layers.0.mlp"]["act_grad_per_module"] > 0


def test_nothing_grows_with_the_square_of_the_layers() -> None:
    """Counted in calls of Python functions, which do not depend on the machine."""
    import cProfile
    import pstats

    def calls(layers: int) -> int:
        shape = Shape(layers=layers, hidden=64, heads=2, key_value_heads=1, feed_forward=96, vocabulary=100)
        step = trace(training_step(shape, length=8), target="cpu")
        runtime = Runtime(step, np.ones(len(step.ops)))
        profile = cProfile.Profile()
        profile.enable()
        parse_module_info(module_info(runtime, sac={})).ad_matrix  # noqa: B018
        profile.disable()
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]

    few, many = calls(4), calls(16)
    assert many < 4.5 * few
