"""Targets: ranks, nodes, links and budgets."""

import pytest
import torch

from memfit.errors import InputError
from memfit.hardware import Target, load_device, load_link
from memfit.units import GiB


def test_one_rank_is_the_default():
    target = Target.parse("h100")
    assert (target.ranks, target.nodes, target.ranks_per_node) == (1, 1, 8)
    assert target.intra_node_link == load_device("h100").peer_link
    assert target.inter_node_link == load_link("infiniband-ndr")


def test_ranks_fill_nodes():
    assert Target.parse("h100", ranks=8).nodes == 1
    assert Target.parse("h100", ranks=64).nodes == 8
    assert Target.parse("h100", ranks=64, ranks_per_node=4).nodes == 16
    assert Target.parse("gb200", ranks=128).ranks_per_node == 64
    assert Target.parse("h100", ranks=12).nodes == 2
    with pytest.raises(InputError, match="12 ranks do not fill nodes of 8"):
        Target.parse("h100", ranks=12, ranks_per_node=8)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "8"])
def test_bad_ranks_are_refused(ranks):
    with pytest.raises(InputError, match="ranks is"):
        Target.parse("h100", ranks=ranks)


def test_a_target_is_kept_and_what_is_given_wins():
    target = Target.parse("h100", ranks=16, inter_node_link="ethernet-100")
    assert Target.parse(target) == target
    changed = Target.parse(target, ranks=32, intra_node_link=load_link("pcie-5-x16"))
    assert (changed.ranks, changed.inter_node_link) == (32, target.inter_node_link)
    assert changed.intra_node_link.kind == "pcie"
    assert Target.parse(load_device("l4")).intra_node_link.kind == "pcie"
    with pytest.raises(InputError, match="a target cannot be 7"):
        Target.parse(7)


def test_usable_is_total_less_overheads():
    target = Target.parse("h100")
    device = target.device
    assert target.usable_bytes == device.memory_total_bytes - device.context_bytes


def test_budgets():
    target = Target.parse("h100")
    total = target.device.memory_total_bytes
    assert target.budget_bytes("72GiB") == 72 * GiB
    assert target.budget_bytes(10 * GiB) == 10 * GiB
    assert target.budget_bytes(0.5) == target.budget_bytes("50%") == total // 2
    assert target.budget_bytes(None) == target.usable_bytes
    for wrong in ("80GiB", 0, 1.2, "a lot"):
        with pytest.raises(InputError):
            target.budget_bytes(wrong)


def test_a_budget_without_its_unit_is_refused_before_it_is_taken_for_bytes():
    target = Target.parse("h100")
    assert target.budget_bytes(80) == 80
    with pytest.raises(InputError, match="'80' has no unit; write 80GiB"):
        target.budget_bytes("80")
    assert target.budget_bytes("80B") == 80
    assert target.budget_bytes(2048) == 2048


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    link = load_link("infiniband-ndr")
    assert link.transfer_ms(0) == link.latency_ms
    assert link.transfer_ms(50_000_000_000) == pytest.approx(1000 + link.latency_ms)


def test_a_device_of_torch_is_a_target():
    assert Target.parse(torch.device("cpu")) == Target.parse("cpu") == Target.parse(torch.device("cpu", 0))
    with pytest.raises(InputError, match="'cuda' is not one device"):
        Target.parse(torch.device("cuda", 0))
