"""The tree of modules: names, ancestors, order, and what is refused."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.compat import (
    Graph,
    ModStats,
    ModuleInfo,
    Node,
    display_bytes,
    get_peak_memory_runtime_baseline,
    is_self_or_submodule,
    is_submodule,
    parse_module_info,
)
from memfit.errors import InputError


def stats(fqn: str, **given: int | float) -> ModStats:
    base: ModStats = {
        "fqn": fqn,
        "param_per_module": 0,
        "grad_per_module": 0,
        "grad_total": 0,
        "act_fw_per_module": 0,
        "act_bw_per_module": 0,
        "act_grad_per_module": 0,
        "act_total": 0,
        "input_per_module": 0,
        "output_per_module": 0,
        "fw_runtime_per_module": 0.0,
        "bw_runtime_per_module": 0.0,
        "is_leaf": True,
        "sac_runtime": 0.0,
        "sac_memory": 0,
        "n_segments": 0,
        "slopes": [],
        "intercepts": [],
        "breakpoints": [],
        "tradeoff_curve": OrderedDict(),
    }
    return {**base, **given}  # type: ignore[typeddict-item]


def info(pre: list[str], post: list[str], entries: list[ModStats] | None = None) -> ModuleInfo:
    return {
        "mod_order": {"fw_pre_order": pre, "fw_post_order": post, "bw_pre_order": [], "bw_post_order": []},
        "mod_stats": [stats(name) for name in dict.fromkeys(pre)] if entries is None else entries,
    }


paths = st.lists(st.sampled_from(["a", "aa", "b", "0", "1", "10"]), max_size=4).map(".".join)
trees = st.lists(paths, min_size=1, max_size=12, unique=True)


def inside(descendant: str, ancestor: str) -> bool:
    a, d = (name.split(".") if name else [] for name in (ancestor, descendant))
    return d[: len(a)] == a


@given(trees)
def test_ancestors_are_those_whose_path_is_a_prefix_by_components_whatever_the_order(names: list[str]) -> None:
    graph = parse_module_info(info(names, names[::-1]))
    expected = [[float(inside(below, above)) for below in names] for above in names]
    assert graph.ad_matrix.toarray().tolist() == expected
    assert np.asarray(graph.ad_matrix).tolist() == expected
    for i, above in enumerate(names):
        assert [graph.ad_matrix[i][j] for j in range(len(names))] == expected[i]
        assert [graph.ad_matrix[i, j] for j in range(len(names))] == expected[i]
        assert graph.ad_matrix.descendants(i) == [j for j, b in enumerate(names) if j != i and inside(b, above)]
        assert graph.ad_matrix.ancestors(i) == [j for j, a in enumerate(names) if j != i and inside(above, a)]
        for j, below in enumerate(names):
            assert is_self_or_submodule(below, above) == inside(below, above)
            assert is_submodule(below, above) == (inside(below, above) and i != j)
    assert [root["fqn"] for root in graph.roots] == [
        name for name in names if not any(inside(name, other) for other in names if other != name)
    ]


@given(trees, st.randoms(use_true_random=False))
def test_the_order_of_the_statistics_does_not_matter(names: list[str], shuffle: random.Random) -> None:
    entries = [stats(name, act_total=number) for number, name in enumerate(names)]
    post = names[::-1]
    expected = parse_module_info(info(names, post, entries))
    shuffled = entries[:]
    shuffle.shuffle(shuffled)
    given_info = info(names, post, shuffled)
    graph = parse_module_info(given_info)
    assert graph.nodes == expected.nodes
    assert [node["index"] for node in graph.nodes] == list(range(len(names)))
    assert [node["fqn"] for node in graph.nodes] == names
    assert all(graph.fw_post_order[node["pos_fw_post_order"]] == node["fqn"] for node in graph.nodes)
    assert graph.ad_matrix.toarray().tolist() == expected.ad_matrix.toarray().tolist()
    assert given_info == info(names, post, shuffled)
    assert all("index" not in each for each in entries)


def test_names_are_compared_by_component() -> None:
    assert is_submodule("a.b.c", "a.b")
    assert not is_submodule("aa.b.c", "a.b")
    assert not is_submodule("a.b.c", "b")
    assert not is_submodule("layers.10", "layers.1")
    assert not is_submodule("a", "a")
    assert is_self_or_submodule("a", "a")
    assert is_submodule("a", "") and not is_submodule("", "") and is_self_or_submodule("", "")
    assert not is_submodule("", "a")


def test_a_module_called_twice_stands_at_its_first_begin_and_its_last_end() -> None:
    graph = parse_module_info(info(["", "block", "between", "block"], ["block", "between", "block", ""]))
    assert [node["fqn"] for node in graph.nodes] == ["", "block", "between"]
    assert graph.fw_post_order == ["between", "block", ""]
    assert [node["pos_fw_post_order"] for node in graph.nodes] == [2, 1, 0]


def test_the_baseline_is_the_highest_module_over_all_parameters() -> None:
    entries = [
        stats("", param_per_module=100, act_total=7, fw_runtime_per_module=1.5, bw_runtime_per_module=2.5),
        stats("a", param_per_module=60, grad_total=40, act_grad_per_module=3, act_total=5, bw_runtime_per_module=2.0),
        stats("b", param_per_module=40, act_grad_per_module=9, act_total=6, fw_runtime_per_module=1.0),
    ]
    graph = parse_module_info(info(["", "a", "b"], ["a", "b", ""], entries))
    assert get_peak_memory_runtime_baseline(graph) == (148, 4.0)


def test_a_graph_of_several_models_counts_them_all() -> None:
    entries = [
        stats("generator", param_per_module=100, act_total=7, fw_runtime_per_module=1.0, bw_runtime_per_module=2.0),
        stats("critic", param_per_module=10, act_total=9, fw_runtime_per_module=0.5, bw_runtime_per_module=0.25),
    ]
    graph = parse_module_info(info(["generator", "critic"], ["generator", "critic"], entries))
    assert [root["fqn"] for root in graph.roots] == ["generator", "critic"]
    assert get_peak_memory_runtime_baseline(graph) == (119, 3.75)


def test_a_graph_can_be_built_node_by_node() -> None:
    graph = Graph(2)
    graph.add_node(Node(**stats(""), index=0, pos_fw_post_order=1))
    assert graph.ad_matrix.shape == (1, 1)
    graph.add_node(Node(**stats("a"), index=1, pos_fw_post_order=0))
    assert graph.ad_matrix.toarray().tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert graph.name2node["a"] is graph.nodes[1]
    assert graph.ad_matrix[-1][0] == 0
    with pytest.raises(IndexError):
        graph.ad_matrix[2]
    with pytest.raises(TypeError):
        graph.ad_matrix[0][1] = 0  # type: ignore[index]
    with pytest.raises(InputError, match="'a' already"):
        graph.add_node(Node(**stats("a"), index=2, pos_fw_post_order=2))


@pytest.mark.parametrize(
    ("pre", "post", "names", "message"),
    [
        (["", "a"], ["a", ""], [""], r"fw_pre_order.*'a', which mod_stats has not"),
        (["", "a"], ["a", ""], ["", "a", "b"], r"mod_stats has 'b', which mod_order\['fw_pre_order'\]"),
        (["", "a"], [""], ["", "a"], r"mod_stats has 'a', which mod_order\['fw_post_order'\]"),
        (["", "a"], ["a", ""], ["", "a", "a"], "'a' more than once"),
    ],
)
def test_statistics_that_do_not_fit_their_orders_are_refused(
    pre: list[str], post: list[str], names: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        parse_module_info(info(pre, post, [stats(name) for name in names]))


def test_an_empty_graph_has_no_baseline() -> None:
    with pytest.raises(InputError, match="no modules"):
        get_peak_memory_runtime_baseline(Graph(0))


def test_bytes_are_shown_in_mebibytes_unless_asked_otherwise() -> None:
    assert display_bytes(3 * 2**20) == "3.00 MiB"
    assert display_bytes(3 * 2**20, "GiB") == "0.00 GiB"
    assert display_bytes(5, "bytes") == "5 bytes"
    with pytest.raises(InputError, match="'MB'"):
        display_bytes(5, "MB")
