"""Calibration: factors are recovered from times, and the device file that is written can be loaded."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.capture import trace
from memfit.cli import main
from memfit.cost import CollectiveModel, Roofline, calibrate, calibration, fit_link
from memfit.cost.calibration import Sample, fit_family
from memfit.cost.disk import measure_disk
from memfit.cost.host import Size, image_step, language_step, reference_steps
from memfit.cost.rank_calibration import take_turns
from memfit.cost.roofline import Float32Precision, dtype_of, kernel_ms
from memfit.errors import InputError
from memfit.hardware import CollectiveRate, Family, FamilyEfficiency, Link, Target, load_device

START = FamilyEfficiency(family=Family.NORM, compute=0.5, bandwidth=0.5, overhead_ms=0.01)


@settings(max_examples=40, deadline=None)
@given(
    compute=st.floats(0.05, 1.0), bandwidth=st.floats(0.05, 2.0), overhead_ms=st.floats(0.001, 0.05), seed=st.integers()
)
def test_factors_are_recovered_from_their_own_roofline(
    compute: float, bandwidth: float, overhead_ms: float, seed: int
) -> None:
    random = np.random.default_rng(abs(seed))
    samples = []
    for _ in range(60):
        flops_ms, bytes_ms = np.exp(random.uniform(-8, 3, 2)).tolist()
        measured = max(flops_ms / compute, bytes_ms / bandwidth) + overhead_ms
        samples.append(Sample(measured_ms=measured, compute_ms=flops_ms, memory_ms=bytes_ms))
    fitted = fit_family(samples, START)
    predicted = [
        max(s.compute_ms / fitted.compute, s.memory_ms / fitted.bandwidth) + fitted.overhead_ms for s in samples
    ]
    errors = [abs(p / s.measured_ms - 1) for p, s in zip(predicted, samples, strict=True)]
    assert np.median(errors) < 0.05


def test_a_family_without_samples_keeps_its_figures() -> None:
    assert fit_family([], START) == START


def test_a_gpus_own_roofline_comes_back_from_its_times() -> None:
    """Times made by a roofline, fitted from other factors, predict those times again."""
    base = load_device("a100-sxm-80gb")
    measured = []
    for step in (language_step(Size(batch=4, length=256, width=512), plain=True), image_step(64, 32)):
        captured = trace(step, target=base)
        times = Roofline(precision=Float32Precision()).kernel_ms(captured.ops, base).tolist()
        measured += [(op, ms) for op, ms in zip(captured.ops, times, strict=True) if not op.view]
    blank = tuple(
        dataclasses.replace(each, compute=0.5, bandwidth=0.5, overhead_ms=0.01) for each in base.efficiency.families
    )
    other = dataclasses.replace(base, efficiency=dataclasses.replace(base.efficiency, families=blank))
    found = calibration.fitted(measured, other)
    again = dataclasses.replace(base, efficiency=dataclasses.replace(base.efficiency, families=found))
    ratios = [kernel_ms(op, again, Float32Precision()) / ms for op, ms in measured if ms]
    assert 0.9 < np.median(ratios) < 1.1
    assert min(ratios) > 0.5 and max(ratios) < 2


def test_indexing_of_16_bit_numbers_is_fitted_by_itself() -> None:
    steps = [step for label, step in reference_steps() if "experts in bfloat16" in label]
    captured = [op for step in steps for op in trace(step, target="cpu").ops if not op.view]
    device = load_device("cpu")
    slow = [(op, 7.0 if dtype_of(op) == "bfloat16" else 1.0) for op in captured]
    found = {each.family: each for each in calibration.fitted_half(slow, device)}
    assert found[Family.INDEXING].overhead_ms == pytest.approx(7.0, rel=0.2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration on two small steps instead of all reference steps."""
    size = Size(batch=1, length=16, width=32)
    steps = [("text", language_step(size, plain=True)), ("images", image_step(8, 8))]
    monkeypatch.setattr(calibration, "reference_steps", lambda: iter(steps))
    monkeypatch.setattr(calibration, "_COPY_BYTES", 1 << 20)


def test_the_written_device_can_be_loaded_and_predicts_with_what_was_measured(small: None, tmp_path: Path) -> None:
    found = calibrate("cpu", name="my-machine", folder=tmp_path / "cache", progress=False)
    path = found.save(tmp_path / "devices" / "my-machine.toml")
    device = load_device(str(path))
    assert device.name == "my-machine" and device.type == "cpu"
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(found.memory_bandwidth_bytes_per_s, rel=1e-4)
    assert device.sustained.long_run == pytest.approx(found.long_run, rel=1e-4)
    assert found.disk is not None and device.offload_link is not None
    assert device.offload_link.to_host_bytes_per_s == pytest.approx(found.disk.to_host_bytes_per_s, rel=1e-4)
    assert device.offload_link.to_device_bytes_per_s == pytest.approx(found.disk.to_device_bytes_per_s, rel=1e-4)
    for mine, theirs in zip(device.efficiency.families, found.efficiency.families, strict=True):
        assert dataclasses.astuple(mine)[1:] == pytest.approx(dataclasses.astuple(theirs)[1:], rel=1e-4)
    captured = trace(language_step(Size(batch=1, length=16, width=32), plain=True), target=device)
    assert captured.device == "my-machine"
    assert (Roofline().op_ms(captured) > 0).all()


def test_the_command_writes_a_device_that_is_found_by_name(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    assert main(["calibrate", "--name", "mine"]) == 0
    assert "target='mine'" in capsys.readouterr().out
    assert load_device("mine").type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_ops_of_a_cpus_step_take_longer_than_by_themselves_by_what_was_measured() -> None:
    base = load_device("cpu")
    slower = dataclasses.replace(base, sustained=dataclasses.replace(base.sustained, long_run=0.5))
    captured = trace(language_step(Size(batch=4, length=128, width=256), plain=True), target=base)
    usual, longer = (Roofline(device=device).kernel_ms(captured.ops, device) for device in (base, slower))
    assert 1.5 * usual.sum() < longer.sum() < 2 * usual.sum()


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no GPU here for 'h100-sxm'"):
        calibrate("h100-sxm")
    assert main(["calibrate", "--device", "h100-sxm"]) == 1
    assert "no GPU here" in capsys.readouterr().err


def test_a_link_is_recovered_from_its_own_times_and_its_file_is_loaded(tmp_path: Path) -> None:
    rows = [(hops, share * n_bytes) for hops, share in ((1, 0.5), (2, 1.0)) for n_bytes in (1 << 14, 1 << 20, 1 << 24)]
    latency_ms, ms_per_byte = fit_link(rows, [0.2 * hops + 1e-6 * n_bytes for hops, n_bytes in rows])
    assert latency_ms == pytest.approx(0.2) and ms_per_byte == pytest.approx(1e-6)
    cpu = load_device("cpu")
    slow = CollectiveRate(kind="reduce_scatter", bandwidth_bytes_per_s=0.25e9, latency_ms=0.4)
    link = Link(
        name="measured",
        kind="gloo",
        bandwidth_bytes_per_s=1e3 / ms_per_byte,
        latency_ms=latency_ms,
        collectives=(slow,),
    )
    found = calibration.Calibration(
        name="four-ranks",
        base="cpu",
        machine="a machine",
        date="2026-11-17",
        flops_per_s={"fp32": 1e9},
        memory_bandwidth_bytes_per_s=1e9,
        efficiency=cpu.efficiency,
        samples=1,
        link=link,
        ranks=4,
    )
    device = load_device(str(found.save(tmp_path / "four-ranks.toml")))
    assert device.ranks_per_node == 4 and device.peer_link is not None and device.host_link == cpu.host_link
    assert device.peer_link.bandwidth_bytes_per_s == pytest.approx(1e9) and device.peer_link.latency_ms == 0.2
    assert device.peer_link.of_collective("reduce_scatter").latency_ms == 0.4
    target = Target.parse(device, ranks=4)
    all_reduce, reduce_scatter = (
        CollectiveModel(target).estimate(kind, 1 << 20) for kind in ("all_reduce", "reduce_scatter")
    )
    assert reduce_scatter.latency_ms == pytest.approx(2 * all_reduce.latency_ms), "Gloo runs both as an all-reduce"
    assert reduce_scatter.transfer_ms == pytest.approx(4 * all_reduce.transfer_ms)


def test_ranks_that_share_a_core_take_as_many_times_longer() -> None:
    cpu = load_device("cpu")
    shared = dataclasses.replace(cpu, efficiency=take_turns(cpu.efficiency, 2.0))
    captured = trace(language_step(Size(batch=2, length=32, width=64), plain=True), target=cpu)
    alone, turns = (Roofline(device=device).op_ms(captured).sum() for device in (cpu, shared))
    assert turns == pytest.approx(2 * alone, rel=1e-3)


def test_a_disk_that_cannot_be_written_to_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure_disk(tmp_path / "missing")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            measure_disk(tmp_path, n_bytes=1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = measure_disk(tmp_path, n_bytes=1 << 16)
    assert found.to_host_bytes_per_s > 0 and found.to_device_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_ops_on_16_bit_numbers_are_measured_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    size = Size(batch=1, length=16, width=32)
    steps = [("text", language_step(size, plain=True)), ("bf16", language_step(size, plain=True, dtype=torch.bfloat16))]
    monkeypatch.setattr(calibration, "reference_steps", lambda: iter(steps))
    monkeypatch.setattr(calibration, "_TELLING_MS", 0.0)
    found = calibrate("cpu", name="my-machine", folder=tmp_path / "cache", progress=False)
    assert {each.family for each in found.efficiency.half} >= {Family.ELEMENTWISE, Family.MATRIX_SMALL, Family.COPY}
    device = load_device(str(found.save(tmp_path / "my-machine.toml")))
    for mine, theirs in zip(device.efficiency.half, found.efficiency.half, strict=True):
        assert mine.family is theirs.family
        assert dataclasses.astuple(mine)[1:] == pytest.approx(dataclasses.astuple(theirs)[1:], rel=1e-4)
    assert device.sustained.kept_by(2) == pytest.approx(found.long_run_half, rel=1e-4)
    assert device.sustained.kept_by(4) == pytest.approx(found.long_run, rel=1e-4)


def test_figures_of_16_bit_numbers_change_the_time_of_ops_on_them_alone(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        'name = "slow"\nbase = "cpu"\n[sustained]\nlong_run_half = 0.5\n[efficiency.half.elementwise]\n'
        "compute = 1.0\nbandwidth = 1e-3\noverhead_ms = 1.0\n"
    )
    usual, slow = load_device("cpu"), load_device(str(tmp_path / "slow.toml"))
    size = Size(batch=2, length=32, width=64)
    for dtype, ops_change in ((torch.float32, False), (torch.bfloat16, True)):
        captured = trace(language_step(size, plain=True, dtype=dtype), target=usual)
        before, after = (Roofline(device=device).kernel_ms(captured.ops, device) for device in (usual, slow))
        names = {op.name for op, one, two in zip(captured.ops, before, after, strict=True) if two > one}
        assert ("aten.mul.Tensor" in names) is ops_change and ("aten.mm.default" in names) is ops_change
        assert ("aten._log_softmax.default" in names) is False, "the loss is in float32"


def test_a_calibration_from_before_these_figures_predicts_as_it_did(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(
        'name = "old"\nbase = "cpu"\n[sustained]\nlong_run = 0.9\n[links.peer]\nkind = "gloo"\n'
        "bandwidth_bytes_per_s = 1e9\nlatency_ms = 0.2\n"
    )
    old = load_device(str(tmp_path / "old.toml"))
    assert old.engines == () and old.engine("fsdp2") is None and old.efficiency.half == ()
    assert old.sustained.kept_by(2) == old.sustained.kept_by(4) == 0.9
    for family in Family:
        assert old.efficiency.of(family, 2) == old.efficiency[family]
