"""Finding devices: names, aliases, nearest names, the user's own files and what is wrong with them."""

import dataclasses
import pickle

import pytest
import torch

from memfit.errors import InputError
from memfit.hardware import list_devices, load_device, load_link


@pytest.fixture(autouse=True)
def only_shipped_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MEMFIT_DEVICES", raising=False)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("H100_SXM", "h100-sxm"),
        (" h100 sxm ", "h100-sxm"),
        ("a100", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI250X/MI250", "mi250x"),
        ("CPU", "cpu"),
    ],
)
def test_names_and_aliases(written, name):
    assert load_device(written).name == name


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(InputError, match=r"unknown device 'h1000'.*h100-sxm"):
        load_device("h1000")
    with pytest.raises(InputError, match="'cpu-calibrated'; `memfit calibrate` measures this machine"):
        load_device("cpu-calibrated")
    with pytest.raises(InputError, match="known are a100"):
        load_device("zzzzzz")
    with pytest.raises(InputError, match="infiniband-ndr"):
        load_link("carrier pigeon")


def test_a_device_is_frozen_hashable_and_pickles():
    device = load_device("h100")
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.name = "other"
    assert pickle.loads(pickle.dumps(device)) == device
    assert hash(device) == hash(load_device("h100-sxm"))


def test_the_rate_of_a_dtype():
    h100, v100 = load_device("h100"), load_device("v100")
    assert h100.peak_flops_per_s(torch.bfloat16) == h100.peak_flops_per_s("bf16") == 989.4e12
    assert h100.peak_flops_per_s(torch.float32) == 66.9e12
    assert h100.peak_flops_per_s(torch.float32, tf32=True) == 494.7e12
    assert h100.peak_flops_per_s(torch.float8_e4m3fn) == 1978.9e12
    assert v100.peak_flops_per_s(torch.bfloat16) == v100.peak_flops_per_s(torch.float32, tf32=True) == 15.7e12


def test_a_file_overrides_single_figures_of_its_base(tmp_path):
    path = write(
        tmp_path / "mine.toml",
        """
        name = "my-h100"
        base = "h100"
        [memory]
        total_bytes = 68_719_476_736
        [flops]
        bf16 = { value = 800e12, source = "bench" }
        [links]
        inter_node = { kind = "ethernet", bandwidth_bytes_per_s = 12.5e9, latency_ms = 0.03 }
        [sources.bench]
        title = "our own benchmark"
        publisher = "us"
        date = "2026-11-01"
        """,
    )
    mine, base = load_device(str(path)), load_device("h100")
    assert mine.memory_total_bytes == 64 * 2**30
    assert mine.flops_per_s.bf16 == 800e12
    assert mine.inter_node_link.latency_ms == 0.03
    assert mine.flops_per_s.fp32 == base.flops_per_s.fp32
    assert mine.memory_bandwidth_bytes_per_s == base.memory_bandwidth_bytes_per_s
    assert mine.peer_link == base.peer_link
    assert mine.aliases == ()
    sources = {p.key: p for p in mine.provenance}
    assert sources["flops.bf16"].source == "our own benchmark"
    assert sources["memory.total_bytes"].publisher == "the user"


def test_user_devices_are_found_by_name_and_come_first(tmp_path, monkeypatch):
    write(tmp_path / "config/memfit/devices/a.toml", "name = 'slow'\nbase = 't4'\naliases = ['snail']")
    folder = tmp_path / "folder"
    write(folder / "h100.toml", "name = 'h100-sxm'\nbase = 'h100-sxm'\n[flops]\nbf16 = 1.0e12")
    single = write(tmp_path / "single.toml", "name = 'slower'\nbase = 'slow'\n[flops]\nfp32 = 1e12")
    monkeypatch.setenv("MEMFIT_DEVICES", f"{folder}:{single}")
    assert load_device("snail").flops_per_s == load_device("t4").flops_per_s
    assert load_device("h100-sxm").flops_per_s.bf16 == 1e12
    assert load_device("slower").flops_per_s.fp32 == 1e12
    names = [device.name for device in list_devices()]
    assert {"slow", "slower", "h100-sxm", "cpu"} <= set(names)
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ("base = 'h100'\nnames = 'x'\nname = 'x'", "names"),
        ("base = 'h100'\nname = 'x'\n[flops]\nbf17 = 1", "bf17.*flops"),
        ("base = 'h100'\nname = 'x'\n[flops]\nbf16 = 'fast'", "flops.bf16"),
        ("base = 'h100'\nname = 'x'\n[flops]\nbf16 = -1", "flops.bf16.*above zero"),
        (
            "base = 'h100'\nname = 'x'\n[memory]\ntotal_bytes = { value = 1.5, source = 'total' }",
            "whole number",
        ),
        (
            "base = 'h100'\nname = 'x'\n[memory]\ntotal_bytes = { value = 5 }",
            "memory.total_bytes has no source",
        ),
        (
            "base = 'h100'\nname = 'x'\n[memory]\ntotal_bytes = { value = 5, source = 'web' }",
            "'web', which is not in",
        ),
        (
            "base = 'h100'\nname = 'x'\n[memory]\ntotal_bytes = { value = 5, estimate = true }",
            "without a reason",
        ),
        ("base = 'h100'\nname = 'x'\n[links]\npeer = 'string'", "links.peer is 'string'"),
        ("base = 'h100'\nname = 'x'\nallocator = 'jemalloc'", "unknown allocator 'jemalloc'"),
        ("base = 'h100'\nname = 'x'\n[compute]\ncapability = 'nine'", "capability"),
        ("base = 'h1000'\nname = 'x'", "base: unknown device 'h1000'"),
        ("base = 3\nname = 'x'", "base is 3"),
        ("name = 'x'\ntitle = 'y'", "missing required field"),
        ("base = 'h100'\nname = 'x'\ntype = 'tpu'", "tpu"),
    ],
)
def test_a_bad_file_is_named_with_the_key_and_what_to_write(tmp_path, text, message):
    path = write(tmp_path / "bad.toml", text)
    with pytest.raises(InputError, match=message) as caught:
        load_device(str(path))
    assert str(path) in str(caught.value)


def test_missing_files_doubles_and_circles_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="cannot read"):
        load_device(str(tmp_path / "none.toml"))
    monkeypatch.setenv("MEMFIT_DEVICES", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="MEMFIT_DEVICES names"):
        load_device("h100")
    folder = tmp_path / "folder"
    write(folder / "a.toml", "name = 'a'\nbase = 'b'")
    write(folder / "b.toml", "name = 'b'\nbase = 'a'")
    write(folder / "c.toml", "name = 'c'\nbase = 't4'")
    write(folder / "d.toml", "name = 'C'\nbase = 't4'")
    write(folder / "e.toml", "base = 't4'\naliases = ['e']\nname = 'e'")
    monkeypatch.setenv("MEMFIT_DEVICES", str(folder))
    with pytest.raises(InputError, match="leads back"):
        load_device("a")
    with pytest.raises(InputError, match="defined twice"):
        load_device("c")
    write(folder / "f.toml", "base = 't4'")
    with pytest.raises(InputError, match=r"f\.toml: name is missing"):
        load_device("e")


def test_names_of_torch_devices_are_understood():
    assert load_device("cpu:0").name == "cpu"
    for name in ("cuda", "cuda:0", "cuda:1", "nvidia gpu"):
        with pytest.raises(InputError, match="is not one device; name it, such as 'h100-sxm'"):
            load_device(name)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100x", "h100-(sxm|pcie|nvl)( or h100-(sxm|pcie|nvl)){2}"),
        ("h100-smx", "h100-sxm( or h100-(pcie|nvl)){2}"),
        ("rtx 4090 ti", "rtx-4090"),
        ("a100-sxm-90gb", "a100-sxm-80gb or a100.*"),
    ],
)
def test_a_known_model_in_another_build_suggests_the_builds_of_that_model(written: str, meant: str):
    with pytest.raises(InputError, match=rf"unknown device '{written}'; did you mean {meant}\? Or give"):
        load_device(written)


def test_names_that_are_alike_by_chance_are_not_suggested():
    with pytest.raises(InputError, match="unknown device 'tpu'; known are"):
        load_device("tpu")
    with pytest.raises(InputError, match="did you mean h100"):
        load_device("nvidia h100")
    with pytest.raises(InputError, match="did you mean cpu"):
        load_device("cpus")
