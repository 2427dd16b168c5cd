"""Turns of plans on several ranks: each on a copy of the model that the plan shards (Note [Copies]).

Every step of the way runs inside `RankGroup.run`, so that what fails on one rank is raised on all. A rank whose memory
runs out closes its Gloo connections, and the plan has no time; on NCCL the others wait until the group's timeout, as
they do in a training step.
"""

from __future__ import annotations

import gc
import math
import statistics

import torch.distributed as dist
from torch import nn

from memfit.capture import Step
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.plans import Alternative, Inputs, Plan, find_alternatives
from memfit.verify.faults import is_out_of_memory
from memfit.verify.rank_group import RankGroup
from memfit.verify.rank_verifying import check_whole, copy_trained
from memfit.verify.resolve import build_real
from memfit.verify.state import same_generators
from memfit.verify.tuning import device_of, run_steps


class RankTurns:
    """Turns on all ranks at once, which must make it together."""

    def __init__(self, step: Step, target: Target) -> None:
        ranks = target.ranks
        if not dist.is_initialized() or dist.get_world_size() != ranks:
            here = f"here are {dist.get_world_size()}" if dist.is_initialized() else "there is no process group"
            raise InputError(
                f"plans for {ranks} ranks are run by all of them, and {here}: start the script with torchrun "
                f"--nproc-per-node {ranks}, and call torch.distributed.init_process_group() first"
            )
        self.step, self.device_type = step, target.device.type
        self.group = RankGroup(self.device_type)
        self.shows = self.group.rank == 0

    def prepare(self) -> None:
        """Build the model where it was given as a callable, and refuse one that is sharded or runs a plan."""

        def built() -> tuple[Step, nn.Module]:
            real, model = build_real(self.step, self.device_type)
            check_whole(real, model, "tune")
            return real, model

        self.step, self.model = self.group.run("building the model", built, sends=False)
        self.device = device_of(self.model, self.device_type)

    def find(self, given: Inputs, budget: str | int | float | None) -> list[Alternative]:
        """Have rank 0 plan, and return its plans on every rank."""

        def planned() -> list[tuple[str, str]]:
            if self.group.rank:
                return []
            return [(each.label, each.plan.to_json()) for each in find_alternatives(given, budget=budget)]

        told = self.group.gather(self.group.run("planning", planned, sends=False))[0]
        return [Alternative(label=label, plan=Plan.from_json(text)) for label, text in told]

    def take(self, plan: Plan, steps: int) -> float:
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
                    return run_steps(plan, self.step, model, optimizer, self.device, steps)
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
