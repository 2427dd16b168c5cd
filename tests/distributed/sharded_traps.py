"""Things that training loops do and that are easy to get wrong quietly; each function fails where one is."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memfit.errors import MemfitError, StateError
from memfit.sharded import full_parameters, full_state_dict, load, no_sync, save, shard
from memfit.sharded.fully_shard import get_runtime
from tests.distributed.sharded_behaviour import Trained, average, check_gradients, loss_of, tokens_of
from tests.distributed.sharded_models import GPT, VOCABULARY, Chain
from tests.distributed.sharded_parity import check_equal, check_freed, whole_gradients, whole_parameters

_WIDTH = 16


class _Aside(nn.Module):
    """A block that keeps a loss of its own, made after its output, as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = x + self.down(self.up(x).tanh())
        self.aside = self.down(self.up(x).sigmoid()).square().mean()
        return output


def _with_asides() -> nn.Module:
    return Chain(_Aside(), _Aside(), _Aside())


def _loss_with_asides(model: Any, number: int) -> torch.Tensor:
    return loss_of(model, number) + sum(block.aside for block in model.blocks)


def loss_in_an_attribute(keep: bool) -> None:
    """Its backward reads parameters before the unit's begins: autograd refuses, unless the unit stays gathered."""
    ours, theirs = Trained(_with_asides, keep=keep), Trained(_with_asides, plain=True)
    if keep:
        for number in range(2):
            assert ours.step(number, _loss_with_asides) == theirs.step(number, _loss_with_asides)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ours.step(0, _loss_with_asides)
        ours.model.zero_grad()
    assert ours.step(2) == theirs.step(2)
    ours.check_equals(theirs)


def step_between_forward_and_backward(keep: bool, plain: bool) -> None:
    """Parameters that were changed since the forward give no gradients, as of a plain model."""
    trained = Trained(plain=True) if plain else Trained(keep=keep)
    loss_of(trained.model, 0).backward()
    loss = loss_of(trained.model, 1)
    trained.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    if not plain:
        trained.model.zero_grad()
        trained.step(2)


def other_dtype_after_shard() -> str:
    """What the next forward says about the first parameter."""
    ours = Trained()
    names = dict(ours.model.named_parameters())
    ours.model.double()
    with pytest.raises(StateError) as error:
        loss_of(ours.model, 0)
    named = re.match(r"parameter '(.+)' was torch.float32", str(error.value))
    assert named is not None and named[1] in names
    return str(error.value)


def _replace_data(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, value)


def data_is_replaced() -> None:
    """Values put in place of a parameter's data are used and trained from then on."""
    ours, theirs = Trained(), Trained(plain=True)
    for number in range(3):
        for each in (ours, theirs):
            _replace_data(each.model, 0.01 * (number + 1))
        assert ours.step(number) == theirs.step(number)
        ours.check_equals(theirs)
    check_equal("parameter", full_state_dict(ours.model)["model"], theirs.model.state_dict())


def data_is_replaced_before(what: str, folder: str) -> None:
    """Values put in place of a parameter's data are what is read; what is loaded or written over them stays."""
    ours, theirs = Trained(), Trained(plain=True)
    if what == "load":
        save(folder, ours.model)
    _replace_data(ours.model, 0.5)
    if what == "load":
        load(folder, ours.model)
    else:
        _replace_data(theirs.model, 0.5)
    if what == "save":
        save(folder, ours.model)
        ours = Trained()
        load(folder, ours.model)
    elif what == "full parameters":
        with full_parameters(ours.model, write_back=True):
            for each in (ours, theirs):
                with torch.no_grad():
                    each.model.get_parameter("head.weight").mul_(2)
    check_equal("parameter", full_state_dict(ours.model)["model"], theirs.model.state_dict())
    assert ours.step(0) == theirs.step(0)
    ours.check_equals(theirs)


def functional_call_is_refused() -> None:
    """Values for one call only cannot be sharded; the model is as it was before."""
    ours, theirs = Trained(), Trained(plain=True)
    given = {name: torch.zeros_like(parameter) for name, parameter in theirs.model.named_parameters()}
    with pytest.raises(StateError, match=r"was replaced after shard, by torch\.func\.functional_call"):
        torch.func.functional_call(ours.model, given, (tokens_of(0),))
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def meta_on_rank_0() -> str:
    """What is said where rank 0 has no values to give."""
    with torch.device("meta"):
        model = GPT()
    try:
        shard(model, from_rank_0=True)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def graph_of_a_backward_is_refused(how: str) -> None:
    """A second derivative would read parameters that are not gathered; the model is as it was before."""
    ours, theirs = Trained(), Trained(plain=True)
    embedded: list[torch.Tensor] = []
    handle = ours.model.get_submodule("embedding").register_forward_hook(lambda *given: embedded.append(given[-1]))
    loss = loss_of(ours.model, 7)
    handle.remove()
    inputs = None if how == "backward" else embedded
    with pytest.raises(StateError, match="create_graph=True"):
        loss.backward(create_graph=True, inputs=inputs)
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


class _Experts(nn.Module):
    """A block that uses the experts it is told to."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(experts))

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        return x * 1.0 + sum(self.experts[each](x).tanh() for each in chosen)


class Routed(nn.Module):
    """Calls experts once for each choice, with a block in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.moe = _Experts()
        self.other = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, tokens: torch.Tensor, *chosen: Sequence[int]) -> torch.Tensor:
        x = self.embedding(tokens)
        for each in chosen:
            x = self.other(self.moe(x, each)).tanh()
        return self.head(x)


_ROUTES = (([0], [1]), ([0, 1], [0, 1]))
"""What each rank uses in the first and in the second call."""


def _once(model: nn.Module, number: int) -> torch.Tensor:
    return model(tokens_of(number), *_ROUTES[dist.get_rank()]).square().mean()


def _in_two_forwards(model: nn.Module, number: int) -> torch.Tensor:
    first, second = _ROUTES[dist.get_rank()]
    return (model(tokens_of(number), first) - model(tokens_of(number + 9), second)).square().mean()


def ranks_route_differently(two_forwards: bool) -> None:
    """A unit that runs twice before one backward, with other parameters on each rank and in each run."""
    loss = _in_two_forwards if two_forwards else _once
    ours, theirs = Trained(Routed, units=["moe", "other"]), Trained(Routed, plain=True)
    for number in range(3):
        for each in (ours, theirs):
            loss(each.model, number).backward()
        average(theirs.model)
        check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)
        for each in (ours, theirs):
            each.optimizer.zero_grad()
        check_freed(ours.model)


class Gated(nn.Module):
    """Blocks that may be told to use no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Experts(1) for _ in range(8))
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, tokens: torch.Tensor, unused: int | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, [] if number == unused else [0])
        return self.head(x)


def dropped_forward_then_unused_unit() -> None:
    """A forward whose graph was dropped does not change when units are summed."""
    ours, theirs = Trained(Gated), Trained(Gated, plain=True)
    unused = 6 if dist.get_rank() else None
    for number in range(3):
        for each in (ours, theirs):
            each.model(tokens_of(number + 10))
            each.model(tokens_of(number), unused).square().mean().backward()
        average(theirs.model)
        check_gradients(ours.model, theirs.model)
        for each in (ours, theirs):
            each.optimizer.zero_grad()


def hooks_run_once() -> None:
    """An optimizer that runs in backward steps every parameter once, also those of a unit that ran twice."""
    ours, theirs = Trained(Routed, units=["moe", "other"]), Trained(Routed, plain=True)
    steps: Counter[str] = Counter()
    for name, parameter in ours.model.named_parameters():

        def run(done: torch.Tensor, name: str = name) -> None:
            steps[name] += 1
            assert done.grad is not None
            done.data.add_(done.grad, alpha=-0.1)
            done.grad = None

        parameter.register_post_accumulate_grad_hook(run)
    for each in (ours, theirs):
        (each.model(tokens_of(0), [0]) - each.model(tokens_of(9), [0, 1])).square().mean().backward()
    assert steps == dict.fromkeys((name for name, _ in theirs.model.named_parameters()), 1)
    average(theirs.model)
    with torch.no_grad():
        for parameter in theirs.model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
    check_equal("parameter", whole_parameters(ours.model), whole_parameters(theirs.model), exact=False)


def unfrozen_after_a_pass_that_was_not_sent() -> None:
    """A parameter that had no gradient in earlier passes gets that of this one; new memory is NaN here."""
    torch.use_deterministic_algorithms(True)
    try:
        ours, theirs = Trained(), Trained(plain=True)
        frozen = [each.model.get_submodule("blocks.1.up").get_parameter("bias") for each in (ours, theirs)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        with no_sync(ours.model):
            loss_of(ours.model, 0).backward()
        loss_of(theirs.model, 0).backward()
        for parameter in frozen:
            parameter.requires_grad_(True)
        for each in (ours, theirs):
            loss_of(each.model, 1).backward()
        average(theirs.model)
        check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)
    finally:
        torch.use_deterministic_algorithms(False)


def model_is_collected(how: str) -> None:
    """Nothing outside of a model that was used keeps it, or its shards."""
    ours = Trained()
    if how == "steps":
        for number in range(2):
            ours.step(number)
    elif how == "backward":
        loss_of(ours.model, 0).backward()
    else:
        loss_of(ours.model, 0)
    left = [weakref.ref(ours.model), *(weakref.ref(unit.flats[0]) for unit in get_runtime(ours.model).units)]
    del ours
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


class _Rectified(nn.Module):
    """A block that begins with a ReLU, in place or not."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.relu(x))


def gathered_in_backward(inplace: bool) -> int:
    """How many of eight units are gathered at most while their backwards run; the gradients are checked."""

    def build() -> nn.Module:
        return Chain(*(_Rectified(inplace=inplace) for _ in range(8)))

    ours, theirs = Trained(build), Trained(build, plain=True)
    units = [unit for unit in get_runtime(ours.model).units if unit.name]
    assert len(units) == 8
    seen: list[int] = []

    def watch(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].register_hook(lambda gradient: seen.append(sum(unit.gathered for unit in units)))

    for unit in units:
        unit.module.get_submodule("linear").register_forward_pre_hook(watch)
    for each in (ours, theirs):
        loss_of(each.model, 0).backward()
    average(theirs.model)
    check_gradients(ours.model, theirs.model)
    assert len(seen) == 8
    return max(seen)


def input_has_a_backward_of_its_own() -> None:
    """A backward that goes through a unit's input and not through the unit leaves it to a later one."""
    model = shard(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1)))
    x = torch.randn(4, _WIDTH, requires_grad=True) * 2
    output = model(x).sum()
    x.sum().backward(retain_graph=True)
    output.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class _Fault(Exception):
    """What user code raises."""


def _raise_fault(gradient: torch.Tensor) -> None:
    raise _Fault


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _fail_in_backward(model: nn.Module) -> None:
    handle = model.get_submodule("blocks.1.up").register_forward_hook(
        lambda module, args, output: output.register_hook(_raise_fault) and None
    )
    with pytest.raises(_Fault):
        loss_of(model, 7).backward()
    handle.remove()


def _interrupt_forward(model: nn.Module) -> None:
    handle = model.get_submodule("blocks.1.up").register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens_of(7))
    handle.remove()


def zero_grad_after_a_failed_backward(set_to_none: bool) -> None:
    """Gradients of the shards are cleared, though the modules were left with gathered parameters."""
    ours, theirs = Trained(), Trained(plain=True)
    shards = list(ours.model.parameters())
    loss_of(ours.model, 0).backward()
    _fail_in_backward(ours.model)
    ours.model.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(each.grad is None for each in shards)
    else:
        assert all(each.grad is not None and not each.grad.any() for each in shards)
    assert ours.step(1) == theirs.step(1)
    ours.check_equals(theirs)


def emergency_save(how: str, folder: str) -> None:
    """After an exception in backward, or an interrupt in forward, the last state is read, saved and trained on."""
    ours, theirs = Trained(), Trained(plain=True)
    assert ours.step(0) == theirs.step(0)
    if how == "backward":
        _fail_in_backward(ours.model)
    else:
        _interrupt_forward(ours.model)
    state = full_state_dict(ours.model, ours.optimizer)
    check_equal("parameter", state["model"], theirs.model.state_dict())
    save(folder, ours.model, ours.optimizer)
    loaded = Trained()
    load(folder, loaded.model, loaded.optimizer)
    for each in (ours, loaded):
        each.model.zero_grad()
    wanted = theirs.step(1)
    for each in (ours, loaded):
        assert each.step(1) == wanted
        each.check_equals(theirs)


def interrupted_then_used(how: str) -> None:
    """What may come first after an interrupted forward: the modules hold shards, or full parameters, or a part runs."""
    ours, theirs = Trained(), Trained(plain=True)
    _interrupt_forward(ours.model)
    if how == "full parameters":
        with full_parameters(ours.model):
            check_equal("parameter", dict(ours.model.state_dict()), theirs.model.state_dict())
    elif how == "unit":
        x = torch.randn(2, 6, ours.model.get_submodule("blocks.1.up").in_features)  # type: ignore[arg-type]
        block = "blocks.1"
        assert torch.equal(ours.model.get_submodule(block)(x), theirs.model.get_submodule(block)(x))
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def step_between_the_backwards_of_two_graphs(how: str) -> None:
    """A graph whose parameters were stepped meanwhile gives no gradients, though later forwards gathered new ones."""
    mesh = init_device_mesh("cpu", (2, 1)) if how == "replicas" else None
    trained = Trained(plain=True) if how == "plain" else Trained(mesh=mesh)
    first, second = loss_of(trained.model, 0), loss_of(trained.model, 1)
    first.backward()
    trained.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    trained.model.zero_grad()
    stale = loss_of(trained.model, 2)
    loss_of(trained.model, 3).backward()
    trained.optimizer.step()
    with torch.no_grad():
        loss_of(trained.model, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    trained.model.zero_grad()
    trained.step(5)


def sends_of_the_user_are_left_alone() -> None:
    """A message that is under way on the same group does not meet a gather, in any pass."""
    model = shard(nn.Linear(4, 4))
    runtime, rank = get_runtime(model), dist.get_rank()
    for number in (256, 512):
        runtime.rewind(replace(runtime.position(), pass_number=number - 1))
        received = torch.zeros(8)
        under_way = dist.isend(torch.full((8,), 7.0), 1, tag=number % 512 << 19) if rank == 0 else None
        weight = model.weight.full_tensor()
        assert torch.equal(model(torch.eye(4)), torch.eye(4) @ weight.T + model.bias.full_tensor())
        if under_way is None:
            dist.recv(received, 0, tag=number % 512 << 19)
            assert received.tolist() == [7.0] * 8
        else:
            under_way.wait()


def replicas_that_begin_apart() -> str:
    """What a rank is told about one replica that was seeded differently in one of its parts."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    if dist.get_rank() == 3:
        nn.init.zeros_(model[1].weight[63])  # type: ignore[arg-type, index]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(MemfitError) as error:
        shard(model, mesh=mesh, units=())
    assert type(model[1].weight) is nn.Parameter  # the model is as it was
    shard(model, mesh=mesh, units=(), from_rank_0=True)
    return str(error.value)


def parameters_that_come_after_shard() -> str:
    """What the first forward says of a head that took the place of a sharded one."""
    ours = Trained(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=(), ignored=["1.bias"])
    model: Any = ours.model
    model.unshard()
    model(torch.ones(1, 4))  # gathered ones and those that were ignored are known
    late: Any = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=())
    late[1] = nn.Linear(4, 4)
    with pytest.raises(StateError) as error:
        late(torch.ones(1, 4))
    return str(error.value)


def compiled_step_beside_a_sharded_model() -> None:
    """The step of a plain model's optimizer is compiled as if nothing were sharded."""
    Trained()
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain(torch.ones(1, 4)).sum().backward()
    before = plain.bias.detach().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert torch.equal(plain.bias, before - 0.5)


def local_parts_are_copied_as_plain_tensors() -> None:
    """What `to_local` gives may be pickled and copied, as FSDP2's may, though it knows its process groups."""
    model = Trained().model
    locals_: dict[str, Any] = {name: each.detach().to_local() for name, each in model.named_parameters()}  # type: ignore[operator]
    file = io.BytesIO()
    torch.save(locals_, file)
    file.seek(0)
    for found in (torch.load(file, weights_only=True), copy.deepcopy(locals_)):
        for name, each in locals_.items():
            assert type(found[name]) is torch.Tensor
            assert torch.equal(found[name], each)
