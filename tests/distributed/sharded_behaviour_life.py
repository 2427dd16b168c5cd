"""The life of a unit: hooks, exceptions, odd inputs and outputs, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import StateError
from memfit.sharded import FlatDTensor, RankMismatch, Schedule, shard
from memfit.sharded.full_parameters import full_parameters
from memfit.sharded.fully_shard import get_runtime, no_sync
from tests.distributed.sharded_behaviour import (
    Trained,
    average,
    check_gradients,
    gathers,
    loss_of,
    states,
    tokens_of,
    watched,
)
from tests.distributed.sharded_models import GPT, VOCABULARY, Chain
from tests.distributed.sharded_parity import check_equal, check_freed, whole_parameters


class Fault(Exception):
    """What user code raises."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise Fault("in backward")


def _raise(*_: Any) -> None:
    raise Fault("in a hook")


def fault_in_forward(model: Any) -> None:
    """An exception inside a block that is deep in the model."""
    handle = model.blocks[1].up.register_forward_pre_hook(_raise)
    try:
        loss_of(model, 7).backward()
    finally:
        handle.remove()


def fault_in_forward_hook(model: Any) -> None:
    """An exception after a unit's forward."""
    handle = model.blocks[1].register_forward_hook(_raise)
    try:
        loss_of(model, 7).backward()
    finally:
        handle.remove()


def fault_in_root_hook(model: Any) -> None:
    """An exception after the whole forward."""
    handle = model.register_forward_hook(_raise)
    try:
        loss_of(model, 7).backward()
    finally:
        handle.remove()


def fault_in_backward(model: Any) -> None:
    """An exception when some units have had their backward and others have not."""
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: _Raises.apply(output))
    try:
        loss_of(model, 7).backward()
    finally:
        handle.remove()


def fault_in_loss(model: Any) -> None:
    """An exception between forward and backward."""
    loss_of(model, 7)
    raise Fault("in the loss")


FAULTS = {
    each.__name__: each
    for each in (fault_in_forward, fault_in_forward_hook, fault_in_root_hook, fault_in_backward, fault_in_loss)
}


def exception_leaves_a_usable_model(name: str) -> None:
    """Steps after an exception are those of a model that never had one."""
    for options in ({}, {"keep": True}, {"schedule": Schedule(forward_prefetch=2, backward_prefetch=2)}):
        ours, theirs = Trained(**options), Trained(plain=True)
        for number in range(2):
            assert ours.step(number) == theirs.step(number)
        with pytest.raises(Fault):
            FAULTS[name](ours.model)
        if name == "fault_in_backward":
            assert get_runtime(ours.model).idle
            assert states(get_runtime(ours.model)) == {"idle"}
        ours.optimizer.zero_grad()
        for number in range(2, 4):
            assert ours.step(number) == theirs.step(number)
        ours.check_equals(theirs)


def exception_that_the_model_catches() -> None:
    """A model that catches what its unit raises goes on."""

    class Cautious(Chain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            try:
                x = self.blocks[0](x)
            except Fault:
                x = self.blocks[1](x)
            return self.head(x)

    def build() -> nn.Module:
        model = Cautious(nn.Linear(16, 16), nn.Linear(16, 16))
        model.blocks[0].register_forward_hook(_raise)
        return model

    ours, theirs = Trained(build), Trained(build, plain=True)
    for number in range(3):
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def exception_keeps_gradients_that_were_not_sent() -> None:
    """A forward that fails does not lose what earlier passes without communication left."""
    ours, theirs = Trained(), Trained(plain=True)
    with no_sync(ours.model):
        loss_of(ours.model, 0).backward()
    loss_of(theirs.model, 0).backward()
    with pytest.raises(Fault):
        fault_in_forward(ours.model)
    loss_of(ours.model, 1).backward()
    loss_of(theirs.model, 1).backward()
    ours.update()
    theirs.update()
    ours.check_equals(theirs)


def forward_without_backward() -> None:
    """Outputs may be dropped or kept without a backward; the next step is as if they had not been."""
    for options in ({}, {"keep": True}):
        ours, theirs = Trained(**options), Trained(plain=True)
        kept = []
        for number in range(3):
            output = ours.model(tokens_of(number))
            if dist.get_rank() == 0:  # one rank alone holds graphs, and all must still do the same
                kept.append(output)
            assert ours.step(number) == theirs.step(number)
        ours.check_equals(theirs)


def evaluation() -> None:
    """Eval, no_grad and inference_mode give a plain model's outputs, free everything, and see the newest weights."""
    for options in ({}, {"keep": True}):
        ours, theirs = Trained(**options), Trained(plain=True)
        for number, mode in enumerate((torch.no_grad, torch.inference_mode, torch.enable_grad)):
            ours.model.eval()
            with mode():
                assert torch.equal(ours.model(tokens_of(9)), theirs.model(tokens_of(9)))
            if mode is not torch.enable_grad:
                check_freed(ours.model)
            ours.model.train()
            assert ours.step(number) == theirs.step(number)
        ours.check_equals(theirs)


def step_between_forwards() -> None:
    """What a forward that has no backward gathered and kept is not used after the weights have changed."""
    for options in ({}, {"keep": True}):
        ours, theirs = Trained(**options), Trained(plain=True)
        held = []
        for trained in (ours, theirs):
            loss_of(trained.model, 0).backward()
            held.append(trained.model(tokens_of(1)))
            if trained.plain:
                trained.update()
            else:
                trained.optimizer.step()
                trained.optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(ours.model(tokens_of(2)), theirs.model(tokens_of(2)))
        assert ours.step(3) == theirs.step(3)
        ours.check_equals(theirs)


def user_hooks() -> None:
    """Hooks that were there before and that came later see whole parameters, in forward and in backward."""
    torch.manual_seed(0)
    model = GPT()
    block = model.blocks[1]
    shape, seen = block.up.weight.shape, []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.up.weight.shape == shape and type(module.up.weight) is nn.Parameter)

    block.register_forward_pre_hook(look)
    block.register_forward_hook(look)
    shard(model)
    block.register_forward_pre_hook(look)
    block.register_forward_hook(look)
    block.register_full_backward_hook(look)
    for _ in range(2):
        loss_of(model, 0).backward()
    model.eval()
    with torch.no_grad():
        model(tokens_of(0))
    assert seen == [True] * (5 + 5 + 4), seen
    assert isinstance(block.up.weight, FlatDTensor) and block.up.weight.shape == shape


@dataclass
class _Result:
    hidden: torch.Tensor
    extra: Any = None


class _Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


class _Odd(nn.Module):
    """Takes and gives tensors inside of other things."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(16, 16)

    def forward(self, given: Any, *, other: Any = None) -> Any:
        x = {
            "dict": lambda: given["x"],
            "dataclass": lambda: given.hidden,
            "tuple": lambda: given[0][0],
            "named tuple": lambda: given.left,
            "none": lambda: given if other is None else given + other[1]["scale"],
        }[self.kind]()
        x = torch.relu(self.linear(x))
        return wrapped(self.kind, x)


def wrapped(kind: str, x: torch.Tensor) -> Any:
    """A tensor inside of something."""
    return {
        "dict": lambda: {"x": x, "nothing": None, "number": 3},
        "dataclass": lambda: _Result(hidden=x, extra=[None, "text"]),
        "tuple": lambda: ([x, None], (None, {"deep": 2.0 * x})),
        "named tuple": lambda: _Pair(x, None),
        "none": lambda: x,
    }[kind]()


class OddModel(Chain):
    """Blocks that pass tensors inside of other things."""

    def __init__(self, kind: str) -> None:
        super().__init__(_Odd(kind), _Odd(kind), width=16)
        self.kind = kind

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.kind == "none":
                x = block(x, other=(None, {"scale": 0.5 * x}))
            else:
                given = block(wrapped(self.kind, x))
                x = {
                    "dict": lambda given=given: given["x"],
                    "dataclass": lambda given=given: given.hidden,
                    "tuple": lambda given=given: given[0][0] + given[1][1]["deep"],
                    "named tuple": lambda given=given: given.left,
                }[self.kind]()
        return self.head(x)


def odd_inputs_and_outputs(kind: str) -> None:
    """Tensors in dicts, dataclasses and tuples are found."""
    ours, theirs = Trained(lambda: OddModel(kind)), Trained(lambda: OddModel(kind), plain=True)
    with watched(ours.model) as seen:
        for number in range(2):
            assert ours.step(number) == theirs.step(number)
    assert gathers(seen, "backward") == ["blocks.1", "blocks.0"] * 2
    ours.check_equals(theirs)


class _Table(nn.Module):
    """Gives its parameter, or a view of it, away."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view(-1, 16).view_as(x), self.table if self.how == "whole" else self.table[1:3]


class Tables(Chain):
    """Uses parameters outside of the unit that owns them, and changes outputs in place."""

    def __init__(self, how: str) -> None:
        super().__init__(_Table(how), _Table(how))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, table = block(x)
            x = x + table.sum(0)
        return self.head(x)


def parameters_as_outputs(how: str) -> None:
    """A unit whose output is its parameter gives a copy, since its memory is freed."""
    ours, theirs = Trained(lambda: Tables(how)), Trained(lambda: Tables(how), plain=True)
    for number in range(3):
        assert ours.step(number) == theirs.step(number)
    ours.model.eval()
    with torch.no_grad():
        assert torch.equal(ours.model(tokens_of(5)), theirs.model(tokens_of(5)))
    ours.check_equals(theirs)


class _Reshaped(nn.Module):
    """Gives a view, which the caller changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x)).flatten(0, 1).view_as(x)


class InPlace(Chain):
    """Changes what its blocks give in place."""

    def __init__(self) -> None:
        super().__init__(_Reshaped(), _Reshaped())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(2)
        return self.head(x)


def outputs_changed_in_place() -> None:
    """The parameters are gathered for the backward also where an output was changed in place."""
    ours, theirs = Trained(InPlace), Trained(InPlace, plain=True)
    with watched(ours.model) as seen:
        assert ours.step(0) == theirs.step(0)
    assert gathers(seen, "backward") == ["blocks.1", "blocks.0"]
    ours.check_equals(theirs)


def graphs_are_dropped() -> None:
    """A graph goes when its last tensor does, without the garbage collector."""

    class Thing:
        pass

    class Holds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, thing: Thing) -> torch.Tensor:
            ctx.thing = thing
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradients[0], None

    ours = Trained()
    held: list[weakref.ref[Thing]] = []

    def hold(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        thing = Thing()
        held.append(weakref.ref(thing))
        return Holds.apply(output, thing)

    for block in ours.model.blocks:
        block.up.register_forward_hook(hold)
    gc.collect()
    gc.disable()
    try:
        ours.step(0)
        output = ours.model(tokens_of(1))
        assert [each() is None for each in held] == [True] * 3 + [False] * 3
        del output
        assert all(each() is None for each in held)
    finally:
        gc.enable()


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        return self.linear(x) if depth == 0 else self(x, depth - 1)


class _Inner(nn.Module):
    """Runs a backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.goes_back = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.goes_back:
            x.sum().backward(retain_graph=True)
        return x


def wrong_transitions() -> None:
    """A module that calls itself, a backward in a forward, and a forward among full parameters are refused."""
    torch.manual_seed(0)
    model = shard(Chain(_Recursive(), _Recursive()))
    with pytest.raises(StateError, match=r"unit 'blocks\.0' is forward and cannot become forward; .*calls itself"):
        model(tokens_of(0))
    check_freed(model)

    model = Chain(nn.Linear(16, 16), _Inner())
    shard(model, units=["blocks.0", "blocks.1"])
    with pytest.raises(StateError, match=r"backward through unit 'blocks.0' runs inside of the forward of unit"):
        model(tokens_of(0))
    model.blocks[1].goes_back = False
    loss_of(model, 0).backward()
    check_freed(model)

    with full_parameters(model):
        with pytest.raises(StateError, match=r"the root unit is summoned and cannot become forward.*full_parameters"):
            model(tokens_of(0))
        assert model.head.weight.shape == (VOCABULARY, 16)
    loss_of(model, 0).backward()


def different_ranks_are_told() -> None:
    """Ranks with other models, units or options refuse before anything is gathered."""
    rank = dist.get_rank()
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (lambda: GPT(width=32 if rank == 0 else 64), {}, "'embedding.weight' of shape"),
        (GPT, {"units": ["blocks.0"] if rank == 0 else ["blocks.1"]}, "'blocks.1.norm.weight' .* in .*the root"),
        (GPT, {"keep": rank == 0}, "keep="),
        (GPT, {"schedule": Schedule(forward_prefetch=rank)}, "forward_prefetch="),
        (lambda: GPT().requires_grad_(rank == 0), {}, "trained"),
    ]
    for build, options, said in cases:
        with pytest.raises(RankMismatch, match=f"rank 0 has .*{said}.* rank 1 has"):
            shard(build(), **options)


def compiled_units() -> None:
    """Compiled forwards of units give the same as plain ones, with prefetching and freeing."""
    ours, theirs = Trained(keep=False), Trained(plain=True)
    for block in ours.model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    with watched(ours.model) as seen:
        for number in range(3):
            assert abs(ours.step(number) - theirs.step(number)) < 1e-5
    assert gathers(seen, "backward") == ["blocks.2", "blocks.1", "blocks.0"] * 3
    torch._dynamo.reset()


def compiled_model() -> None:
    """A whole model that is compiled after it was sharded breaks at its units and gives the same."""
    ours, theirs = Trained(), Trained(plain=True)
    compiled = torch.compile(ours.model, backend="aot_eager")
    for number in range(3):
        loss = loss_of(compiled, number)
        loss.backward()
        ours.update()
        assert abs(loss.item() - theirs.step(number)) < 1e-5
    torch._dynamo.reset()


def frozen_and_thawed() -> None:
    """Parameters may be frozen and thawed between steps."""
    ours, theirs = Trained(), Trained(plain=True)
    for number in range(4):
        for trained in (ours, theirs):
            for name, parameter in trained.model.named_parameters():
                if "blocks.1" in name or "norm" in name:
                    parameter.requires_grad_(number % 2 == 0)
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def ignored_parameters() -> None:
    """What is ignored stays whole, and its gradient is this rank's own."""
    torch.manual_seed(0)
    ours, theirs = GPT(), GPT()
    theirs.load_state_dict(ours.state_dict())
    shard(ours, ignored=("head.weight", ours.blocks[0].up.bias))
    assert ours.head.weight.shape == theirs.head.weight.shape
    assert ours.blocks[0].up.bias.shape == theirs.blocks[0].up.bias.shape
    loss_of(ours, 0).backward()
    loss_of(theirs, 0).backward()
    assert torch.equal(ours.head.weight.grad, theirs.head.weight.grad)
    assert torch.equal(ours.blocks[0].up.bias.grad, theirs.blocks[0].up.bias.grad)
    ours.head.weight.grad = ours.blocks[0].up.bias.grad = None
    for parameter in (theirs.head.weight, theirs.blocks[0].up.bias):
        parameter.grad = None
        parameter.requires_grad_(False)
    average(theirs)
    check_gradients(ours, theirs)


def optimizer_built_before() -> None:
    """Sharding makes other parameters; an optimizer that was built before is given them, and trains them."""
    torch.manual_seed(0)
    ours, theirs = GPT(), Trained(plain=True)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, eps=1e-4)
    shard(ours)
    for number in range(2):
        loss_of(ours, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.step(number)
    check_equal("parameter", whole_parameters(ours), whole_parameters(theirs.model))
