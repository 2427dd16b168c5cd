"""The shipped figures: each has a source and a date, and they agree with one another and the data sheets."""

import datetime
import re
from pathlib import Path

import pytest

import memfit.hardware
from memfit.hardware import list_devices, list_links, load_device
from memfit.hardware.schema import Figure, read_toml

DATA = Path(memfit.hardware.__file__).parent / "data"
DEVICES = {device.name: device for device in list_devices()}
GPUS = [device for device in DEVICES.values() if device.type == "cuda"]
SEEN = {"installed", "stored", "measured", "recalled"}


def items(table):
    """The entries of a table, and those of the tables in its lists."""
    for key, value in table.items():
        rows = value if isinstance(value, list) and all(isinstance(row, dict) for row in value) else [value]
        yield from ((key, row) for row in rows)


def figures(table, path=""):
    for key, value in items(table):
        if isinstance(value, dict) and "value" in value:
            yield f"{path}{key}", value
        elif isinstance(value, dict) and key != "sources":
            yield from figures(value, f"{path}{key}.")


def numbers_outside_figures(table, path=""):
    for key, value in items(table):
        if isinstance(value, dict) and "value" not in value and key != "sources":
            yield from numbers_outside_figures(value, f"{path}{key}.")
        elif isinstance(value, int | float) and key not in ("generation", "lanes"):
            yield f"{path}{key}"


def test_every_device_asked_for_is_shipped():
    wanted = (
        "v100-sxm2-16gb v100-sxm2-32gb t4 a10g l4 l40s a100-pcie-40gb a100-sxm-40gb a100-pcie-80gb "
        "a100-sxm-80gb h100-pcie h100-sxm h100-nvl h200 b200 gb200 rtx-3090 rtx-4090 rtx-5090 mi250x "
        "mi300x cpu"
    )
    assert set(wanted.split()) <= set(DEVICES)


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_figure_has_a_source_with_a_date(path):
    raw = read_toml(path)
    found = list(figures(raw))
    assert found
    assert list(numbers_outside_figures(raw)) == []
    for key, figure in found:
        assert figure["source"] in raw["sources"], key
        assert set(figure) <= set(Figure.__struct_fields__), key
        if figure.get("estimate"):
            assert len(figure["reason"]) > 5, key
    for name, source in raw["sources"].items():
        assert source["title"], name
        assert source["publisher"], name
        assert source["seen"] in SEEN, name
        match = re.fullmatch(r"(20\d\d)(-\d\d){0,2}", source["date"])
        assert match, name
        assert 2017 <= int(match[1]) <= datetime.date.today().year, name
    assert {figure["source"] for _, figure in found} == set(raw["sources"])


@pytest.mark.parametrize("path", sorted((DATA / "devices").glob("*.toml")), ids=lambda path: path.stem)
def test_a_file_is_named_after_its_device(path):
    assert load_device(path.stem).name == path.stem


def test_no_name_or_alias_is_used_twice():
    names = []
    for device in DEVICES.values():
        names += {re.sub("[^a-z0-9]", "", name.lower()) for name in (device.name, *device.aliases)}
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_figures_of_a_gpu_agree_with_one_another(device):
    rates = device.flops_per_s
    assert rates.fp16 >= 1.99 * rates.fp32
    if rates.bf16 is not None:
        assert rates.bf16 == rates.fp16
    if rates.tf32 is not None:
        assert rates.fp32 <= rates.tf32 <= rates.bf16
    if rates.fp8 is not None:
        assert rates.fp8 == pytest.approx(2 * rates.bf16, rel=0.02)
    if rates.int8 is not None:
        assert rates.int8 >= rates.fp16
    assert 13 * 2**30 < device.usable_bytes < device.memory_total_bytes
    assert 250e9 < device.memory_bandwidth_bytes_per_s < 10e12
    assert device.host_link.bandwidth_bytes_per_s < device.memory_bandwidth_bytes_per_s
    assert device.intra_node_link.bandwidth_bytes_per_s >= device.host_link.bandwidth_bytes_per_s
    assert device.inter_node_link.bandwidth_bytes_per_s <= device.intra_node_link.bandwidth_bytes_per_s
    assert device.multiprocessors
    assert device.compute_capability


def test_a_total_is_never_above_the_size_on_the_box():
    for device in GPUS:
        size = re.search(r"(\d+)GB", device.title)
        if size:
            assert 0.95 * int(size[1]) * 1e9 < device.memory_total_bytes <= int(size[1]) * 2**30, device.name


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("h100-sxm", "bf16", 989.4e12),
        ("h100-sxm", "fp32", 66.9e12),
        ("h100-pcie", "bf16", 756e12),
        ("h200", "bf16", 989.4e12),
        ("a100-sxm-80gb", "bf16", 312e12),
        ("a100-sxm-80gb", "tf32", 156e12),
        ("v100-sxm2-16gb", "fp16", 125e12),
        ("l4", "bf16", 121e12),
        ("b200", "bf16", 2250e12),
        ("gb200", "bf16", 2500e12),
        ("rtx-4090", "bf16", 165.2e12),
        ("mi300x", "bf16", 1307.4e12),
    ],
)
def test_rates_are_dense_as_on_the_data_sheet(name, key, value):
    assert getattr(load_device(name).flops_per_s, key) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l4", 300e9),
        ("t4", 320e9),
        ("a100-sxm-40gb", 1555e9),
        ("a100-sxm-80gb", 2039e9),
        ("h100-sxm", 3.35e12),
        ("h200", 4.8e12),
        ("mi300x", 5.3e12),
        ("b200", 7.7e12),
        ("gb200", 8e12),
    ],
)
def test_memory_bandwidth_as_on_the_data_sheet(name, value):
    assert load_device(name).memory_bandwidth_bytes_per_s == pytest.approx(value)


def test_link_bandwidth_is_per_direction():
    links = {link.name: link for link in list_links()}
    assert links["nvlink-3"].bandwidth_bytes_per_s == 600e9 / 2
    assert links["nvlink-4"].bandwidth_bytes_per_s == 900e9 / 2
    assert links["nvlink-5"].bandwidth_bytes_per_s == 1800e9 / 2
    assert links["pcie-5-x16"].bandwidth_bytes_per_s == pytest.approx(32e9 * 16 / 8 * 128 / 130, rel=1e-3)
    assert links["infiniband-ndr"].bandwidth_bytes_per_s == 400e9 / 8


def test_allocator_rules_are_the_constants_of_the_installed_torch():
    import torch

    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this torch ships no headers")
    text = header.read_text()
    rules = load_device("h100-sxm").allocator
    constants = {
        "kMinBlockSize": rules.rounding_bytes,
        "kSmallSize": rules.small_limit_bytes,
        "kSmallBuffer": rules.small_segment_bytes,
        "kMinLargeAlloc": rules.large_limit_bytes,
        "kRoundLarge": rules.large_rounding_bytes,
    }
    for name, value in constants.items():
        assert re.search(rf"constexpr size_t {name} = (\d+);", text)[1] == str(value)
    assert re.search(r"large_segment_size_\{(\d+)\}", text)[1] == str(rules.large_segment_bytes)
    assert "use_expandable_segments_{false}" in text
    assert not rules.expandable_segments


def test_blas_workspace_follows_the_compute_capability():
    for device in GPUS:
        if device.vendor == "NVIDIA":
            large = device.compute_capability[0] in (9, 10, 12)
            assert device.blas_workspace_bytes == (32 * 2**20 if large else 4096 * 1024 * 2 + 16 * 1024 * 8)


def test_the_cpu_is_this_machine_and_counts_exact_bytes():
    import os

    cpu = load_device("cpu")
    assert cpu.type == "cpu"
    assert cpu.memory_total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cpu.usable_bytes == cpu.memory_total_bytes
    assert cpu.allocator.rounding_bytes == 1
    assert not cpu.allocator.caches
    assert cpu.threads is None
