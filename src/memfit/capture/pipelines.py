"""Pipelines in a capture on several ranks: what a schedule of micro-batches computes, sends and receives.

Note [Pipelines]: `torch.distributed.pipelining` runs as it is, as one rank of a fake group. Three things are answered
for the ranks that are not there:

1. Before the first step stages tell each other the shapes of what they send, as Python objects. Each rank's code is
   run, on a group in which this process is that rank, until it has sent what another waits for (`Messages`).
2. Stages vote whether to do so. They always do: where the user gives the shapes (`input_args`), it finds the same.
3. A `Work` of Gloo and of NCCL holds the tensor that it sends or receives into, and the fake one does not.

What is sent and received are ops like others, `c10d.send` and `c10d.recv_`. The forwards and backwards of
micro-batches are noted by the ops that they consist of, so that bubbles can be derived (`sharding/bubbles.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from memfit.capture.recorder import Recorder
from memfit.capture.replacements import patched, replaced
from memfit.capture.trace_types import PipelineAction, PipelineRun
from memfit.errors import InputError

_Result = TypeVar("_Result")


class MissingMessage(BaseException):
    """A rank waits for an object that another has not sent yet. No code of a step catches this."""

    def __init__(self, source: int, destination: int, number: int) -> None:
        super().__init__(f"rank {destination} waits for message {number} of rank {source}")
        self.key = source, destination, number


class MessageSent(BaseException):
    """A rank has sent the object that another waits for, and need not run further."""


class Messages:
    """The Python objects that ranks send each other while stages learn the shapes of what they receive.

    A rank is run again and again, each time further: what it sends is the same each time.
    """

    def __init__(self) -> None:
        self._objects: dict[tuple[int, int, int], list[Any]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._wanted: tuple[int, int, int] | None = None

    def complete(self, rank: int, run: Callable[[int], _Result]) -> _Result:
        """Run a rank to its end, and others as far as it needs what they send."""
        while True:
            try:
                return self._run(rank, run, None)
            except MissingMessage as missing:
                self._fetch(missing.key, run)

    def _fetch(self, key: tuple[int, int, int], run: Callable[[int], Any]) -> None:
        source, destination, _ = key
        while key not in self._objects:
            try:
                self._run(source, run, key)
            except MessageSent:
                return
            except MissingMessage as missing:
                if missing.key == key:
                    raise InputError(f"ranks {source} and {destination} wait for each other's objects") from None
                self._fetch(missing.key, run)
            else:
                raise InputError(f"rank {destination} waits for an object of rank {source}, which sends none")

    def _run(self, rank: int, run: Callable[[int], _Result], wanted: tuple[int, int, int] | None) -> _Result:
        self._wanted = wanted
        return run(rank)

    def begin(self) -> None:
        """Begin a rank's step anew: what it sends and receives is counted from the first message on."""
        self._counts.clear()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let `send_object_list` and `recv_object_list` work without other processes, inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(dist, "send_object_list", lambda _: self._send))
            stack.enter_context(patched(dist, "recv_object_list", lambda _: self._receive))
            yield

    def _send(self, object_list: list[Any], dst: int | None = None, group: Any = None, *_: Any, **options: Any) -> None:
        key = self._next(dist.get_rank(), _global_rank(dst, group, options.get("group_dst")))
        self._objects[key] = list(object_list)
        if key == self._wanted:
            raise MessageSent

    def _receive(
        self, object_list: list[Any], src: int | None = None, group: Any = None, *_: Any, **options: Any
    ) -> int:
        source = _global_rank(src, group, options.get("group_src"))
        key = self._next(source, dist.get_rank())
        if key not in self._objects:
            raise MissingMessage(*key)
        object_list[:] = self._objects[key]
        return source

    def _next(self, source: int, destination: int) -> tuple[int, int, int]:
        number = self._counts[source, destination] = self._counts.get((source, destination), 0) + 1
        return source, destination, number


def _global_rank(rank: int | None, group: Any, group_rank: int | None) -> int:
    if rank is None and group_rank is None:
        raise InputError("the step sends or receives objects without naming a rank, which cannot be captured")
    return rank if rank is not None else dist.get_global_rank(group or dist.group.WORLD, group_rank)  # type: ignore[arg-type]


class PipelineRecorder:
    """Notes the schedules of micro-batches that a step runs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._schedules: list[tuple[Any, list[PipelineAction]]] = []

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Follow the step inside the block."""
        with contextlib.ExitStack() as stack:
            for name in ("send", "recv"):
                stack.enter_context(patched(dist.ProcessGroup, name, self._held))
            if "torch.distributed.pipelining" in sys.modules:  # else the step has no pipeline
                from memfit.torch_private import pipelining

                for name in pipelining.VOTES:
                    stack.enter_context(replaced(pipelining.PipelineStage, name, _vote))
                for owner in (pipelining.PipelineScheduleSingle, pipelining.PipelineScheduleMulti):
                    stack.enter_context(patched(owner, "step", self._step))
                for name, kind in (
                    ("forward_one_chunk", _forward),
                    ("backward_one_chunk", _backward),
                    ("backward_weight_one_chunk", _weights),
                ):
                    stack.enter_context(patched(pipelining.StageBase, name, self._action(kind)))
            yield

    def _held(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
            releases = self._recorder.device_type != "cpu"
            return _HeldWork(original(group, tensors, *args), tensors, releases=releases)

        return begin

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            self._schedules.append((schedule, []))
            return original(schedule, *args, **kwargs)

        return step

    def _action(self, kind: Callable[[dict[str, Any]], str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
                begin = len(self._recorder.ops)
                result = original(stage, chunk, *args, **kwargs)
                if self._schedules:
                    self._schedules[-1][1].append(
                        PipelineAction(
                            kind=kind(kwargs),
                            stage=stage.stage_index,
                            microbatch=chunk,
                            begin=begin,
                            end=len(self._recorder.ops),
                        )
                    )
                return result

            return run

        return wrap

    def runs(self) -> tuple[PipelineRun, ...]:
        """Return the schedules that were run, in order."""
        if not self._schedules:
            return ()
        from memfit.torch_private.pipelining import microbatch_count, schedule_order, schedule_stages

        found = []
        for schedule, actions in self._schedules:
            stages = schedule_stages(schedule)
            found.append(
                PipelineRun(
                    schedule=type(schedule).__name__,
                    stages=stages[0].num_stages,
                    microbatches=microbatch_count(schedule),
                    rank=stages[0].group_rank,
                    ranks=stages[0].group_size,
                    order=schedule_order(schedule),
                    actions=tuple(actions),
                )
            )
        return tuple(found)


def pipeline_notes(runs: tuple[PipelineRun, ...], mesh: dict[str, int], rank: int) -> list[str]:
    """Say which part of a pipeline was captured, and what its time assumes."""
    if not runs:
        return []
    run = runs[0]
    held = sorted({action.stage for action in run.actions})
    stages = f"stage {held[0]}" if len(held) == 1 else f"stages {', '.join(map(str, held))}"
    ranks = " x ".join(f"{name} {size}" for name, size in mesh.items())
    assumed = (
        "the other stages are taken to need as long"
        if run.order
        else "the schedule does not tell its order, so the time has no bubble"
    )
    return [
        f"captured as rank {rank} of {ranks}: {stages} of {run.stages}, {run.microbatches} micro-batches by "
        f"{run.schedule}. Other ranks hold other stages, which rank= captures; {assumed}"
    ]


def _forward(_: dict[str, Any]) -> str:
    return "F"


def _backward(options: dict[str, Any]) -> str:
    return "B" if options.get("full_backward", True) else "I"


def _weights(_: dict[str, Any]) -> str:
    return "W"


def _vote(*_: Any, **__: Any) -> torch.Tensor:
    """Vote for learning shapes from the stage before."""
    return torch.zeros(1, dtype=torch.int32)


class _HeldWork:
    """A `Work` that holds what is sent or received: with Gloo as long as it lives, with NCCL until it is waited for."""

    def __init__(self, work: Any, tensors: list[torch.Tensor], *, releases: bool) -> None:
        self._work = work
        self._tensors: list[torch.Tensor] = list(tensors)
        self._releases = releases

    def wait(self, *args: Any) -> Any:
        """Wait for nothing: there is no other rank."""
        if self._releases:
            self._tensors.clear()
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
