"""Where PyTorch's prototypes are wrong: one test for each fault, with what memfit answers instead.

If a test here fails in the prototype's half, PyTorch has mended it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools import ilp_utils as theirs

from memfit.capture import Category
from memfit.compat import (
    ModStats,
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    is_submodule,
    module_info,
    parse_module_info,
)
from memfit.memory import Timeline
from tests.compat.graph_models import (
    BYTES,
    GPT,
    SHAPE,
    Frozen,
    ManyWeights,
    Prefixes,
    ReturnsOpaque,
    Shared,
    Twice,
    WithIdentity,
    one_step,
)
from tests.compat.graph_peers import captured, their_info, timed, watched


def by_name(info: Any) -> dict[str, ModStats]:
    return {each["fqn"]: each for each in info["mod_stats"]}


def test_names_are_compared_as_text() -> None:
    assert theirs.is_submodule("Prefixes.aa.a.b.up", "a.b")
    assert not is_submodule("Prefixes.aa.a.b.up", "a.b")
    info = module_info(timed(captured(Prefixes)))
    graph = parse_module_info(info)
    index = {node["fqn"]: node["index"] for node in graph.nodes}
    assert theirs.is_submodule("aa.a.b.up", "a.b")
    assert graph.ad_matrix[index["a.b"]][index["aa.a.b.up"]] == 0
    assert graph.ad_matrix[index["aa.a.b"]][index["aa.a.b.up"]] == 1


def test_statistics_are_sorted_and_then_the_unsorted_ones_are_used() -> None:
    peer = watched(GPT)
    shuffled = their_info(peer)
    shuffled["mod_stats"] = shuffled["mod_stats"][::-1]
    graph = theirs.parse_module_info(shuffled)  # type: ignore[arg-type]
    assert graph.nodes[0]["fqn"] != "GPT" and graph.ad_matrix.sum() == len(graph.nodes)

    info = aggregate_stats(*peer.all)
    info["mod_stats"].reverse()
    nodes = parse_module_info(info).nodes
    assert [node["fqn"] for node in nodes] == info["mod_order"]["fw_pre_order"]


def test_a_module_that_ran_before_the_one_around_it_is_not_seen_as_inside() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.block[1](x))

    peer = watched(Early)
    info = their_info(peer)
    order = info["mod_order"]["fw_pre_order"] = list(dict.fromkeys(info["mod_order"]["fw_pre_order"]))
    info["mod_stats"].sort(key=lambda each: order.index(each["fqn"]))
    assert order == ["Early", "Early.block.1", "Early.block", "Early.block.0"]
    assert theirs.parse_module_info(info).ad_matrix[2].tolist() == [0, 0, 1, 1]  # type: ignore[arg-type]

    graph = parse_module_info(aggregate_stats(*peer.all))
    assert [node["fqn"] for node in graph.nodes] == order
    assert graph.ad_matrix.toarray()[2].tolist() == [0, 1, 1, 1]


def test_a_module_called_twice_breaks_the_parsing_and_mixes_its_calls() -> None:
    peer = watched(Twice)
    info = their_info(peer)
    with pytest.raises(AssertionError):
        theirs.parse_module_info(info)  # type: ignore[arg-type]
    theirs_block = by_name(info)["Twice.block"]
    trace = captured(Twice)
    ours, calls = module_info(timed(trace)), by_name(module_info(timed(trace), each_call=True))
    block, first, second = by_name(ours)["block"], calls["block"], calls["block#1"]
    assert (theirs_block["act_total"], theirs_block["grad_total"]) == (second["act_total"], first["grad_total"])
    assert theirs_block["act_fw_per_module"] == second["act_fw_per_module"]

    assert block["act_fw_per_module"] == first["act_fw_per_module"] + second["act_fw_per_module"]
    levels = ("grad_total", "act_total", "act_grad_per_module", "act_bw_per_module")
    assert {key: block[key] for key in levels} == {key: second[key] for key in levels}  # type: ignore[literal-required]
    for key in ("fw_runtime_per_module", "bw_runtime_per_module"):
        assert block[key] == pytest.approx(first[key] + second[key])
    of_theirs = by_name(aggregate_stats(*peer.all))["Twice.block"]
    for key in ("act_fw_per_module", "grad_total", "act_total", "act_grad_per_module", "input_per_module"):
        assert of_theirs[key] == block[key], key


def test_the_memory_tracker_cannot_watch_frozen_parameters() -> None:
    with pytest.raises(RuntimeError, match="doesn't require gradient"), pytest.warns(UserWarning, match="silenced"):
        watched(Frozen)
    info = by_name(module_info(timed(captured(Frozen))))
    assert info["first"]["grad_per_module"] == 0 < info["first"]["param_per_module"]
    assert info["first"]["bw_runtime_per_module"] == 0.0
    assert info[""]["grad_per_module"] == info["second"]["grad_per_module"] + info["head"]["grad_per_module"]
    assert info["second"]["grad_total"] == info["head"]["grad_per_module"]
    assert info["second"]["bw_runtime_per_module"] > 0.0
    assert "second" in module_info(timed(captured(Frozen)))["mod_order"]["bw_post_order"]


def test_a_module_whose_output_cannot_be_looked_into_has_no_backward() -> None:
    peer = watched(ReturnsOpaque)
    with pytest.raises(KeyError):
        their_info(peer)
    of_theirs, ours = by_name(aggregate_stats(*peer.all)), by_name(module_info(timed(captured(ReturnsOpaque))))
    for key in ("grad_total", "act_grad_per_module", "act_total"):
        assert of_theirs["ReturnsOpaque"][key] == ours[""][key], key
    assert of_theirs["ReturnsOpaque"]["bw_runtime_per_module"] == pytest.approx(ours[""]["bw_runtime_per_module"])


def test_a_module_without_backward_breaks_the_aggregate() -> None:
    peer = watched(WithIdentity)
    with pytest.raises(KeyError):
        their_info(peer)
    of_theirs = by_name(aggregate_stats(*peer.all))["WithIdentity.scale"]
    ours = by_name(module_info(timed(captured(WithIdentity))))["scale"]
    for each in (of_theirs, ours):
        assert (each["grad_total"], each["act_grad_per_module"], each["bw_runtime_per_module"]) == (0, 0, 0.0)
    assert of_theirs["act_total"] == ours["act_total"] > 0


def test_a_module_that_runs_no_op_is_given_the_backward_of_all_that_follows() -> None:
    peer = watched(WithIdentity)
    assert peer.runtime.mod_runtimes["WithIdentity.nothing"]["bw"] > 0.0
    ours = by_name(module_info(timed(captured(WithIdentity))))["nothing"]
    assert (ours["fw_runtime_per_module"], ours["bw_runtime_per_module"]) == (0.0, 0.0)


def test_a_question_about_a_fake_tensor_is_timed_as_an_op() -> None:
    runtime = timed(captured(GPT))
    assert watched(GPT).runtime.total_runtime == pytest.approx(runtime.total_ms)
    assert watched(GPT, timed_questions=True).runtime.total_runtime > 1.5 * runtime.total_ms


def test_gradients_of_a_module_with_several_weights_are_forgotten_at_its_peak() -> None:
    trace = captured(ManyWeights)
    baseline, _ = get_peak_memory_runtime_baseline(parse_module_info(module_info(timed(trace))))
    timeline = Timeline.of(trace)
    backward = next(span for span in timeline.phases if span.phase.value == "backward")
    moments = timeline.during_bytes[backward.begin : backward.end]
    at = timeline.by_category_during(backward.begin + int(moments.argmax()))
    counted = (Category.PARAMETER, Category.GRADIENT, Category.ACTIVATION, Category.TEMPORARY)
    exact = sum(at.get(category, 0) for category in counted)
    peer = get_peak_memory_runtime_baseline(parse_module_info(aggregate_stats(*watched(ManyWeights).all)))[0]
    first_gradient = 4 * 16 * 2048
    assert exact - peer > first_gradient / 2
    assert abs(exact - baseline) <= 2 * BYTES


def test_outputs_that_share_memory_are_subtracted_once_for_each() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(16, 48)
            self.out = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.out(self.mix(x).relu()[..., :16].exp()).relu().chunk(3, dim=-1)

    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split = Split()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.split(x)
            return query * key * value

    of_theirs = their_info(watched(Splits))["mod_stats"]
    found = {each["fqn"]: each for each in of_theirs}["Splits.split"]
    ours = by_name(module_info(timed(captured(Splits))))["split"]
    assert found["output_per_module"] == 3 * ours["output_per_module"]
    assert found["act_fw_per_module"] < ours["act_fw_per_module"] == 3 * BYTES + BYTES


def test_what_only_the_arguments_of_a_call_hold_counts_as_an_activation() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    found = {each["fqn"]: each for each in their_info(watched(build))["mod_stats"]}["Sequential.1"]
    ours = by_name(module_info(timed(captured(build))))["1"]
    assert found["act_total"] == 2 * BYTES + 2 * BYTES
    assert ours["act_total"] == 2 * BYTES


def test_an_input_given_three_times_is_counted_three_times() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    found = {each["fqn"]: each for each in their_info(watched(Mixes))["mod_stats"]}["Mixes.attention"]
    ours = by_name(module_info(timed(captured(Mixes))))["attention"]
    assert found["input_per_module"] == 3 * BYTES
    assert ours["input_per_module"] == BYTES


def test_a_module_in_two_places_has_one_name_for_both() -> None:
    peer = watched(Shared)
    assert "Shared.left.inner" not in peer.runtime.mod_fw_pre_order
    assert peer.runtime.mod_fw_pre_order.count("Shared.right.inner") == 2
    ours = by_name(module_info(timed(captured(Shared))))
    left, right = ours["left.inner"], ours["right.inner"]
    assert left["fw_runtime_per_module"] == right["fw_runtime_per_module"] > 0.0
    assert left["act_total"] < right["act_total"]
    assert left["param_per_module"] == right["param_per_module"] > 0
    assert ours[""]["param_per_module"] < ours["left"]["param_per_module"] + ours["right"]["param_per_module"]


def test_a_loss_that_is_a_module_breaks_the_parsing() -> None:
    loss = nn.MSELoss()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        loss(model(x), torch.zeros(*SHAPE[:-1], 10)).backward()
        optimizer.step()
        optimizer.zero_grad()

    peer = watched(GPT, run=run)
    info = their_info(peer)
    assert "MSELoss" in info["mod_order"]["fw_pre_order"]
    with pytest.raises(AssertionError):
        theirs.parse_module_info(info)  # type: ignore[arg-type]
    of_theirs = parse_module_info(aggregate_stats(*peer.all))
    ours = parse_module_info(module_info(timed(captured(GPT, run=run))))
    assert [node["fqn"].partition(".")[2] for node in of_theirs.nodes] == [node["fqn"] for node in ours.nodes]
    assert len(ours.nodes) == len(parse_module_info(module_info(timed(captured(GPT, run=one_step)))).nodes)
