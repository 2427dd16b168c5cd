"""`aggregate_stats` from PyTorch's trackers and memfit's, in any mixture."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from memfit.capture import Trace
from memfit.compat import MemTracker, RuntimeEstimator, SACEstimator, aggregate_stats, module_info, parse_module_info
from memfit.errors import InputError
from tests.compat.graph_models import GPT, MLP, Shared, Twice
from tests.compat.graph_peers import CPU, Peer, captured, timed, watched

GRADIENT_OF_LOSS = 4


def ours(step: Trace) -> tuple[Any, Any, Any]:
    runtime = timed(step)
    return MemTracker.of(step), RuntimeEstimator.of(runtime), SACEstimator.of(step, runtime.op_ms)


@pytest.fixture(scope="module")
def gpt() -> tuple[Peer, Trace]:
    return watched(GPT), captured(GPT)


@pytest.mark.parametrize("mixture", list(product((False, True), repeat=3)))
def test_any_mixture_of_trackers_agrees(gpt: tuple[Peer, Trace], mixture: tuple[bool, bool, bool]) -> None:
    peer, step = gpt
    theirs = (peer.memory, peer.runtime, peer.sac)
    memory, runtime, sac = (b if use else a for use, a, b in zip(mixture, theirs, ours(step), strict=True))
    info = aggregate_stats(peer.model, memory, runtime, sac, CPU)
    expected = {each["fqn"]: each for each in module_info(timed(step))["mod_stats"]}
    names = [each["fqn"] for each in info["mod_stats"]]
    assert names == (list(expected) if mixture[1] else [f"GPT.{path}".rstrip(".") for path in expected])
    for each in info["mod_stats"]:
        want = expected[each["fqn"] if mixture[1] else each["fqn"].partition(".")[2]]
        for key in ("param_per_module", "grad_per_module", "grad_total", "act_fw_per_module", "act_total"):
            assert each[key] == want[key], (each["fqn"], key)
        assert want["act_bw_per_module"] == each["act_bw_per_module"] - (0 if mixture[0] else GRADIENT_OF_LOSS)
        assert each["fw_runtime_per_module"] == pytest.approx(want["fw_runtime_per_module"])
    layer = next(each for each in info["mod_stats"] if each["fqn"].endswith("layers.0"))
    assert not layer["is_leaf"] and layer["n_segments"] >= 1
    assert len(parse_module_info(info).nodes) == len(expected)


def test_memfits_own_trackers_give_what_the_trace_gives(gpt: tuple[Peer, Trace]) -> None:
    peer, step = gpt
    assert aggregate_stats(peer.model, *ours(step), CPU) == module_info(timed(step))


def test_a_module_called_twice_is_summed_in_both_forms() -> None:
    step = captured(Twice)
    assert aggregate_stats(Twice(), *ours(step), CPU) == module_info(timed(step))


def test_a_module_with_two_names_is_found_under_either() -> None:
    peer, step = watched(Shared), captured(Shared)
    memory, runtime, _ = ours(step)
    mixed = aggregate_stats(peer.model, peer.memory, runtime, peer.sac, CPU)
    assert [each["fqn"] for each in mixed["mod_stats"]] == [
        each["fqn"] for each in module_info(timed(step))["mod_stats"]
    ]
    named_by_theirs = aggregate_stats(peer.model, memory, peer.runtime, peer.sac, CPU)
    assert {each["fqn"] for each in named_by_theirs["mod_stats"]} == set(peer.runtime.mod_fw_pre_order)


def test_their_models_called_in_parts_keep_their_names() -> None:
    def run(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model.head(model.layers[0](x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    peer = watched(GPT, run=run)
    info = aggregate_stats(*peer.all)
    assert {"Layer", "Layer.mlp", "Linear"} <= {each["fqn"] for each in info["mod_stats"]}
    assert [root["fqn"] for root in parse_module_info(info).roots] == ["Layer", "Linear"]


def test_what_does_not_belong_together_is_refused(gpt: tuple[Peer, Trace]) -> None:
    peer, step = gpt
    other = watched(MLP)
    memory, runtime, sac = ours(step)
    with pytest.raises(InputError, match="runtime estimator has seen no module of this GPT"):
        aggregate_stats(peer.model, peer.memory, other.runtime, peer.sac, CPU)
    with pytest.raises(InputError, match="memory tracker has seen no module of this MLP"):
        aggregate_stats(other.model, peer.memory, other.runtime, other.sac, CPU)
    with pytest.raises(InputError, match="nothing on cuda"):
        aggregate_stats(peer.model, peer.memory, peer.runtime, peer.sac, torch.device("cuda"))
    with pytest.raises(InputError, match="captured for cpu"):
        aggregate_stats(peer.model, memory, runtime, sac, torch.device("cuda", 0))
    partial = RuntimeEstimator.of(timed(captured(MLP)))
    partial.mod_fw_pre_order = ["", "layers.7"]
    with pytest.raises(InputError, match="has not seen"):
        aggregate_stats(_with_more_layers(), MemTracker.of(captured(MLP)), partial, sac, CPU)


def _with_more_layers() -> GPT:
    model = GPT()
    model.layers.extend(GPT().layers[0] for _ in range(6))
    return model
