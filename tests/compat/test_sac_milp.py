"""`sac_milp` beside an enumeration of the prototype's own formulation, and beside the prototype."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import highspy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama import Llama, Shape, next_token_loss
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils._runtime_estimation import get_num_bytes
from torch.utils.flop_counter import flop_registry

from memfit.compat import Graph, ModOrder, ModStats, is_submodule, parse_module_info
from memfit.compat.sac_milp import SACSolution, sac_milp
from memfit.errors import InputError
from memfit.solve.milp import Status
from memfit.units import GiB

LINES = ((0.25, -0.05), (5.0, -4.0))


def module(name: str, *, kept: int = 0, total: int = 0, level: int = 0, ms: float = 0.0, **others: Any) -> ModStats:
    """A module with a trade-off if it has bytes in all (`total`), else a leaf."""
    lines = others.pop("lines", LINES if total else ())
    stats: dict[str, Any] = {
        "fqn": name,
        "param_per_module": 0,
        "grad_per_module": 0,
        "grad_total": 0,
        "act_fw_per_module": kept,
        "act_bw_per_module": 0,
        "act_grad_per_module": 0,
        "act_total": level,
        "input_per_module": 0,
        "output_per_module": 0,
        "fw_runtime_per_module": ms,
        "bw_runtime_per_module": ms,
        "is_leaf": not total,
        "sac_runtime": ms,
        "sac_memory": total,
        "n_segments": len(lines),
        "slopes": [slope for slope, _ in lines],
        "intercepts": [intercept for _, intercept in lines],
        "breakpoints": [],
        "tradeoff_curve": OrderedDict(),
    }
    return ModStats(**{**stats, **others})


def graph_of(modules: Sequence[ModStats]) -> Graph:
    """Modules in forward pre-order; each ends when what lies inside it has ended."""
    names = [each["fqn"] for each in modules]
    post_order: list[str] = []
    running: list[str] = []
    for name in names:
        while running and not is_submodule(name, running[-1]):
            post_order.append(running.pop())
        running.append(name)
    post_order += reversed(running)
    order: ModOrder = {
        "fw_pre_order": names,
        "bw_pre_order": names[::-1],
        "fw_post_order": post_order,
        "bw_post_order": post_order[::-1],
    }
    return parse_module_info({"mod_order": order, "mod_stats": list(modules)})


def layered(layers: int, *, kept: int = 400, total: int = 600) -> Graph:
    """A model of equal layers, each with two units inside; without checkpointing it needs `kept` bytes a layer."""
    modules = [module("", kept=layers * kept, total=layers * total, level=layers * kept, ms=10.0 * layers)]
    for layer in range(layers):
        name, before = f"layers.{layer}", layer * kept
        modules += [
            module(name, kept=kept, total=total, level=before + kept, ms=10.0),
            module(f"{name}.attention", kept=kept // 4, total=kept // 2, level=before + kept // 4, ms=4.0),
            module(f"{name}.attention.query", level=before + kept // 8),
            module(f"{name}.mlp", kept=kept // 2, total=kept // 2, level=before + kept * 3 // 4, ms=5.0),
        ]
    modules.append(module("head", level=layers * kept))
    return graph_of(modules)


# -- the prototype's formulation, written out --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    graph: Graph
    budget_bytes: int
    world_size: int = 1
    ac_units: list[str] | None = None
    fsdp_units: list[str] | None = None

    def solve(self) -> SACSolution:
        return sac_milp(self.graph, self.budget_bytes / GiB, self.world_size, self.ac_units, self.fsdp_units)

    def allowed(self, names: Sequence[str]) -> bool:
        """Whether these may be checkpointed together."""
        nodes = [self.graph.name2node[name] for name in names]
        return (
            not any(node["is_leaf"] for node in nodes)
            and not any(is_submodule(inner, outer) for outer, inner in itertools.permutations(names, 2))
            and not any(is_submodule(inner, outer) for outer in names for inner in self.fsdp_units or ())
            and (not self.ac_units or set(names) <= set(self.ac_units))
        )

    def least_ms(self, names: Sequence[str]) -> float:
        """The least recompute time when exactly these modules are checkpointed, infinite if they cannot be."""
        solver = highspy.Highs()
        solver.silent()
        times, freed = [], {}
        for name in names:
            node = self.graph.name2node[name]
            kept, total = node["act_fw_per_module"], max(node["sac_memory"], node["act_fw_per_module"])
            share = solver.addVariable(lb=(total - kept) / total if total else 0.0, ub=1.0)
            part = solver.addVariable(lb=0.0)
            for slope, intercept in zip(node["slopes"], node["intercepts"], strict=True):
                solver.addConstr(part >= slope * share + intercept)
            times.append(node["sac_runtime"] * part)
            freed[name] = total * share - (total - kept)
        for node in self.graph.nodes:
            before = [freed[name] for name in names if self.place(name) < node["pos_fw_post_order"]]
            there = node["act_total"] + node["act_grad_per_module"]
            fixed = (self.graph.nodes[0]["param_per_module"] + node["grad_total"]) / self.world_size
            if not before:
                if there < 0 or there + fixed > self.budget_bytes:
                    return math.inf
                continue
            solver.addConstr(sum(before) <= there)
            solver.addConstr(sum(before) >= there + fixed - self.budget_bytes)
        if not times:
            return 0.0
        solver.minimize(sum(times))
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return math.inf
        return solver.getObjectiveValue()

    def place(self, name: str) -> int:
        return self.graph.name2node[name]["pos_fw_post_order"]

    def best_ms(self) -> float:
        """The least of all choices."""
        candidates = [node["fqn"] for node in self.graph.nodes if not node["is_leaf"]]
        return min(
            self.least_ms(names)
            for count in range(len(candidates) + 1)
            for names in itertools.combinations(candidates, count)
            if self.allowed(names)
        )

    def recompute_ms(self, decisions: dict[str, float]) -> float:
        """The time of a decision, by the lines of the fit."""
        total = 0.0
        for name, share in decisions.items():
            node = self.graph.name2node[name]
            lines = zip(node["slopes"], node["intercepts"], strict=True)
            total += node["sac_runtime"] * max([0.0, *(slope * share + intercept for slope, intercept in lines)])
        return total

    def peak_bytes(self, decisions: dict[str, float]) -> float:
        """The highest memory of a decision."""
        peak = 0.0
        for node in self.graph.nodes:
            level = node["act_total"] + node["act_grad_per_module"]
            for name, share in decisions.items():
                if self.place(name) < node["pos_fw_post_order"]:
                    unit = self.graph.name2node[name]
                    total = max(unit["sac_memory"], unit["act_fw_per_module"])
                    level -= total * share - (total - unit["act_fw_per_module"])
            peak = max(peak, level + (self.graph.nodes[0]["param_per_module"] + node["grad_total"]) / self.world_size)
        return peak


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A tree of at most nine modules, five of them with a trade-off."""
    names = [""]
    path: list[str] = []
    for number in range(draw(st.integers(2, 8))):
        path = [*path[: draw(st.integers(0, min(len(path), 2)))], str(number)]
        names.append(".".join(path))
    modules: list[ModStats] = []
    for name in names:
        kept = draw(st.integers(0, 50))
        few = sum(not each["is_leaf"] for each in modules) < 5
        total = max(0, kept + draw(st.integers(-5, 60))) if few and draw(st.integers(0, 3)) else 0
        slopes = draw(st.lists(st.sampled_from((0.2, 0.7, 1.0, 3.0, 0.0)), max_size=3, min_size=1)) if total else ()
        modules.append(
            module(
                name,
                kept=kept,
                total=total,
                ms=float(draw(st.integers(0, 20))),
                lines=[(slope, draw(st.sampled_from((0.1, 0.0, -0.3, -2.0)))) for slope in slopes],
                act_grad_per_module=draw(st.integers(0, 20)),
                grad_total=draw(st.integers(0, 20)),
                param_per_module=draw(st.integers(0, 30)),
            )
        )
    graph = graph_of(modules)
    lost = draw(st.sampled_from((0, 0, 0, 40)))
    there = 1
    for name in graph.fw_post_order:
        there += graph.name2node[name]["act_fw_per_module"]
        graph.name2node[name]["act_total"] = max(1, there - draw(st.integers(0, lost)))
    problem = Problem(
        graph=graph,
        budget_bytes=0,
        world_size=draw(st.sampled_from((1, 2, 3))),
        ac_units=draw(st.none() | st.lists(st.sampled_from(names), max_size=6, unique=True)),
        fsdp_units=draw(st.none() | st.lists(st.sampled_from(names), max_size=2, unique=True)),
    )
    part = draw(st.sampled_from((0.1, 0.4, 0.7, 1.0, 0.0, -0.1)))
    return replace(problem, budget_bytes=_between(problem, part))


def _between(problem: Problem, part: float) -> int:
    """A budget between the peak with all outermost modules but the model discarded, and the one with nothing."""
    chosen: dict[str, float] = {}
    for name in problem.graph.name2node:
        if name and problem.allowed([*chosen, name]):
            chosen[name] = 1.0
    low, high = sorted((problem.peak_bytes(chosen), problem.peak_bytes({})))
    return max(0, math.ceil(low + (high - low) * part))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_answer_is_the_best_of_all_choices_and_keeps_every_rule(problem: Problem) -> None:
    before = copy.deepcopy(problem.graph.nodes)
    answer = problem.solve()
    best = problem.best_ms()
    assert problem.graph.nodes == before
    if best == math.inf:
        assert answer == ({}, 0, -1) and answer.status is Status.INFEASIBLE
        return
    decisions, recompute_ms, peak_bytes = answer
    assert answer.status is Status.OPTIMAL and answer.gap == 0.0
    assert recompute_ms == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert recompute_ms == pytest.approx(problem.recompute_ms(decisions), rel=1e-9, abs=1e-9)
    assert problem.allowed(list(decisions))
    assert problem.peak_bytes(decisions) <= problem.budget_bytes + 1e-6
    assert peak_bytes == math.ceil(problem.peak_bytes(decisions) - 1e-3)


# -- the rules, one by one ---------------------------------------------------------------------------------------------


def test_a_budget_above_the_baseline_needs_nothing() -> None:
    assert sac_milp(layered(4), 1600 / GiB) == ({}, 0.0, 1600)


def test_time_falls_and_the_peak_stays_within_the_budget_as_it_grows() -> None:
    graph = layered(6)
    times = []
    for budget in range(700, 2401, 100):
        answer = sac_milp(graph, budget / GiB)
        if answer.peak_mem >= 0:
            times.append(answer.recomputation_time)
            assert answer.peak_mem <= budget
    assert len(times) > 10
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == 0


def test_an_impossible_budget_is_an_answer() -> None:
    answer = sac_milp(layered(2), 10 / GiB)
    decisions, recompute_ms, peak_bytes = answer
    assert (decisions, recompute_ms, peak_bytes) == ({}, 0, -1)
    assert answer.status is Status.INFEASIBLE and answer.gap == math.inf


def test_the_smallest_budget_is_met_to_the_byte() -> None:
    """With whole layers only, the first one cannot be freed before it has ended."""
    kept = 3_000_000_004
    graph, units = layered(16, kept=kept, total=4_100_000_003), [f"layers.{layer}" for layer in range(16)]
    answer = sac_milp(graph, kept / GiB, ac_units=units)
    assert answer.status is Status.OPTIMAL and answer.peak_mem == kept
    assert sac_milp(graph, (kept - 1) / GiB, ac_units=units).status is Status.INFEASIBLE


def test_the_answer_has_three_values_with_names_and_more_about_the_solve() -> None:
    answer = sac_milp(layered(2), 700 / GiB)
    assert len(answer) == 3
    assert answer == (answer.ac_decisions, answer.recomputation_time, answer.peak_mem)
    assert answer.status == "optimal" and answer.gap == 0.0
    assert answer.seconds > 0 and answer.rows > 0 and answer.columns > 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda answer: pickle.loads(pickle.dumps(answer))])
def test_a_copied_answer_keeps_its_status(copied: Any) -> None:
    answer = sac_milp(layered(2), 700 / GiB)
    again = copied(answer)
    assert again == answer and vars(again) == vars(answer)


def test_rows_and_columns_grow_with_the_number_of_modules() -> None:
    few, many = (sac_milp(layered(layers), 300 * layers / GiB) for layers in (8, 32))
    assert few.rows * 3.5 < many.rows < few.rows * 4.5
    assert few.columns * 3.5 < many.columns < few.columns * 4.5


def test_parameters_and_gradients_are_divided_by_the_ranks() -> None:
    graph = graph_of([module("", level=100, param_per_module=400, grad_total=200)])
    assert [sac_milp(graph, 1.0, ranks).peak_mem for ranks in (1, 2, 4)] == [700, 400, 250]


def test_only_ac_units_are_checkpointed() -> None:
    units = ["layers.0.mlp", "layers.2"]
    answer = sac_milp(layered(4), 1200 / GiB, ac_units=units)
    assert set(answer.ac_decisions) == set(units)


def test_an_empty_list_of_units_restricts_nothing() -> None:
    """As in the prototype."""
    graph = layered(4)
    assert sac_milp(graph, 1200 / GiB, ac_units=[], fsdp_units=[]) == sac_milp(graph, 1200 / GiB)


def test_ac_units_do_not_contain_fsdp_units() -> None:
    inside = [f"layers.{layer}.mlp" for layer in range(4)]
    decisions, _, peak_bytes = sac_milp(layered(4), 1000 / GiB, fsdp_units=inside)
    assert peak_bytes >= 0 and {name.count(".") for name in decisions} == {2}


def test_an_fsdp_unit_may_be_checkpointed_itself() -> None:
    layers = [f"layers.{layer}" for layer in range(4)]
    assert set(sac_milp(layered(4), 900 / GiB, ac_units=layers, fsdp_units=layers).ac_decisions) <= set(layers)
    assert sac_milp(layered(4), 900 / GiB, ac_units=layers, fsdp_units=layers).peak_mem > 0


def test_names_that_contain_each_other_as_text_are_not_inside_each_other() -> None:
    """To the prototype `a.b` contains `aa.a.b.c`, because its text does, and may not be checkpointed."""
    modules = [
        module("", level=230),
        module("a.b", kept=100, total=100, level=100, ms=5.0),
        module("aa.a.b", level=200),
        module("aa.a.b.c", kept=100, total=100, level=200, ms=5.0),
        module("head", level=230),
    ]
    answer = sac_milp(graph_of(modules), 110 / GiB, fsdp_units=["aa.a.b.c"])
    assert set(answer.ac_decisions) == {"a.b", "aa.a.b.c"}


def test_a_module_without_backward_does_not_forbid_checkpointing_before_it() -> None:
    """Its levels are all 0 in memfit's graphs; the rule that activations are not negative is not about it."""
    modules = [
        module("", level=200),
        module("block", kept=100, total=100, level=100, ms=5.0),
        module("metric"),
        module("head", level=200),
    ]
    assert sac_milp(graph_of(modules), 120 / GiB).ac_decisions.keys() == {"block"}


def test_results_counted_below_what_autograd_keeps_are_raised_in_the_model_only() -> None:
    modules = [module("", level=200), module("block", kept=100, total=80, level=100, ms=5.0), module("head", level=200)]
    graph = graph_of(modules)
    assert sac_milp(graph, 150 / GiB).ac_decisions["block"] == pytest.approx(0.5)
    assert graph.name2node["block"]["sac_memory"] == 80


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_budget_that_is_no_size_is_refused(budget: float) -> None:
    with pytest.raises(InputError, match="memory_budget is"):
        sac_milp(layered(2), budget)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="world_size is 0"):
        sac_milp(layered(2), 1.0, 0)


@pytest.mark.parametrize("option", ["ac_units", "fsdp_units"])
def test_unknown_modules_are_named_with_what_is_near(option: str) -> None:
    with pytest.raises(InputError, match=rf"{option} has 'layer\.1', .*'layers\.1'"):
        sac_milp(layered(2), 1.0, **{option: ["layers.0", "layer.1"]})
    with pytest.raises(InputError, match=rf"{option} is the text 'layers\.0'"):
        sac_milp(layered(2), 1.0, **{option: "layers.0"})


def test_an_empty_graph_is_refused() -> None:
    with pytest.raises(InputError, match="no modules"):
        sac_milp(Graph(), 1.0)


# -- the prototype -----------------------------------------------------------------------------------------------------

SHAPE = Shape(layers=3, hidden=512, heads=8, key_value_heads=8, feed_forward=2048, vocabulary=1000)
LENGTH = 256
RANKS = 8


class Decoder(Llama):
    """Without its embedding: PyTorch's aggregate_stats fails on modules whose inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__(SHAPE, LENGTH)
        del self.embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        return self.head(self.norm(x))


def slow_machine(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """A roofline slow enough that the prototype's rounding of times to 0.01 ms is small."""
    out = func(*args, **(kwargs or {}))
    tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
    packet = func._overloadpacket
    flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
    return out, max(sum(map(get_num_bytes, tensors)) / 1e6, flops / 1e7)


@pytest.fixture(scope="module")
def their_graph() -> Any:
    """The graph that PyTorch's own trackers, aggregate_stats and parse_module_info make."""
    pytest.importorskip("pwlf", reason="PyTorch's aggregate_stats needs pwlf; install memfit[bench]")
    from torch.distributed._tools import ilp_utils
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model, x = Decoder(), torch.randn(4, LENGTH, SHAPE.hidden, requires_grad=True)
        tokens = torch.randint(0, SHAPE.vocabulary, (4, LENGTH))
        memory, runtime, sac = MemTracker(), RuntimeEstimator()("operator-level-cost-model"), SACEstimator()
        runtime._estimate = sac._estimate_runtime = slow_machine
        memory.track_external(model)
        with memory:
            next_token_loss(model(x), tokens).backward()
        with runtime:
            next_token_loss(model(x), tokens).backward()
        with sac:
            next_token_loss(model(x), tokens)
        info = ilp_utils.aggregate_stats(model, memory, runtime, sac, torch.device("cpu"))
    return ilp_utils.parse_module_info(info)


def test_it_is_never_worse_than_the_prototype_on_the_prototypes_graph(their_graph: Any) -> None:
    pytest.importorskip("pulp", reason="PyTorch's sac_milp needs pulp below 4; install memfit[bench]")
    try:
        from torch.distributed._tools.sac_ilp import sac_milp as theirs
    except ImportError:
        pytest.skip("PyTorch's sac_milp needs pulp below 4, which has PULP_CBC_CMD; install memfit[bench]")

    baseline_bytes = sac_milp(their_graph, math.inf, RANKS).peak_mem
    solved = 0
    for part in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        budget = baseline_bytes * part / GiB
        ours = sac_milp(their_graph, budget, RANKS)
        decisions, their_ms, _ = theirs(copy.deepcopy(their_graph), budget, RANKS)
        if ours.status is Status.INFEASIBLE:
            assert not decisions
            continue
        solved += 1
        assert ours.status is Status.OPTIMAL and ours.peak_mem <= baseline_bytes * part
        assert ours.recomputation_time <= their_ms + 0.01, part
    assert solved >= 4
