"""Calibration of the engines that shard: what their steps take on the ranks of a machine beyond the ops.

Note [Engines beside ops]: a small training step runs on every rank at once in five ways, in turns: without sharding,
sharded by an engine, the same with units kept unsharded between forward and backward, under a plan that recomputes, and
under one that offloads all that it may. What sharding adds is explained by three things,

    added = slowdown x (collectives and copies by themselves)  +  collective_ms x collectives  +  waiting x ops

of which the first are what the link's figures say and the last are the step without sharding: ranks wait at every
collective for the slowest, and the longer they have computed, the farther apart they are. Steps differ in what they
have most of, so that the three can be told apart. What the first plan adds, less the ops that it recomputes, is the
host's part of a recompute: `second_run_ms` for each op of a unit. What the second adds, less the waits for its copies
that the disk's figures say, is what ranks that share cores lose to copies: `offload_s_per_byte`. The steps are memfit's
reference models, no user's.

An engine that casts parameters to 16 bits is measured by itself (`fsdp2-half`). Nothing but such an engine runs a step
with parameters of 32 bits in 16, so there the step without sharding is what the figures of its ops say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from memfit.capture import Step
from memfit.cost import Calibration, Size, language_step
from memfit.errors import InputError
from memfit.hardware import Device, EngineTimes
from memfit.plans import Inputs, OffloadLinkRecord, Plan, build_checkpoint, build_policy, plan
from memfit.sharding import ShardEngine, ShardOptions
from memfit.solve import Candidate, Problem, SolveOptions
from memfit.tradeoff import Policy

_ENGINES: tuple[ShardEngine, ...] = ("fsdp2", "sharded")
_SIZES = (
    (Size(batch=2, length=16, width=64, layers=8, vocabulary=256), False),  # the host
    (Size(batch=2, length=32, width=512, layers=2), True),  # bytes
    (Size(batch=4, length=128, width=256, layers=3), False),
    (Size(batch=4, length=128, width=256, layers=3), True),
    (Size(batch=4, length=256, width=128, layers=4), False),  # ops
)
_BUDGET_PART = 0.4
"""Where a plan's budget lies between the least and what the step takes without one."""
_ROUNDS, _WARMUP, _LAPS = 3, 2, 5
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTime:
    """The time of a sharded step, and its collectives."""

    ms: float
    collectives: int
    communication_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSample:
    """What one step took, and what of it the other figures know."""

    local_ms: float
    sharded_ms: float
    planned_ms: float
    collectives: int
    communication_ms: float
    """Collectives and copies, as the link's and the memory's figures say."""
    recompute_ops_ms: float
    second_run_ops: int
    kept: ShardedTime | None = None
    offloading_ms: float = 0.0
    offload_waits_ms: float = 0.0
    offloaded_bytes: int = 0


def calibrate_engines(
    calibration: Calibration, *, engines: Sequence[ShardEngine] = _ENGINES, progress: bool = True
) -> Calibration:
    """Measure the engines on all ranks of the process group, which all must call; return the calibration with them.

    `calibration` is that of as many ranks (`calibrate_on_ranks`).
    """
    if not dist.is_initialized() or dist.get_world_size() != calibration.ranks:
        raise InputError(f"the calibration is of {calibration.ranks} ranks; call this on as many, after it")
    console = Console(stderr=True, quiet=not progress or dist.get_rank() != 0)
    device = replace(calibration, engines=()).device()
    found = []
    for engine, half in product(engines, (False, True)):
        name, samples = f"{engine}-half" if half else engine, []
        for size, plain in _SIZES:
            console.print(f"timing {name}, {size.batch} x {size.length} x {size.width}")
            samples.append(_measure(engine, device, size, plain=plain, half=half))
        fitted = fit_engine(name, samples)
        if not half or fitted.slowdown > _LEAST:  # steps shorter than their ops say tell nothing of collectives
            found.append(fitted)
    return replace(calibration, engines=tuple(found))


def fit_engine(engine: str, samples: Sequence[ShardedSample]) -> EngineTimes:
    """Return the figures that come nearest to what sharded steps and planned ones took, each weighed by its length."""
    timed = [
        (ShardedTime(ms=each.sharded_ms, collectives=each.collectives, communication_ms=each.communication_ms), each)
        for each in samples
    ]
    timed += [(each.kept, each) for each in samples if each.kept is not None]
    rows = np.array([(found.communication_ms, found.collectives, each.local_ms) for found, each in timed])
    added = np.array([found.ms - each.local_ms for found, each in timed])
    weights = 1.0 / np.array([found.ms for found, _ in timed])
    slowdown, collective_ms, waiting = _fit_non_negative(rows * weights[:, None], added * weights).tolist()
    spare = [
        (each.planned_ms - each.sharded_ms - each.recompute_ops_ms) / each.second_run_ops
        for each in samples
        if each.second_run_ops
    ]
    away_bytes = sum(each.offloaded_bytes for each in samples)
    lost_ms = sum(
        each.offloading_ms - each.sharded_ms - each.offload_waits_ms for each in samples if each.offloaded_bytes
    )
    return EngineTimes(
        engine=engine,
        slowdown=max(_LEAST, slowdown),
        collective_ms=max(_LEAST, collective_ms),
        waiting=max(_LEAST, waiting),
        second_run_ms=max(_LEAST, statistics.median(spare) if spare else _LEAST),
        offload_s_per_byte=max(0.0, lost_ms / 1e3 / away_bytes) if away_bytes else 0.0,
    )


def _fit_non_negative(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the least squares fit without negative figures: the best of those with any of the columns left out."""
    count = rows.shape[1]
    best, least = np.zeros(count), np.inf
    for chosen in range(1, 1 << count):
        columns = [place for place in range(count) if chosen >> place & 1]
        part, *_ = np.linalg.lstsq(rows[:, columns], values, rcond=None)
        error = float(((rows[:, columns] @ part - values) ** 2).sum())
        if (part >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[columns] = part
    return best


def _measure(engine: ShardEngine, device: Device, size: Size, *, plain: bool, half: bool) -> ShardedSample:
    """Time one step in the ways of Note [Engines beside ops], in turns; in 16 bits without the first."""
    shard = ShardOptions(engine=engine)
    if half:
        shard = ShardOptions(engine=engine, param_dtype="bfloat16", reduce_dtype="float32")
    options = SolveOptions(shard=shard, decide=())
    told = [_plan(language_step(size, plain=plain), device, options).to_json() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    planned = Plan.from_json(told[0])
    problem = Inputs.of(
        language_step(size, plain=plain), target=device, ranks=dist.get_world_size(), options=options, progress=False
    ).problem()
    sharded = msgspec.structs.replace(planned, checkpoint=())
    kept, kept_problem = _kept(language_step(size, plain=plain), device, options)
    offloading, away = _offloading(problem, sharded)
    plans = [*([] if half else [None]), sharded, planned, kept, *([] if offloading is None else [offloading])]
    runs = [_runner(size, plain, each) for each in plans]
    laps: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, found in zip(runs, laps, strict=True):
            found += _slowest_laps(run)
    times = [statistics.median(each) for each in laps]
    local_ms = problem.runtime.total_ms if half else times.pop(0)
    sharded_ms, planned_ms, kept_ms, *offloading_ms = times
    assert problem.sharding is not None and kept_problem.sharding is not None
    recompute_ms, ops = _recompute(problem, planned)
    return ShardedSample(
        local_ms=local_ms,
        sharded_ms=sharded_ms,
        planned_ms=planned_ms,
        collectives=len(problem.sharding.transfers),
        communication_ms=problem.sharding.exposed_ms,
        recompute_ops_ms=recompute_ms * local_ms / problem.runtime.total_ms,
        second_run_ops=ops,
        kept=ShardedTime(
            ms=kept_ms,
            collectives=len(kept_problem.sharding.transfers),
            communication_ms=kept_problem.sharding.exposed_ms,
        ),
        offloading_ms=offloading_ms[0] if offloading_ms else 0.0,
        offload_waits_ms=sum(policy.exposed_ms for _, policy in away),
        offloaded_bytes=sum(policy.offloaded_bytes for _, policy in away),
    )


def _kept(step: Step, device: Device, options: SolveOptions) -> tuple[Plan, Problem]:
    """Return the plan under which every unit stays gathered and nothing is recomputed, and its problem."""
    shard = replace(options.shard, reshard_after_forward=False)
    asked: dict[str, Any] = {"target": device, "ranks": dist.get_world_size(), "progress": False}
    asked["options"] = replace(options, shard=shard)
    found = plan(step, **asked)
    return msgspec.structs.replace(found, checkpoint=()), Inputs.of(step, **asked).problem()


def _offloading(problem: Problem, sharded: Plan) -> tuple[Plan | None, list[tuple[Candidate, Policy]]]:
    """Return the plan under which units offload all that they may, and its policies; None where nothing can leave."""
    link = problem.target.device.offload_link
    if link is None:
        return None, []
    able = replace(problem, options=replace(problem.options, offload=True))
    away = []
    for candidate in able.candidates:
        policies = [policy for policy in candidate.policies if policy.offload and policy.stop < 0]
        if policies:
            away.append((candidate, max(policies, key=lambda policy: policy.offloaded_bytes)))
    if not away:
        return None, []
    entries = [build_checkpoint(problem.runtime.trace, each.unit, policy, each.window) for each, policy in away]
    record = msgspec.convert(link, OffloadLinkRecord, from_attributes=True)
    ordered = tuple(sorted(entries, key=lambda entry: entry.begin))
    return msgspec.structs.replace(sharded, checkpoint=ordered, offload_link=record), away


def _plan(step: Step, device: Device, options: SolveOptions) -> Plan:
    asked = {"target": device, "ranks": dist.get_world_size(), "options": options, "progress": False}
    tight = plan(step, budget=1, **asked)  # type: ignore[arg-type]
    least, most = tight.minimum_budget_bytes, tight.baseline.peak_bytes
    assert least is not None
    return plan(step, budget=int(least + _BUDGET_PART * (most - least)), **asked)  # type: ignore[arg-type]


def _recompute(problem: Problem, planned: Plan) -> tuple[float, int]:
    """Return the time of the ops that a plan recomputes, and how many ops its units have."""
    units = {unit.name: unit for unit in problem.units}
    chosen = [(units[each.unit], build_policy(each)) for each in planned.checkpoint]
    ops = [unit.begin + offset for unit, policy in chosen for offset in policy.recomputed]
    return float(problem.runtime.op_ms[ops].sum()), sum(unit.end - unit.begin for unit, _ in chosen)


def _runner(size: Size, plain: bool, applied: Plan | None) -> Callable[[], None]:
    """Return a function that runs one step of a model of its own, under a plan or without."""
    step = language_step(size, plain=plain)
    model = step.build_model()
    optimizer = step.build_optimizer(model)
    assert isinstance(model, nn.Module) and optimizer is not None
    if applied is not None:
        applied.apply(model, optimizer)
    return lambda: step.execute(model, optimizer, "cpu")


def _slowest_laps(run: Callable[[], None]) -> list[float]:
    """Return the times of some steps, each as long as on its slowest rank."""
    taken = []
    for _ in range(_WARMUP + _LAPS):
        dist.barrier()
        began = time.perf_counter()
        run()
        taken.append((time.perf_counter() - began) * 1e3)
    slowest = torch.tensor(taken[_WARMUP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()
