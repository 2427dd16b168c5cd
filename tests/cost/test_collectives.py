"""The collective model against values worked out by hand, published figures, and properties it must have."""

from __future__ import annotations

from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.cost.collectives import (
    Algorithm,
    Collective,
    CollectiveModel,
    Group,
    collective_figures,
    collective_ms,
    read_collective_figures,
)
from memfit.errors import InputError
from memfit.hardware import Link, Target, list_devices
from memfit.units import GiB, KiB, MiB

INSIDE = Link(name="inside", kind="measured", bandwidth_bytes_per_s=100e9, latency_ms=0.001)
BETWEEN = Link(name="between", kind="measured", bandwidth_bytes_per_s=10e9, latency_ms=0.01)
GB = 10**9
SIZES = st.integers(1, 1 << 40)
KINDS = st.sampled_from(Collective)
TARGETS = st.sampled_from(
    [
        ("h100-sxm", 8),
        ("h100-sxm", 64),
        ("a100-sxm-80gb", 16),
        ("rtx-4090", 8),
        ("mi300x", 4),
        ("cpu", 2),
        ("cpu", 6),
    ]
)


def simple_target(device: str, ranks: int, ranks_per_node: int) -> Target:
    return Target.parse(
        device, ranks=ranks, ranks_per_node=ranks_per_node, intra_node_link=INSIDE, inter_node_link=BETWEEN
    )


def bus_gb_per_s(kind: str, n_bytes: int, target: Target) -> float:
    """nccl-tests' bus bandwidth."""
    factor = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[kind] * (target.ranks - 1) / target.ranks
    return factor * n_bytes / collective_ms(kind, n_bytes, target) / 1e6


NCCL_MS = 0.008 + 0.0084
"""A call, and the base latency of the simple protocol."""

HAND = [
    # One node of eight: 1 GB, 100 GB/s, 1 us to a hop.
    ("h100-sxm", 8, 8, "all_gather", "ring", NCCL_MS + 7 * 0.001 + 8.75),
    ("h100-sxm", 8, 8, "reduce_scatter", "ring", NCCL_MS + 7 * 0.001 + 8.75),
    ("h100-sxm", 8, 8, "all_reduce", "ring", NCCL_MS + 14 * 0.001 + 17.5),
    ("h100-sxm", 8, 8, "all_reduce", "tree", NCCL_MS + 14 * 0.001 * 1.18 + 20 / 0.92),
    ("h100-sxm", 8, 8, "broadcast", "ring", NCCL_MS + 7 * 0.001 + 10),
    ("h100-sxm", 8, 8, "all_to_all", "direct", NCCL_MS + 0.001 + 8.75),
    ("h100-sxm", 8, 8, "send", "direct", NCCL_MS + 0.001 + 10),
    # Two nodes of four: a node has four links of 10 GB/s, 10 us to a hop.
    ("h100-sxm", 8, 4, "all_gather", "ring", NCCL_MS + 6 * 0.001 + 0.01 + 21.875),
    ("h100-sxm", 8, 4, "all_reduce", "ring", NCCL_MS + 12 * 0.001 + 2 * 0.01 + 43.75),
    ("h100-sxm", 8, 4, "all_reduce", "tree", NCCL_MS + 6 * 0.001 * 1.18 + 2 * 0.01 + 50 / 0.92),
    ("h100-sxm", 8, 4, "broadcast", "ring", NCCL_MS + 6 * 0.001 + 0.01 + 25),
    ("h100-sxm", 8, 4, "all_to_all", "direct", NCCL_MS + 0.01 + 50),
    ("h100-sxm", 8, 4, "send", "direct", NCCL_MS + 0.01 + 100),
    # Eight nodes of one: a tree of depth three.
    ("h100-sxm", 8, 1, "all_gather", "ring", NCCL_MS + 7 * 0.01 + 87.5),
    ("h100-sxm", 8, 1, "all_reduce", "tree", NCCL_MS + 6 * 0.01 + 200 / 0.92),
    # RCCL's base latency.
    ("mi300x", 8, 8, "all_gather", "ring", 0.008 + 0.017 + 7 * 0.001 + 8.75),
    # Gloo: a reduce-scatter is an all-reduce, a broadcast is binomial.
    ("cpu", 8, 8, "all_gather", "ring", 0.03 + 7 * 0.001 + 8.75),
    ("cpu", 8, 8, "reduce_scatter", "ring", 0.03 + 14 * 0.001 + 17.5),
    ("cpu", 8, 8, "all_reduce", "ring", 0.03 + 14 * 0.001 + 17.5),
    ("cpu", 8, 8, "broadcast", "tree", 0.03 + 3 * (0.001 + 10)),
    ("cpu", 6, 3, "broadcast", "tree", 0.03 + 2 * (0.001 + 10) + (0.01 + 100)),
]


@pytest.mark.parametrize(("device", "ranks", "ranks_per_node", "kind", "algorithm", "expected_ms"), HAND)
def test_a_large_collective_takes_what_the_formula_says(
    device: str, ranks: int, ranks_per_node: int, kind: str, algorithm: str, expected_ms: float
) -> None:
    target = simple_target(device, ranks, ranks_per_node)
    assert collective_ms(kind, GB, target, algorithm=algorithm) == pytest.approx(expected_ms, rel=1e-9)


def test_a_small_collective_uses_the_protocol_of_low_latency() -> None:
    estimate = CollectiveModel(simple_target("h100-sxm", 8, 8)).estimate("all_gather", 1000)
    assert estimate.protocol == "ll"
    assert estimate.total_ms == pytest.approx(0.008 + 0.0066 + 7 * 0.001 * 0.176 + 875 / (38e9) * 1e3)


def test_a_protocol_without_figures_between_nodes_stays_inside() -> None:
    inside, across = Target.parse("h100-sxm", ranks=8), Target.parse("h100-sxm", ranks=16)
    sizes = [1 << power for power in range(8, 34)]
    assert "ll128" in {CollectiveModel(inside).estimate("all_reduce", n).protocol for n in sizes}
    assert "ll128" not in {CollectiveModel(across).estimate("all_reduce", n).protocol for n in sizes}


@pytest.mark.parametrize(
    ("device", "ranks", "kind", "least", "most"),
    [
        ("h100-sxm", 8, "all_gather", 350, 370),  # nccl-tests issues 212 and 326
        ("h100-sxm", 8, "all_reduce", 350, 480),  # the upper end is with NVLink SHARP
        ("h200", 8, "reduce_scatter", 350, 370),
        ("a100-sxm-80gb", 8, "all_reduce", 225, 235),  # issues 149 and 175
        ("h100-sxm", 16, "all_gather", 320, 390),  # issue 290: 46 to 48 GB/s to an adapter
        ("a100-sxm-80gb", 16, "all_reduce", 170, 200),
    ],
)
def test_large_bus_bandwidth_is_near_what_is_published(
    device: str, ranks: int, kind: str, least: float, most: float
) -> None:
    assert least < bus_gb_per_s(kind, 8 * GiB, Target.parse(device, ranks=ranks)) < most


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_small_collective_inside_a_node_takes_tens_of_microseconds(kind: str) -> None:
    assert 0.010 < collective_ms(kind, KiB, Target.parse("h100-sxm", ranks=8)) < 0.030


@pytest.mark.parametrize("kind", list(Collective))
def test_one_rank_or_no_bytes_takes_no_time(kind: Collective) -> None:
    assert collective_ms(kind, GB, Target.parse("h100-sxm")) == 0
    assert collective_ms(kind, 0, Target.parse("h100-sxm", ranks=8)) == 0
    alone = Group(nodes=1, ranks_per_node=1)
    assert collective_ms(kind, GB, Target.parse("h100-sxm", ranks=8), group=alone) == 0


def test_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather_in_one_call() -> None:
    for ranks_per_node in (8, 4, 1):
        target = simple_target("h100-sxm", 8, ranks_per_node)
        apart = collective_ms("reduce_scatter", GB, target) + collective_ms("all_gather", GB, target)
        assert collective_ms("all_reduce", GB, target, algorithm="ring") == pytest.approx(apart - NCCL_MS)


@given(place=TARGETS, n_bytes=SIZES)
def test_all_reduce_never_takes_longer_than_its_two_halves(place: tuple[str, int], n_bytes: int) -> None:
    model = CollectiveModel(Target.parse(place[0], ranks=place[1]))
    halves = model.collective_ms("reduce_scatter", n_bytes) + model.collective_ms("all_gather", n_bytes)
    assert model.collective_ms("all_reduce", n_bytes) <= halves * (1 + 1e-12)


@given(place=TARGETS, kind=KINDS, n_bytes=SIZES, more=SIZES)
def test_more_bytes_never_take_less_time(place: tuple[str, int], kind: Collective, n_bytes: int, more: int) -> None:
    model = CollectiveModel(Target.parse(place[0], ranks=place[1]))
    assert 0 < model.collective_ms(kind, n_bytes) <= model.collective_ms(kind, n_bytes + more)


@given(place=TARGETS, kind=KINDS, n_bytes=SIZES)
def test_best_is_the_fastest_of_the_algorithms(place: tuple[str, int], kind: Collective, n_bytes: int) -> None:
    model = CollectiveModel(Target.parse(place[0], ranks=place[1]))
    each = [model.collective_ms(kind, n_bytes, algorithm=algorithm) for algorithm in model.algorithms(kind)]
    assert model.collective_ms(kind, n_bytes) == min(each)


@given(kind=KINDS, n_bytes=SIZES, ranks=st.integers(2, 8))
def test_between_nodes_is_slower_than_inside_one(kind: Collective, n_bytes: int, ranks: int) -> None:
    model = CollectiveModel(Target.parse("h100-sxm", ranks=64))
    inside, across = Group(nodes=1, ranks_per_node=ranks), Group(nodes=ranks, ranks_per_node=1)
    assert model.collective_ms(kind, n_bytes, inside) < model.collective_ms(kind, n_bytes, across)


def test_a_tree_is_chosen_for_small_all_reduces_among_many_nodes_and_a_ring_for_large_ones() -> None:
    model = CollectiveModel(Target.parse("h100-sxm", ranks=64))
    assert model.estimate("all_reduce", 64 * KiB).algorithm is Algorithm.TREE
    assert model.estimate("all_reduce", 8 * GiB).algorithm is Algorithm.RING


def test_ranks_of_a_node_share_an_ethernet_port_but_not_infiniband_adapters() -> None:
    shared = CollectiveModel(Target.parse("h100-sxm", ranks=16, inter_node_link="ethernet-10"))
    own = CollectiveModel(Target.parse("h100-sxm", ranks=16, inter_node_link="infiniband-ndr"))
    assert shared.inter_bandwidth_bytes_per_s() == pytest.approx(1.25e9 * 0.9 / 8)
    assert own.inter_bandwidth_bytes_per_s() == pytest.approx(50e9 * 0.94)


def test_fewer_ranks_of_a_mesh_use_fewer_of_its_links() -> None:
    model = CollectiveModel(Target.parse("mi300x", ranks=8))
    pair, node = Group(nodes=1, ranks_per_node=2), Group.of(model.target)
    assert model.intra_bandwidth_bytes_per_s(pair) * 7 == pytest.approx(model.intra_bandwidth_bytes_per_s(node))


@pytest.mark.parametrize(
    ("ranks", "shard_ranks", "shard", "replicate"),
    [
        (64, 8, (1, 8), (8, 1)),
        (64, 4, (1, 4), (8, 2)),
        (64, 16, (2, 8), (4, 1)),
        (64, 64, (8, 8), (1, 1)),
        (64, 1, (1, 1), (8, 8)),
        (8, 2, (1, 2), (1, 4)),
        (4, 2, (1, 2), (1, 2)),
    ],
)
def test_the_groups_of_a_mesh_lie_on_nodes_as_its_ranks_do(
    ranks: int, shard_ranks: int, shard: tuple[int, int], replicate: tuple[int, int]
) -> None:
    target = Target.parse("h100-sxm", ranks=ranks)
    assert Group.shard(target, shard_ranks) == Group(nodes=shard[0], ranks_per_node=shard[1])
    assert Group.replicate(target, shard_ranks) == Group(nodes=replicate[0], ranks_per_node=replicate[1])
    assert Group.shard(target, shard_ranks).ranks * Group.replicate(target, shard_ranks).ranks == ranks


def test_a_group_of_one_rank_on_each_node_has_one_link_of_each() -> None:
    target = simple_target("h100-sxm", 64, 8)
    replicas = Group.replicate(target, 8)
    assert collective_ms("all_gather", GB, target, group=replicas) == pytest.approx(NCCL_MS + 7 * 0.01 + 87.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "gather"}, "'gather'; choose one of all_gather"),
        ({"n_bytes": -1}, "n_bytes is -1"),
        ({"n_bytes": 1.0}, "n_bytes is 1.0"),
        ({"n_bytes": True}, "n_bytes is True"),
        ({"algorithm": "tree"}, "no algorithm 'tree' for all_gather; choose 'best' or 'ring'"),
        ({"algorithm": "bus"}, "'bus'"),
        ({"group": Group(nodes=3, ranks_per_node=8)}, "Group.shard"),
        ({"group": Group(nodes=1, ranks_per_node=9)}, "Group.shard"),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_write(arguments: dict, message: str) -> None:
    target = Target.parse("h100-sxm", ranks=16)
    with pytest.raises(InputError, match=message):
        collective_ms(**{"kind": "all_gather", "n_bytes": MiB, "target": target, **arguments})


def test_groups_that_do_not_fit_the_nodes_are_refused() -> None:
    target = Target.parse("h100-sxm", ranks=48)
    with pytest.raises(InputError, match="divisor of 48"):
        Group.shard(target, 5)
    with pytest.raises(InputError, match="unevenly on nodes of 8"):
        Group.shard(target, 3)
    with pytest.raises(InputError, match="unevenly"):
        Group.replicate(target, 12)
    with pytest.raises(InputError, match="nodes is 0"):
        Group(nodes=0, ranks_per_node=1)


def test_every_device_has_figures_for_every_collective() -> None:
    for device in list_devices():
        target = Target.parse(device, ranks=2 * device.ranks_per_node)
        for kind in Collective:
            assert collective_ms(kind, MiB, target) > 0, (device.name, kind)


DATA = (resources.files("memfit.cost") / "data" / "collectives.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("meshed = true", "mashed = true", "mashed"),
        ('efficiency = { value = 0.75, source = "xgmi" }', "efficiency = 0.75", "links"),
        ('value = 0.75, source = "xgmi"', 'value = 0.75, source = "hearsay"', "hearsay"),
        ('value = 0.75, source = "xgmi"', "value = 0.75, estimate = true", "without a reason"),
        ('value = 0.75, source = "xgmi"', "value = 0.75", "no source"),
        ('value = 0.75, source = "xgmi"', 'value = 1.75, source = "xgmi"', "at most 1"),
        ("[links.other]", "[links.others]", "links.other is missing"),
        ('all_to_all = ["direct"]\n', "", "all_to_all"),
        ("intra_hop = 0.56, intra_bandwidth", "intra_hop = 0.56, inter_hop = 1.0, intra_bandwidth", "both inter_"),
        ("[links.nvlink]", "[links.nvlink", "layout"),
    ],
)
def test_figures_without_source_sense_or_meaning_are_refused(old: str, new: str, message: str) -> None:
    assert old in DATA
    with pytest.raises(InputError, match=message):
        read_collective_figures(DATA.replace(old, new).encode(), "collectives.toml")


def test_an_unknown_link_has_the_figures_of_any_other() -> None:
    figures = collective_figures()
    own = Link(name="ours inter_node", kind="carrier-pigeon", bandwidth_bytes_per_s=1.0, latency_ms=1.0)
    assert figures.link(own) is figures.links["other"]


def test_a_target_may_go_by_its_name():
    by_name, parsed = CollectiveModel("h100-sxm"), CollectiveModel(Target.parse("h100-sxm"))
    assert by_name == parsed and by_name.target.device.name == "h100-sxm"
    assert Group.of("h100-sxm") == Group.of(Target.parse("h100-sxm"))
    with pytest.raises(InputError, match="did you mean h100-sxm"):
        CollectiveModel("h100-smx")
    with pytest.raises(InputError, match="a target cannot be 8"):
        CollectiveModel(8)
