"""Sharding parameters, gradients and optimizer state over more ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from memfit.analysis.levers.case import Case
from memfit.analysis.levers.lever import Lever
from memfit.errors import InputError
from memfit.hardware import Target
from memfit.paths import alike, folded
from memfit.sharding import ShardOptions, repeated_blocks
from memfit.units import display_ms

_FROM_ONE = (2, 4, 8)
_TIMES = (2, 4)


def sharding(case: Case) -> Iterator[Lever]:
    """The step as one of more ranks runs it, each on a batch of the same size; nothing on a CPU, whose memory they
    would share."""
    if case.target.device.type == "cpu":
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
            assumes += f"; FSDP2's copies in and out of its buffers, about {display_ms(effect.copies_ms)}, not counted"
        yield case.lever(
            f"sharding over {ranks} ranks" if now == 1 else f"sharding over {ranks} ranks instead of {now}",
            f"torchrun on {ranks} devices; fully_shard {units}",
            effect,
            "captured",
            assumes=assumes,
            option=f"--ranks {ranks}",
        )


def _instead_of_replicating(case: Case, units: str) -> Iterator[Lever]:
    """What a replicated step need not have: buckets beside its gradients, and a whole model on every rank."""
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
    """The modules that are given to `fully_shard`, in words."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for block in case.report.problem.options.shard.units or repeated_blocks(case.trace):
        blocks[alike(block)].append(block)
    return f"each of {', '.join(map(folded, blocks.values()))}, then the model" if blocks else "the model"
