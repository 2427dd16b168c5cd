"""When units are gathered and freed, and what the schedule's options do."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.sharded import OrderError, Schedule, UnitOptions, shard
from memfit.sharded.fully_shard import get_runtime
from tests.distributed.sharded_behaviour import Trained, gathers, loss_of, tokens_of, watched
from tests.distributed.sharded_models import GPT, Chain, Often, Recompute
from tests.distributed.sharded_parity import check_freed

BLOCKS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
Deep = partial(GPT, layers=4)


def prefetch_depth(depth: int, at: str) -> None:
    """So many units are gathered ahead of the one that runs, in forward and in backward."""
    schedule = Schedule(forward_prefetch=depth, backward_prefetch=depth, backward_prefetch_at=at)
    ours, theirs = Trained(Deep, schedule=schedule), Trained(Deep, plain=True)
    events: list[str] = []
    for block in ours.model.blocks:
        block.register_full_backward_hook(lambda module, *_: events.append("back"))
    for number in range(3):
        with watched(ours.model) as seen:
            assert ours.step(number) == theirs.step(number)
        forward = [each for each in seen if not each.endswith("backward")]
        for position, name in enumerate(BLOCKS):
            begun = gathers(forward[: forward.index(f"run {name}")], "forward")
            ahead = 0 if number == 0 else depth  # the first pass does not know the order
            assert [each for each in begun if each in BLOCKS] == BLOCKS[: position + 1 + ahead], (number, name, begun)
        assert sorted(gathers(seen, "forward")) == sorted([*BLOCKS, "the root unit"])
        assert gathers(seen, "backward") == BLOCKS[::-1]
    ours.check_equals(theirs)


def backward_prefetch_begins(at: str) -> None:
    """The next unit's gather begins before a unit's gradients are worked out, or after."""
    ours = Trained(Deep, schedule=Schedule(backward_prefetch_at=at))
    ours.step(0)
    with watched(ours.model) as seen:
        for block, name in zip(ours.model.blocks, BLOCKS, strict=True):
            block.down.register_full_backward_pre_hook(lambda *_, name=name: seen.append(f"back {name}"))
            block.norm.register_full_backward_hook(lambda *_, name=name: seen.append(f"done {name}"))
        ours.step(1)
    for earlier, later in pairwise(BLOCKS):
        begun = seen.index(f"gather of unit '{earlier}' in backward")
        if at == "before":
            assert begun < seen.index(f"back {later}"), seen
        else:
            assert seen.index(f"done {later}") < begun < seen.index(f"back {earlier}"), seen


def bytes_in_flight(units: float) -> None:
    """No more is gathered ahead than the bound allows, and at least what fits."""
    probe = get_runtime(shard(Deep()))
    one = probe.units[1].bytes
    limit = int(units * one)
    ours = Trained(Deep, schedule=Schedule(forward_prefetch=3, backward_prefetch=3, in_flight_bytes=limit))
    theirs = Trained(Deep, plain=True)
    runtime = get_runtime(ours.model)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.bytes for unit in runtime.units if unit.in_flight))

    for block in ours.model.blocks:
        block.register_forward_pre_hook(look)
        block.down.register_full_backward_pre_hook(look)
    for number in range(3):
        assert ours.step(number) == theirs.step(number)
    assert most == int(units) * one, (most, one, limit)
    ours.check_equals(theirs)


class Skipping(Chain):
    """Leaves out the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(4)))
        self.left_out: set[int] = set()
        self.order = [0, 1, 2, 3]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.order:
            if number not in self.left_out:
                x = torch.relu(self.blocks[number](x))
        return self.head(x)


def changing_order() -> None:
    """What was gathered ahead and does not run is freed; all ranks may change the order together."""
    for schedule in (Schedule(forward_prefetch=2, backward_prefetch=2), Schedule(forward_prefetch=3)):
        ours, theirs = Trained(Skipping, schedule=schedule), Trained(Skipping, plain=True)
        changes = [(set(), [0, 1, 2, 3]), ({1, 2}, [0, 1, 2, 3]), ({3}, [2, 1, 0, 3]), (set(), [3, 2, 1, 0])]
        for number, (left_out, order) in enumerate(changes):
            for trained in (ours, theirs):
                trained.model.left_out, trained.model.order = left_out, order
            with torch.no_grad():
                assert torch.equal(ours.model(tokens_of(number)), theirs.model(tokens_of(number)))
            check_freed(ours.model)
            assert ours.step(number) == theirs.step(number)
        ours.check_equals(theirs)


def given_order() -> None:
    """An order that is given is used from the first pass on; a wrong one costs prefetching, and nothing else."""
    ours, theirs = Trained(Skipping, schedule=Schedule(order=("", *BLOCKS))), Trained(Skipping, plain=True)
    with watched(ours.model) as seen:
        assert ours.step(0) == theirs.step(0)
    assert seen.index("gather of unit 'blocks.1' in forward") < seen.index("run blocks.0")
    wrong = Schedule(order=("", *BLOCKS[::-1]), forward_prefetch=2)
    ours, theirs = Trained(Skipping, schedule=wrong), Trained(Skipping, plain=True)
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def different_orders_are_told() -> None:
    """Ranks that run units in different orders are told which, and where, in the first pass."""
    torch.manual_seed(0)
    model = shard(Skipping(), units=BLOCKS)
    if dist.get_rank() == 1:
        model.order = [0, 2, 1, 3]
    said = (
        "ranks run units in different orders: rank 0 runs unit 'blocks.1' at position 2; "
        "rank 1 runs unit 'blocks.2' at position 2"
    )
    with pytest.raises(OrderError, match=said):
        model(tokens_of(0))
    model.order = [0, 1, 2, 3]
    if dist.get_rank() == 1:
        model.left_out = {3}
    with pytest.raises(OrderError, match=r"rank 0 runs unit 'blocks\.3' at position 4; rank 1 .*4"):
        model(tokens_of(0))
    model.left_out = set()
    loss_of(model, 0).backward()
    check_freed(model)


def gathers_of_one_step(name: str) -> None:
    """How often each unit is gathered in a step, by what was chosen for it."""
    cases: dict[str, tuple[Any, dict[str, Any], list[str], list[str]]] = {
        "full shard": (Deep, {}, ["", *BLOCKS], BLOCKS[::-1]),
        "keep": (Deep, {"keep": True}, ["", *BLOCKS], []),
        "keep one": (
            Deep,
            {"units": {each: UnitOptions(keep=each == "blocks.1") for each in BLOCKS}},
            ["", *BLOCKS],
            ["blocks.3", "blocks.2", "blocks.0"],
        ),
        "embedding": (
            Deep,
            {"units": {"embedding": UnitOptions(backward_gather=False), **dict.fromkeys(BLOCKS, UnitOptions())}},
            ["", "embedding", *BLOCKS],
            BLOCKS[::-1],
        ),
        "recompute units": (partial(Deep, recompute=Recompute("units")), {}, ["", *BLOCKS], BLOCKS[::-1]),
        "recompute inside": (partial(Deep, recompute=Recompute("inside")), {}, ["", *BLOCKS], BLOCKS[::-1]),
        "recompute units, reentrant": (
            partial(Deep, recompute=Recompute("units", reentrant=True)),
            {},
            ["", *BLOCKS],
            BLOCKS[::-1],
        ),
        "recompute several": (
            partial(Deep, recompute=Recompute("several")),
            {"schedule": Schedule(backward_prefetch=0)},
            ["", *BLOCKS],
            ["blocks.3", "blocks.2", "blocks.1", "blocks.0"],
        ),
        "recompute several, reentrant": (
            partial(Deep, recompute=Recompute("several", reentrant=True)),
            {},
            ["", *BLOCKS],
            ["blocks.2", "blocks.3", "blocks.0", "blocks.1"],
        ),
        "side by side": (
            lambda: Chain(Often(16, "side by side")),
            {"units": ["blocks.0.block"]},
            ["", "blocks.0.block", "blocks.0.block"],
            ["blocks.0.block", "blocks.0.block"],
        ),
    }
    build, options, forward, backward = cases[name]
    ours, theirs = Trained(build, **options), Trained(build, plain=True)
    for number in range(2):
        with watched(ours.model) as seen:
            assert ours.step(number) == theirs.step(number)
        assert gathers(seen, "forward") == [each or "the root unit" for each in forward]
        assert gathers(seen, "backward") == backward
    ours.check_equals(theirs)


GATHERS = (
    "full shard",
    "keep",
    "keep one",
    "embedding",
    "recompute units",
    "recompute inside",
    "recompute units, reentrant",
    "recompute several",
    "recompute several, reentrant",
    "side by side",
)


def resharded_gathers() -> None:
    """A unit that was resharded to two ranks gathers from those in backward, and from all in forward.

    Ranks need not be in equally many groups, by which torch would name the one of two ranks.
    """
    alone = dist.new_group([0])
    options = {name: UnitOptions(reshard_ranks=2) for name in BLOCKS}
    ours = Trained(Deep, units=options)
    ours.step(0)
    runtime = get_runtime(ours.model)
    sizes: list[tuple[str, int]] = []
    links = {id(unit.reshard_comm): unit.reshard_comm for unit in runtime.units if unit.reshard_comm is not None}
    for link in (*runtime.links, *links.values()):
        gather = link.gather

        def noted(whole: torch.Tensor, tag: int, about: str, gather: Any = gather, ranks: int = link.ranks) -> Any:
            sizes.append((about.rpartition(" ")[2], ranks))
            return gather(whole, tag, about)

        link.__dict__["gather"] = noted
    loss = loss_of(ours.model, 1)
    assert all(flat._kept is not None for unit in runtime.units[1:] for flat in unit.flats)
    loss.backward()
    ours.update()
    assert sizes.count(("backward", 2)) == 4 and sizes.count(("forward", 4)) == 5 and len(sizes) == 9, sizes
    if dist.get_rank() == 0:
        dist.destroy_process_group(alone)
