"""Several modules as one unit: a user's groups, and tiny neighbours that are joined."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.sharded import Schedule, register_forward_method, shard
from memfit.sharded.fully_shard import get_runtime
from tests.distributed.sharded_models import GPT, T5, Recompute
from tests.distributed.sharded_parity import Case, average, check_equal, check_freed, compare, whole_gradients

_WIDTH = 8
PAIR = (("blocks.0", "blocks.1"), "blocks.2")

CASES = {
    "neighbours": Case(model=GPT, units=PAIR),
    "apart, with another unit between": Case(model=GPT, units=(("blocks.0", "blocks.2"), "blocks.1")),
    "an embedding, whose input has no gradient": Case(model=GPT, units=(("embedding", "blocks.0"), ("norm", "head"))),
    "tied weights in it": Case(model=partial(GPT, tied=True), units=(("embedding", "head"), "blocks.0", "blocks.1")),
    "of an encoder and a decoder": Case(
        model=T5, units=(("encoder.blocks.0", "decoder.blocks.0"), ("encoder.blocks.1", "decoder.blocks.1"))
    ),
    "checkpointed": Case(model=partial(GPT, recompute=Recompute("units")), units=PAIR),
    "checkpointed, reentrant": Case(
        model=partial(GPT, recompute=Recompute("units", reentrant=True)), units=PAIR, peers=("plain",)
    ),
    "accumulated": Case(model=GPT, units=PAIR, micro_batches=2, quiet=True),
    "kept": Case(model=GPT, units=PAIR, options={"keep": True}),
    "tiny and joined": Case(model=partial(GPT, layers=32, width=8)),
}


def compare_case(name: str) -> None:
    """Fail unless a group trains as FSDP2's and DDP's do."""
    compare(CASES[name])


def _layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))


def _gathers(model: nn.Module) -> tuple[int, int]:
    """How many gathers and reductions a step has."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.ones(2, _WIDTH)).sum().backward()
    counts = {each.key: each.count for each in profiler.key_averages()}
    return counts["memfit::gather"], counts["memfit::sum"]


def collectives_are_joined() -> None:
    """A group has one gather in the forward, one in the backward and one reduction; so have joined neighbours."""
    alone, grouped = shard(_layers(4), units=["0", "1", "2"]), shard(_layers(4), units=[["0", "1", "2"]])
    assert _gathers(alone) == (7, 4)
    assert _gathers(grouped) == (3, 2)
    tiny = shard(_layers(64), units=nn.Linear)
    apart = shard(_layers(64), units=nn.Linear, schedule=Schedule(bucket_cap_bytes=0))
    assert [len(unit.modules) for unit in get_runtime(tiny).units] == [1, *[4] * 16]
    assert len(get_runtime(apart).units) == 65
    assert _gathers(tiny)[0] < 40 < _gathers(apart)[0]
    check_equal("gradient", whole_gradients(tiny), whole_gradients(apart))


def gathered_from_first_to_last() -> None:
    """Parameters are there from the first module of a group to the last, and not after it."""
    model = _layers(4)
    shard(model, units=[["0", "2"], "1"], schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    group = next(unit for unit in get_runtime(model).units if unit.name == "0")
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(group.gathered))
    model(torch.ones(2, _WIDTH)).sum().backward()
    assert seen == [True, True, True, False]
    check_freed(model)
    model[2].unshard()  # the methods of any of them are the group's
    assert group.gathered and model[0].weight.shape == (_WIDTH, _WIDTH)
    model[0].reshard()
    assert not group.gathered


class _Sometimes(nn.Module):
    """Layers of which some are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(4)
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x).relu()
        return x


def some_are_not_called() -> None:
    """A group of which not all are called, or one several times, ends with the forward, and trains."""
    ours, plain = _Sometimes(), _Sometimes()
    shard(ours, units=[["layers.0", "layers.1"], ["layers.2", "layers.3"]])
    for order in ([0, 1, 2], [0, 0, 1, 3], [1, 0, 3, 2, 1], [3, 2], [0, 1, 2, 3]):
        for model in (ours, plain):
            model.order = order
            model.zero_grad()
            model(torch.ones(2, _WIDTH)).sum().backward()
        average(plain)
        check_freed(ours)
        check_equal(f"gradient of {order}", whole_gradients(ours), whole_gradients(plain))


def without_gradients_first() -> None:
    """A group whose first module runs without gradients trains the others; one without any is freed."""
    ours, plain = _layers(3), _layers(3)
    shard(ours, units=[["0", "1"]])
    for model in (ours, plain):
        with torch.no_grad():
            hidden = model[0](torch.ones(2, _WIDTH))
        model[1](hidden).sum().backward()
    average(plain)
    check_equal("gradient", whole_gradients(ours), whole_gradients(plain))
    with torch.no_grad():
        ours(torch.ones(2, _WIDTH))
    check_freed(ours)


class _Failing(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("not now")
        return super().forward(x)


def failures_inside() -> None:
    """An exception in the second module of a group leaves nothing gathered, and the next step is right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), _Failing(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))
    shard(model, units=[["0", "1"]])
    model(torch.ones(2, _WIDTH)).sum().backward()
    expected = whole_gradients(model)
    model[1].fails = True
    with pytest.raises(ValueError, match="not now"):
        model(torch.ones(2, _WIDTH))
    check_freed(model)
    model[1].fails = False
    model.zero_grad()
    model(torch.ones(2, _WIDTH)).sum().backward()
    check_equal("gradient", whole_gradients(model), expected)


class _WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


class _CallsMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = _WithMethod(), _WithMethod()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second.transform(checkpoint(self.first, x, use_reentrant=False))


def methods_of_a_group() -> None:
    """A method of a later module of a group is a call of it."""
    ours, plain = _CallsMethod(), _CallsMethod()
    shard(ours, units=[["first", "second"]])
    register_forward_method(ours.second, "transform")
    for model in (ours, plain):
        model(torch.ones(2, _WIDTH, requires_grad=True)).sum().backward()
    average(plain)
    check_freed(ours)
    check_equal("gradient", whole_gradients(ours), whole_gradients(plain))


class _InParts(nn.Module):
    """Layers of which some run inside of checkpoints whose second forward has a backward of its own."""

    def __init__(self, *checkpointed: int) -> None:
        super().__init__()
        self.layers = _layers(4)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = (checkpoint(layer, x, use_reentrant=True) if number in self.checkpointed else layer(x)).relu()
        return x


def hooks_run_once_where_parts_run_again() -> None:
    """An optimizer in the backward steps once where modules of one unit have backwards of their own."""
    for checkpointed in ((0, 1, 2, 3), (0, 2), (1,)):
        ours, plain = _InParts(*checkpointed), _InParts(*checkpointed)
        shard(ours, units=[["layers.0", "layers.1"], ["layers.2", "layers.3"]])
        steps: Counter[str] = Counter()
        for name, parameter in ours.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, steps=steps: steps.update([name]))
        for model in (ours, plain):
            model(torch.ones(2, _WIDTH, requires_grad=True)).sum().backward()
        assert steps == dict.fromkeys((name for name, _ in plain.named_parameters()), 1)
        average(plain)
        check_freed(ours)
        check_equal("gradient", whole_gradients(ours), whole_gradients(plain))


CHECKS = (
    collectives_are_joined,
    gathered_from_first_to_last,
    some_are_not_called,
    without_gradients_first,
    failures_inside,
    methods_of_a_group,
    hooks_run_once_where_parts_run_again,
)
