"""`memfit verify`: a plan beside what really happens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from memfit.cli.options import Engines, Json, StepOptions, arg, number
from memfit.cli.output import show, show_json, to_json, write_text
from memfit.cli.problems import DONE, FAILED, UsageError, check_files
from memfit.cli.resolve import read_plan, resolve_step
from memfit.errors import MemfitError
from memfit.progress import Progress

if TYPE_CHECKING:
    from memfit.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a training step with a plan and without it, and show what was predicted beside what was measured.

    The exit code is 0 when the plan holds: the same gradients, and a peak within the budget and as predicted.
    It is 1 when it does not. A time that is off is remarked on; it counts when --time-tolerance is given.

    A plan for several ranks is run by all of them; rank 0 prints.

    examples:
      memfit verify plan.json train.py:step
      memfit verify plan.json train.py:step --time-tolerance 0.3 --json
      torchrun --nproc-per-node 2 -m memfit verify plan.json train.py:step --engine fsdp2
    """

    plan: Annotated[tyro.conf.Positional[Path], arg("PLAN")]
    """The plan, as `memfit plan -o` or Plan.save wrote it."""
    step: StepOptions
    engine: Annotated[Engines, arg("{fsdp2,sharded}", "the plan's, or sharded")] = None
    """What shards the model, for a plan of several ranks that leaves it open."""
    steps: Annotated[int, arg("N", "3")] = 3
    """Steps whose median is the measured time."""
    memory_tolerance: Annotated[float, arg("PART", "0.01")] = 0.01
    """How far the measured peak may be from its prediction, as a part of it."""
    time_tolerance: Annotated[float | None, number(float, "0.3"), arg("PART", "a remark beyond 0.15")] = None
    """The same of the step's time, which is then part of the verdict."""
    output: Annotated[Path | None, arg("FILE", "", "-o")] = None
    """Where to write what was found (JSON), for memfit report --verified."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.capture import Trace
        from memfit.verify import TIME_TOLERANCE, verify

        check_files({"--output": self.output})
        self._check()
        plan = read_plan(self.plan)
        with _ranks(plan) as rank:  # before the step is made, which may ask for its rank
            step = resolve_step(self.step).step
            if isinstance(step, Trace):
                raise UsageError(f"STEP: {self.step.step} is a trace, which cannot be run; give train.py:function")
            try:
                with Progress("running the step with the plan and without it", show=rank == 0):
                    found = verify(
                        plan,
                        step,
                        self.steps,
                        memory_tolerance=self.memory_tolerance,
                        time_tolerance=self.time_tolerance,
                        engine=self.engine,
                    )
            except MemfitError:
                if rank == 0:
                    raise
                return FAILED  # rank 0 was told, and says it
            finally:
                _wait_for_ranks(plan)
        if rank:
            return DONE if found.ok else FAILED
        if self.output is not None:
            write_text("--output", self.output, to_json(found))
        if self.json:
            show_json(found)
        else:
            remarked = TIME_TOLERANCE if self.time_tolerance is None else self.time_tolerance
            show(replace(found, time_tolerance=remarked))
        return DONE if found.ok else FAILED

    def _check(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps is {self.steps}; write a whole number of at least 1")
        for name in ("memory_tolerance", "time_tolerance"):
            part = getattr(self, name)
            if part is not None and not part >= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {part:g}; write a part such as 0.1, at least 0")


@contextlib.contextmanager
def _ranks(plan: Plan) -> Iterator[int]:
    """Join the ranks that torchrun started for a plan of several, inside the block; return this process's rank."""
    import torch
    import torch.distributed as dist

    started = "TORCHELASTIC_RUN_ID" in os.environ
    if plan.shard is not None and not started and not dist.is_initialized():
        raise UsageError(
            f"this plan is for {plan.ranks} ranks, which verify it together: write torchrun --nproc-per-node "
            f"{plan.ranks} -m memfit verify ... in place of memfit verify ..."
        )
    if plan.shard is None or not started or dist.is_initialized():
        yield dist.get_rank() if plan.shard is not None and dist.is_initialized() else 0
        return
    cuda = plan.trace.device_type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _wait_for_ranks(plan: Plan) -> None:
    """Leave together: Gloo's threads end badly where one rank leaves while another still reads.

    Every rank comes here, because an error on one is told to all; one that has died has closed its connections.
    """
    import torch.distributed as dist

    if plan.shard is not None and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()
