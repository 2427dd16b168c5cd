"""Turns of plans on several ranks: each on a copy of the model that the plan shards (Note [Copies])."""

from __future__ import annotations

import gc
import math
import statistics

import torch.distributed as dist

from memfit.capture import Step
from memfit.engines import check_ranks
from memfit.errors import InputError
from memfit.plans import Alternative, Inputs, Plan, find_alternatives
from memfit.verify.faults import is_out_of_memory
from memfit.verify.rank_group import RankGroup
from memfit.verify.rank_verifying import check_whole, copy_trained
from memfit.verify.resolve import real_step
from memfit.verify.state import same_generators
from memfit.verify.tuning import run_steps


def find_on_first_rank(given: Inputs, budget: str | int | float | None) -> list[Alternative]:
    """Have rank 0 plan, and return its plans on every rank; an error there is raised on all."""
    ranks = given.target.ranks
    if not dist.is_initialized() or dist.get_world_size() != ranks:
        here = f"here are {dist.get_world_size()}" if dist.is_initialized() else "there is no process group"
        raise InputError(
            f"plans for {ranks} ranks are run by all of them, and {here}: start the script with torchrun "
            f"--nproc-per-node {ranks}, and call torch.distributed.init_process_group() first"
        )
    group = RankGroup(given.target.device.type)

    def planned() -> list[tuple[str, str]]:
        if group.rank:
            return []
        return [(each.label, each.plan.to_json()) for each in find_alternatives(given, budget=budget)]

    told = group.gather(group.run("planning", planned, sends=False))[0]
    return [Alternative(label=label, plan=Plan.from_json(text)) for label, text in told]


class RankTurns:
    """Turns on all ranks at once."""

    def __init__(self, plan: Plan, step: Step) -> None:
        check_ranks(plan, None)
        self.device_type = plan.trace.device_type
        self.step, self.model = real_step(plan, step)
        check_whole(self.step, self.model)

    def __call__(self, plan: Plan, steps: int) -> float:
        """Return the median time of some steps on the slowest rank; infinite where the memory of one ran out."""
        assert plan.shard is not None
        group = RankGroup(self.device_type, plan.shard.replicas)
        short: list[str] = []

        def turn() -> list[float]:
            gc.collect()  # the copy of the turn before
            try:
                with same_generators():
                    model, optimizer = copy_trained(self.model, self.step.optimizer)
                    plan.apply(model, optimizer, mesh=group.mesh)
                    return run_steps(plan, self.step, model, optimizer, steps)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    short.append(str(error))
                raise

        try:
            times = group.run("a step under a plan", turn)
        except Exception:
            # Every rank is here. Where one had no room, the plan has no time; any other error is one.
            if not any(group.gather(short)):
                raise
            return math.inf
        return statistics.median(map(max, zip(*group.gather(times), strict=True)))
