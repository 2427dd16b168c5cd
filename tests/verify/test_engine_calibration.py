"""Figures of engines that shard: recovered from samples, written, read back, and used in predicted times."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import memfit
from memfit.analysis import Report
from memfit.cost import Calibration, Roofline, Runtime, Size, language_step
from memfit.errors import InputError
from memfit.hardware import Device, EngineTimes, Link, OffloadLink, Target, load_device
from memfit.plans import Inputs, build_policy
from memfit.sharding import ShardEngine, ShardOptions
from memfit.solve import Problem, SolveOptions
from memfit.verify import calibrate_engines
from memfit.verify.engine_calibration import ShardedSample, ShardedTime, fit_engine

SIZE = Size(batch=2, length=32, width=64)
MEASURED = EngineTimes(
    engine="fsdp2", slowdown=1.5, collective_ms=0.25, waiting=0.1, second_run_ms=0.02, offload_s_per_byte=2e-9
)


def calibration(*engines: EngineTimes) -> Calibration:
    """A made-up one of two ranks."""
    cpu = load_device("cpu")
    return Calibration(
        name="two-ranks",
        base="cpu",
        machine="a machine",
        date="2026-11-18",
        flops_per_s={"fp32": 1e10, "bf16": 1e10},
        memory_bandwidth_bytes_per_s=1e10,
        efficiency=cpu.efficiency,
        samples=1,
        link=Link(name="measured", kind="gloo", bandwidth_bytes_per_s=1e9, latency_ms=0.2),
        ranks=2,
        long_run=0.9,
        engines=engines,
    )


def problem_on(device: Device, engine: ShardEngine = "fsdp2") -> Problem:
    captured = memfit.trace(language_step(SIZE, plain=True), target=device)
    options = SolveOptions(shard=ShardOptions(engine=engine))
    return Problem.of(Runtime.of(captured, Roofline()), Target.parse(device, ranks=2), options)


def sample(communication_ms: float, collectives: int, local_ms: float, ops: int) -> ShardedSample:
    """What the engine of `MEASURED` would take."""

    def adds(communication_ms: float, collectives: int) -> float:
        moved_ms = MEASURED.slowdown * communication_ms + MEASURED.collective_ms * collectives
        return moved_ms + MEASURED.waiting * local_ms

    added, fewer = adds(communication_ms, collectives), collectives - collectives // 3
    kept_ms = local_ms + adds(0.6 * communication_ms, fewer)
    return ShardedSample(
        local_ms=local_ms,
        sharded_ms=local_ms + added,
        planned_ms=local_ms + added + 3.0 + MEASURED.second_run_ms * ops,
        collectives=collectives,
        communication_ms=communication_ms,
        recompute_ops_ms=3.0,
        second_run_ops=ops,
        kept=ShardedTime(ms=kept_ms, collectives=fewer, communication_ms=0.6 * communication_ms),
        offloading_ms=local_ms + added + 5.0 + 1e3 * MEASURED.offload_s_per_byte * 10_000_000,
        offload_waits_ms=5.0,
        offloaded_bytes=10_000_000,
    )


def test_an_engines_figures_are_recovered_from_what_its_steps_took() -> None:
    samples = [sample(2, 27, 10, 400), sample(60, 9, 50, 100), sample(20, 12, 200, 150), sample(5, 15, 190, 200)]
    found = fit_engine("fsdp2", samples)
    assert dataclasses.astuple(found)[1:] == pytest.approx(dataclasses.astuple(MEASURED)[1:])


def test_no_figure_is_negative_where_sharded_steps_took_less_than_others() -> None:
    samples = [dataclasses.replace(sample(20, 12, 200, 150), sharded_ms=150.0, planned_ms=140.0)] * 3
    found = fit_engine("fsdp2", samples)
    assert found.offload_s_per_byte >= 0
    assert min(dataclasses.astuple(dataclasses.replace(found, offload_s_per_byte=1.0))[1:]) > 0


def test_a_sharded_step_takes_what_was_measured_of_its_engine(tmp_path: Path) -> None:
    plain = load_device(str(calibration().save(tmp_path / "plain.toml")))
    device = load_device(str(calibration(MEASURED).save(tmp_path / "two-ranks.toml")))
    assert plain.engines == () and device.engines == (MEASURED,)
    before, after = problem_on(plain).sharding, problem_on(device).sharding
    assert before is not None and after is not None and after.runtime.total_ms == before.runtime.total_ms
    expected = 1.5 * before.exposed_ms + 0.25 * len(before.transfers) + 0.1 * before.runtime.total_ms
    assert after.exposed_ms == pytest.approx(expected)
    assert after.communication_ms == before.communication_ms
    other = problem_on(device, "sharded").sharding
    unmeasured = problem_on(plain, "sharded").sharding
    assert other is not None and unmeasured is not None and other.exposed_ms == unmeasured.exposed_ms


def test_recomputes_take_what_was_measured_under_their_engine(tmp_path: Path) -> None:
    device = load_device(str(calibration(MEASURED).save(tmp_path / "two-ranks.toml")))
    problem, other = problem_on(device), problem_on(device, "sharded")
    assert problem.second_run_ms == 0.02 and other.second_run_ms == device.efficiency.host.second_run_ms
    first, second = problem.candidates[0], other.candidates[0]
    gained = 0.02 - other.second_run_ms
    for one, two in zip(first.policies, second.policies, strict=True):
        ops = first.unit.end - first.unit.begin if one.stop >= 0 else 0
        assert one.recompute_ms - two.recompute_ms == pytest.approx(ops * gained)
        assert problem.recompute_ms(first.unit, one) == pytest.approx(one.recompute_ms)


def test_a_plan_is_timed_again_by_a_later_calibration_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link between ranks is in the device's own file, and is found by the name that the plan has of it."""
    monkeypatch.setenv("MEMFIT_DEVICES", str(tmp_path))
    calibration().save(tmp_path / "two-ranks.toml")
    step = language_step(SIZE, plain=True)
    options = SolveOptions(shard=ShardOptions(engine="fsdp2"))
    tight = memfit.plan(step, target="two-ranks", ranks=2, budget="1KiB", options=options, progress=False)
    assert tight.minimum_budget_bytes is not None
    plan = memfit.plan(
        step, target="two-ranks", ranks=2, budget=tight.minimum_budget_bytes, options=options, progress=False
    )
    assert plan.predicted is not None and plan.checkpoint
    problem = Report.of(plan, step).problem
    units = {unit.name: unit for unit in problem.units}
    recompute_ms = sum(problem.recompute_ms(units[each.unit], build_policy(each)) for each in plan.checkpoint)
    assert recompute_ms == pytest.approx(plan.predicted.recompute_ms, rel=1e-3)
    calibration(MEASURED).save(tmp_path / "two-ranks.toml")
    later = Report.of(plan, step).problem
    assert later.exposed_ms > problem.exposed_ms and later.second_run_ms == 0.02


def test_engines_are_measured_on_as_many_ranks_as_were_calibrated() -> None:
    with pytest.raises(InputError, match="of 2 ranks"):
        calibrate_engines(calibration())


def test_an_engine_that_casts_parameters_to_16_bits_has_figures_of_its_own(tmp_path: Path) -> None:
    half = dataclasses.replace(MEASURED, engine="fsdp2-half", collective_ms=0.75, second_run_ms=0.05)
    device = load_device(str(calibration(MEASURED, half).save(tmp_path / "two-ranks.toml")))
    only = load_device(str(calibration(MEASURED).save(tmp_path / "only.toml")))
    options = SolveOptions(shard=ShardOptions(engine="fsdp2", param_dtype="bfloat16", reduce_dtype="float32"))
    found = [
        Inputs.of(language_step(SIZE, plain=True), target=each, ranks=2, options=options, progress=False).problem()
        for each in (device, only)
    ]
    measured, other = found
    assert measured.sharding is not None
    assert measured.second_run_ms == 0.05 and other.second_run_ms == 0.02
    assert measured.exposed_ms - other.exposed_ms == pytest.approx(0.5 * len(measured.sharding.transfers))
    assert problem_on(device).second_run_ms == 0.02, "parameters of 32 bits are not cast"


def test_copies_take_what_was_measured_under_their_engine(tmp_path: Path) -> None:
    disk = OffloadLink(name="disk", to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, compute_s_per_byte=1e-10)
    found = dataclasses.replace(calibration(MEASURED), disk=disk)
    device = load_device(str(found.save(tmp_path / "two-ranks.toml")))
    links = []
    for engine in ("fsdp2", "sharded"):
        problem = problem_on(device, engine)  # type: ignore[arg-type]
        able = dataclasses.replace(problem, options=dataclasses.replace(problem.options, offload=True))
        assert problem.offload_link is None and able.offload_link is not None
        links.append(able.offload_link.compute_s_per_byte)
    assert links == pytest.approx([2.1e-9, 1e-10])
