"""What the guard does on ranks of a shared process group when one raises what an allocator raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import memfit
from memfit.errors import InputError
from memfit.plans import Plan
from memfit.recovery import OutOfMemory
from memfit.recovery.rank_guarding import RankGuard
from memfit.sharded import RankError
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions
from tests.distributed.wrapped_plans import ROWS, WIDTH, Model, built, loss_of

STEPS = 3
FAILS_AT = 1


def step_of(rows: int = ROWS) -> memfit.Step:
    return memfit.Step(Model, memfit.spec((rows, WIDTH)), loss=loss_of, optimizer=torch.optim.AdamW)


def planned(ranks: int, replicas: int = 1) -> Plan:
    """A plan between the lowest and the highest peak: there is a tighter one to go to."""
    options = SolveOptions(shard=ShardOptions(replicas=replicas))

    def find(budget: int | None) -> Plan:
        return memfit.plan(step_of(), target="cpu", ranks=ranks, budget=budget, options=options, progress=False)

    least, baseline = find(1).minimum_budget_bytes, find(None).baseline.peak_bytes
    assert least is not None
    return find((least + baseline) // 2)


class Training:
    """A model on an engine under a guard; a function is called at a place in one step of one rank."""

    def __init__(self, engine: str, plan: Plan, *, replicas: bool = False, **options: Any) -> None:
        self.model = built()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if replicas else None
        plan.apply(self.model, self.optimizer, mesh=mesh, engine=engine)
        self.guard = memfit.guard(plan, self.model, optimizer=self.optimizer, **options)
        self.faults: dict[str, Callable[[], None]] = {}
        self.rows = ROWS
        torch.manual_seed(dist.get_rank())

    def step(self, number: int) -> None:
        x = torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        loss = self.model(x).square().mean()
        self.at("backward")
        loss.backward()
        self.optimizer.step()
        self.at("after the optimizer")
        self.optimizer.zero_grad()

    def at(self, place: str) -> None:
        fault = self.faults.pop(place, None)
        if fault is not None:
            fault()

    def run(self, rank: int | None = None, place: str = "backward", fault: Callable[[], None] | None = None) -> None:
        with self.guard as guard, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(STEPS):
                if number == FAILS_AT and dist.get_rank() == rank:
                    self.faults[place] = fault or run_out
                guard.step(self.step, number)

    def state(self) -> list[torch.Tensor]:
        held = [*self.model.parameters(), *(each for state in self.optimizer.state.values() for each in state.values())]
        return [getattr(each, "_local_tensor", each).detach().clone() for each in held]


def run_out() -> None:
    raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")


def same(one: Training, other: Training) -> bool:
    return all(torch.equal(here, there) for here, there in zip(one.state(), other.state(), strict=True))


def repeats(engine: str, rank: int, *, replicas: bool = False) -> dict[str, Any]:
    """A rank fails in backward, of a model that is sharded and, with `replicas`, replicated too."""
    plan = planned(4, replicas=2) if replicas else planned(2)
    quiet = Training(engine, plan, replicas=replicas, step=step_of())
    quiet.run()
    # groups that some ranks only are in, and one of a single rank, are cut and connected anew with the others
    groups = [dist.new_group([0]), dist.new_group([0, 1])]
    failing = Training(engine, plan, replicas=replicas, step=step_of())
    failing.run(rank)
    if dist.get_rank() in (0, 1):
        dist.all_reduce(torch.ones(1), group=groups[1])
    assert isinstance(failing.guard, RankGuard)
    return {
        "same": same(quiet, failing),
        "faults": [each.rank for each in failing.guard.faults],
        "lower": failing.guard.plan.predicted.peak_bytes < plan.predicted.peak_bytes,
        "plan": failing.guard.plan.to_json(),
        "replicas": failing.guard.plan.shard.replicas if failing.guard.plan.shard is not None else None,
    }


def raises(engine: str) -> dict[str, Any]:
    """A rank raises an error of the user's, which is caught on all of them; then they go on."""
    training = Training(engine, planned(2), step=step_of())
    found: dict[str, Any] = {"losses": 0}

    def fail() -> None:
        raise ValueError("a bad batch")

    try:
        training.run(1, fault=fail)
    except (ValueError, RankError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    training.optimizer.zero_grad()
    with training.guard as guard:
        for number in range(FAILS_AT, STEPS):
            guard.step(training.step, number)
            found["losses"] += 1
    return found


def repeats_larger_inputs(engine: str) -> dict[str, Any]:
    """A rank fails with more rows than were planned: the step is planned for these, on every rank."""
    training = Training(engine, planned(2), step=step_of())

    def grow() -> None:
        run_out()

    if dist.get_rank() == 1:
        training.rows = 2 * ROWS
    training.run(1, fault=grow)
    return {
        "inputs": [tuple(each.shape or ()) for each in training.guard.plan.trace.inputs],
        "drifts": [(each.kind, each.rank) for each in training.guard.drifts],
        "said": [each for fault in training.guard.faults for each in fault.inputs],  # type: ignore[attr-defined]
    }


def fails_after_the_optimizer(*, copies: bool) -> dict[str, Any]:
    """A rank fails when it and others have written to their parameters."""
    plan = planned(2)
    quiet = Training("fsdp2", plan, step=step_of())
    quiet.run()
    failing = Training("fsdp2", plan, step=step_of(), copies=copies)
    try:
        failing.run(1, "after the optimizer")
    except OutOfMemory as error:
        return {"error": str(error), "restored": error.restored}
    return {"error": None, "same": same(quiet, failing), "foreach": failing.guard.faults[0].history}  # type: ignore[attr-defined]


def watches_only() -> dict[str, str]:
    """Without `guard.step` the rank that fails explains it, and the others are told which it was."""
    plan = planned(2)
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    plan.apply(model, optimizer, engine="fsdp2")
    guard = memfit.guard(plan, model)
    assert isinstance(guard, RankGuard)
    try:
        with guard:
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            if dist.get_rank() == 1:
                run_out()
            loss.backward()
            return {"error": ""}
    except (OutOfMemory, RankError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        assert guard._talk.renew()  # for the tests that follow


def refuses_the_divided_model() -> str:
    model = built()
    plan = planned(2)
    optimizer = torch.optim.AdamW(model.parameters())
    plan.apply(model, optimizer, engine="fsdp2")
    step = memfit.Step(model, torch.randn(ROWS, WIDTH), loss=loss_of, optimizer=optimizer)
    try:
        memfit.guard(plan, model, optimizer=optimizer, step=step)
    except InputError as error:
        return str(error)
    return ""
