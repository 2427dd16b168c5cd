"""Stages and schedules of `torch.distributed.pipelining`, and what of them a capture must know.

Imported when a step has a pipeline, not before: the package loads torch.fx and more.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["PipelineScheduleMulti", "PipelineScheduleSingle", "PipelineStage", "StageBase"]

StageBase = _PipelineStageBase
"""What all stages are (torch/distributed/pipelining/stage.py): runs the forward and the backward of one micro-batch."""

VOTES = tuple(name for name in ("_warmup_forward_vote", "_warmup_backward_result") if hasattr(PipelineStage, name))
"""Methods of `PipelineStage` by which stages agree whether they learn shapes from each other or were all given them,
as a tensor with one number that is sent around; 0 is for learning. Torch before 2.13 has none, and learns."""

_KINDS = ("F", "B", "I", "W")


def microbatch_count(schedule: Any) -> int:
    """Return into how many micro-batches a schedule splits a batch (`_n_microbatches`)."""
    return schedule._n_microbatches


def schedule_stages(schedule: Any) -> list[Any]:
    """Return the stages of this rank (`_stage` of schedules with one, `_stages` of others)."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def schedule_order(schedule: Any) -> tuple[tuple[str, ...], ...]:
    """Return what each rank of the pipeline computes, in order, as in `1F0`: forward of stage 1, micro-batch 0.

    Schedules keep it as `pipeline_order`, by rank; empty for those that do not, such as a user's own.
    """
    order = getattr(schedule, "pipeline_order", None)
    if order is None and hasattr(schedule, "_get_pipeline_order"):
        order = schedule._get_pipeline_order()
    if not order:
        return ()
    found = [_computed(order[rank]) for rank in sorted(order)]
    if isinstance(schedule, PipelineScheduleSingle):
        found = [_numbered(actions) for actions in found]
    return tuple(tuple(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in actions) for actions in found)


def _numbered(actions: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """Number micro-batches in the order in which they come, as these schedules run them.

    What torch 2.13 says of `Schedule1F1B` begins with micro-batch 1 in the forwards of the last stage.
    """
    counts: dict[str, int] = {}
    found = []
    for stage, kind, _ in actions:
        found.append((stage, kind, counts.get(kind, 0)))
        counts[kind] = counts.get(kind, 0) + 1
    return found


def _computed(actions: Any) -> list[tuple[int, str, int]]:
    found: list[tuple[int, str, int]] = []
    for action in actions:
        if action is None:  # idle
            continue
        if getattr(action, "sub_actions", None):
            found += _computed(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            found.append((action.stage_index, action.computation_type.value, action.microbatch_index))
    return found
