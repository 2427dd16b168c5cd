"""Levers on the same trace: checkpointing for the budget or at the knee of its curve, and more ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from memfit.analysis.levers.case import Case, Effect, Lever
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.paths import alike, folded
from memfit.plans import EXPANDABLE, Reservation, Room, reservation_under, with_room
from memfit.sharding import ShardOptions, repeated_blocks
from memfit.solve import Problem, Solved, solve
from memfit.units import display_budget, display_bytes, display_ms

_POINTS = 8


def checkpointing(case: Case) -> Iterator[Lever]:
    """Yield the lever of a plan that fits the budget, where the step does not, and of the one at the curve's knee.

    Where nothing fits, it is the knee of the whole trade-off: another lever must help.
    """
    problem, least = case.quick, case.min_budget
    if least is None or not case.matters(case.peak_bytes - least.peak_bytes):
        return
    low, high = least.peak_bytes, case.peak_bytes
    fitting = None
    if low <= case.budget_bytes < high:
        fitting = solve(problem, case.budget_bytes)
        if case.budget_bytes >= case.target.usable_bytes:  # no budget of the user's own
            fitting, reservation = with_room(problem, fitting)
        else:
            reservation = reservation_under(problem, fitting)
        yield from _lever(case, fitting, reservation, "checkpointing for the budget")
    within = low <= case.budget_bytes
    top = min(high, case.budget_bytes) if within else high
    knee = _knee(problem, low, top) if low < top else None
    if knee is not None and knee.replay is not None:
        there = None if fitting is None or fitting.replay is None else fitting.replay.peak_bytes
        if there is None or case.matters(abs(there - knee.replay.peak_bytes)):
            yield from _lever(case, knee, reservation_under(problem, knee), "checkpointing at the knee of its curve")


def _knee(problem: Problem, low: int, high: int) -> Solved | None:
    """Return the plan after which saving more costs more than it did on average over the whole trade-off.

    None where each byte costs less the more are saved: such a curve has no knee.
    """
    found: list[Solved] = []
    start = None
    for place in range(_POINTS):
        solved = solve(problem, low + (high - low) * place // _POINTS, start=start)
        start = solved.choice
        if solved.replay is not None:
            found.append(solved)
    if not found:
        return None
    most_ms = max(each.recompute_ms for each in found)

    def gain(solved: Solved) -> float:
        assert solved.replay is not None
        saved = (high - solved.replay.peak_bytes) / (high - low)
        return saved - (solved.recompute_ms / most_ms if most_ms else 0.0)

    best = max(found, key=gain)
    return best if gain(best) > 0 else None


def _lever(case: Case, solved: Solved, reservation: Reservation | None, name: str) -> Iterator[Lever]:
    if solved.replay is None or reservation is None:
        return
    problem = case.quick
    assumes = ""
    if reservation.room is not Room.ENOUGH and solved.replay.peak_bytes <= case.target.usable_bytes:
        name = f"{name}, with care"
        assumes = (
            f"{EXPANDABLE}: else the caching allocator would hold {display_bytes(reservation.reserved_bytes)}, and the "
            f"device has {display_bytes(case.target.usable_bytes)}"
        )
    step_ms = problem.runtime.total_ms + problem.exposed_ms + solved.recompute_ms
    peak = solved.replay.peak_bytes
    budget = display_budget(peak, space="")
    how = f'plan = memfit.plan(step, ..., budget="{budget}"); plan.apply(model, optimizer)'
    option = f"--budget {budget}"
    if peak > case.target.usable_bytes:
        how, option = "torch.utils.checkpoint on these modules; the device needs another lever besides", ""
    yield case.lever(
        name,
        how,
        Effect(peak_bytes=peak, step_ms=step_ms),
        "captured",
        assumes=assumes,
        units=[candidate.unit.name for candidate, _ in solved.chosen],
        option=option,
    )


# Sharding over more ranks


_FROM_ONE = (2, 4, 8)
_TIMES = (2, 4)


def sharding(case: Case) -> Iterator[Lever]:
    """Yield the lever of sharding over more ranks, each with a batch of the same size.

    There is none on a CPU, whose memory the ranks would share.
    """
    if case.target.device.type == "cpu" or case.mesh:  # a mesh is of the step's own making
        return
    now, units = case.target.ranks, wrapped(case)
    if case.report.problem.options.shard.parallel == "ddp":
        yield from _instead_of_replicating(case, units)
        return
    for ranks in _FROM_ONE if now == 1 else tuple(now * times for times in _TIMES):
        try:
            target = Target.parse(case.target, ranks=ranks)
            effect = case.effect(target=target)
        except InputError as error:
            case.left_out.append(f"sharding over {ranks} ranks: {error}")
            return
        assumes = "a batch of this size on every device"
        if now == 1:
            assumes += f"; FSDP2's copies in and out of its buffers, about {display_ms(effect.copies_ms)}, are counted"
        yield case.lever(
            f"sharding over {ranks} ranks" if now == 1 else f"sharding over {ranks} ranks instead of {now}",
            f"torchrun on {ranks} devices; fully_shard {units}",
            effect,
            "captured",
            assumes=assumes,
            option=f"--ranks {ranks}",
        )


def _instead_of_replicating(case: Case, units: str) -> Iterator[Lever]:
    """Yield the lever of sharding a replicated step: no buckets beside gradients, no whole model on every rank."""
    ddp = case.report.problem.options.shard
    if not ddp.gradient_as_bucket_view:
        effect = case.effect(shard=replace(ddp, gradient_as_bucket_view=True))
        how = "DistributedDataParallel(model, gradient_as_bucket_view=True)"
        yield case.lever("gradients as views of DDP's buckets", how, effect, "captured")
    effect = case.effect(shard=ShardOptions())
    how = f"fully_shard {units}, in place of DistributedDataParallel"
    name = f"sharding over the {case.target.ranks} ranks, not replicating"
    yield case.lever(name, how, effect, "captured", option="--parallel fsdp")


def wrapped(case: Case) -> str:
    """Return the modules that are given to `fully_shard`, in words."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for block in case.report.problem.options.shard.units or repeated_blocks(case.trace):
        blocks[alike(block)].append(block)
    return f"each of {', '.join(map(folded, blocks.values()))}, then the model" if blocks else "the model"
