"""Targets: ranks, nodes, links and budgets."""

import pytest
import torch

from memfit.errors import InputError
from memfit.hardware import Target, load_device, load_link
from memfit.units import GiB, MiB


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
    assert target.available_bytes == device.memory_total_bytes - device.context_bytes
    assert target.usable_bytes == int(target.available_bytes / 1.03)


def test_several_ranks_have_less_for_nccl():
    one, two, eight, many = (Target.parse("h100", ranks=ranks).rank_memory for ranks in (1, 2, 8, 64))
    assert one.nccl.high_bytes == 0 < two.nccl.low_bytes < eight.nccl.low_bytes == many.nccl.low_bytes
    assert 0.5 * GiB < two.nccl.low_bytes < eight.nccl.high_bytes == int(1.6 * GiB)
    assert eight.available_bytes == one.available_bytes - eight.nccl.expected_bytes
    assert eight.most_bytes - eight.available_bytes > one.most_bytes - one.available_bytes
    assert Target.parse("cpu", ranks=8).rank_memory.nccl.high_bytes == 0


def test_context_nccl_margin_and_segments_can_be_set():
    usual = Target.parse("h100", ranks=8)
    given = Target.parse(usual, context="900MiB", nccl="1GiB", margin="2%", expandable_segments=True)
    memory = given.rank_memory
    assert (memory.context.low_bytes, memory.context.high_bytes) == (900 * MiB, 900 * MiB)
    assert memory.available_bytes == usual.device.memory_total_bytes - 900 * MiB - GiB == memory.most_bytes
    assert memory.usable_bytes == int(memory.available_bytes / 1.02)
    assert given.device.allocator.expandable_segments and not usual.device.allocator.expandable_segments
    assert Target.parse(given, ranks=4).rank_memory == memory, "what was given stays"
    assert Target.parse(usual, margin=0).usable_bytes == usual.available_bytes
    for wrong in ({"context": "200GiB"}, {"context": "lots"}, {"margin": 1.5}, {"margin": "some"}, {"nccl": "100%"}):
        with pytest.raises(InputError):
            Target.parse(usual, **wrong)


def test_a_budget_of_ones_own_may_use_the_margin():
    target = Target.parse("h100", ranks=8)
    assert target.allowed_bytes() == target.usable_bytes
    assert target.allowed_bytes("79GiB") == target.available_bytes > target.usable_bytes
    assert target.allowed_bytes("70GiB") == 70 * GiB


def test_a_device_file_may_know_its_context(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\nbase = "h100-sxm"\n[overheads]\ncontext_bytes = 200_000_000\n')
    context = Target.parse(str(path)).rank_memory.context
    assert (context.low_bytes, context.high_bytes) == (200_000_000, 200_000_000)


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
    assert link.copy_ms(0) == link.latency_ms
    assert link.copy_ms(50_000_000_000) == pytest.approx(1000 + link.latency_ms)


def test_a_device_of_torch_is_a_target():
    assert Target.parse(torch.device("cpu")) == Target.parse("cpu") == Target.parse(torch.device("cpu", 0))
    with pytest.raises(InputError, match="'cuda' is not one device"):
        Target.parse(torch.device("cuda", 0))


def test_copies_to_the_host_take_what_was_measured_over_the_link_and_not_what_its_sheet_says():
    link = load_link("pcie-5-x16")
    assert 0.8 * link.bandwidth_bytes_per_s < link.copy_bytes_per_s < 0.9 * link.bandwidth_bytes_per_s
    offload = load_device("h100-sxm").offload_link
    assert offload is not None and offload.to_host_bytes_per_s == link.copy_bytes_per_s
    assert load_link("nvlink-4").copy_bytes_per_s == load_link("nvlink-4").bandwidth_bytes_per_s
