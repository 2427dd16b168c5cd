"""The methods that `fully_shard` gives a module, on memfit's units: each function runs on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memfit.errors import InputError, StateError
from memfit.sharded import FlatDTensor, get_runtime, register_forward_method, shard
from tests.distributed.sharded_behaviour import loss_of, watched
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_recipes import adamw, assert_same, built, by_fsdp2, by_memfit, train, whole


def parameters_are_gathered_on_demand() -> None:
    """`unshard` and `reshard` change what a module holds, at once or when the handle is waited for."""
    model: Any = built(by_memfit)
    optimizer, block = adamw(model.parameters()), model.blocks[0]
    wanted = block.up.weight.full_tensor().detach()
    block.unshard()
    assert type(block.up.weight) is nn.Parameter and torch.equal(block.up.weight, wanted)
    block.reshard()
    assert isinstance(block.up.weight, FlatDTensor)
    handle = block.unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert torch.equal(block.up.weight, wanted)
    train(model, optimizer, range(1))  # what was left gathered is gathered anew, and freed
    assert isinstance(block.up.weight, FlatDTensor)
    peer = built(by_memfit)
    train(peer, adamw(peer.parameters()), range(1))
    assert_same(whole(model), whole(peer))


def settings_of_fsdp2() -> None:
    """Gradients that are not summed, kept parameters and prefetch lists train as with FSDP2; divisors divide."""
    results = []
    for wrap in (by_memfit, by_fsdp2):
        model: Any = built(wrap)
        optimizer = adamw(model.parameters())
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        assert all(each.grad is None for each in model.parameters())
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_reshard_after_forward(False)
        for first, second in zip(model.blocks[:-1], model.blocks[1:], strict=True):
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
        train(model, optimizer, range(2, 4))
        results.append(whole(model))
    assert_same(*results)
    gradients = []
    for factor in (None, 4.0):
        model = built(by_memfit)
        for module in (model, *model.blocks) if factor is not None else ():
            module.set_gradient_divide_factor(factor)
        loss_of(model, 0).backward()
        gradients.append({name: each.grad.full_tensor() for name, each in model.named_parameters()})
    assert_same({name: each / 2 for name, each in gradients[0].items()}, gradients[1])


def methods_of_fsdp2_are_all_there() -> None:
    """Every public method of FSDP2's modules is there; what would change how it runs and cannot is refused."""
    model: Any = built(by_memfit)
    for name in vars(FSDPModule):
        assert name.startswith("_") or callable(getattr(model.blocks[0], name, None)), name
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(2)
    refused: list[tuple[str, Any]] = [
        ("set_separate_reduce_scatter_group", True),
        ("set_symm_mem_for_comm", "NCCL"),
        ("set_reduce_scatter_max_input_buffers", 0),
    ]
    for name, argument in refused:
        with pytest.raises(InputError, match=name.removeprefix("set_reduce_scatter_")):
            getattr(model, name)(argument)
    optimizer, peer = adamw(model.parameters()), built(by_memfit)
    handle = model.blocks[1].register_forward_hook(_fails)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    handle.remove()
    model.reset_iter_state()
    train(model, optimizer, range(1))
    train(peer, adamw(peer.parameters()), range(1))
    assert_same(whole(model), whole(peer))


def _fails(*_: Any) -> None:
    raise ZeroDivisionError


def gathers_follow_the_settings() -> None:
    """Kept parameters are gathered once a step, and units with a list are gathered with the one that has it."""
    model: Any = built(by_memfit)
    loss_of(model, 0).backward()
    with watched(model) as before:
        loss_of(model, 0).backward()
    model.set_reshard_after_forward(False)
    with watched(model) as kept:
        loss_of(model, 0).backward()
    gathers = [sum(each.startswith("gather") for each in seen) for seen in (before, kept)]
    assert gathers[1] == len(get_runtime(model).units) < gathers[0], (before, kept)
    with pytest.raises(InputError, match="no unit"):
        model.set_modules_to_forward_prefetch([model.blocks[0].up])
    model.set_reshard_after_backward(False)
    optimizer = adamw(model.parameters())
    loss_of(model, 0).backward()
    with watched(model) as left:
        loss_of(model, 0).backward()
    assert all(isinstance(each, FlatDTensor) for each in model.parameters())
    optimizer.step()
    with watched(model) as changed:
        loss_of(model, 0).backward()
    gathers = [sum(each.startswith("gather") for each in seen) for seen in (left, changed)]
    assert gathers == [0, len(get_runtime(model).units)], (left, changed)
    model.set_reshard_after_backward(True)
    loss_of(model, 0).backward()
    assert not any(unit.gathered for unit in get_runtime(model).units)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).relu()

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum() + self.encode(x).mean()

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def other_methods_than_forward() -> None:
    """A method that is registered runs on gathered parameters, has gradients, and may call the module itself."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(_Encoder())
    torch.manual_seed(0)
    model: Any = shard(nn.Sequential(_Encoder()), units=[_Encoder])
    with pytest.raises(StateError, match="register_forward_method"):
        model[0].encode(torch.ones(2, 4))
    for name in ("encode", "score", "fail"):
        register_forward_method(model[0], name)
    for name in ("encode", "score"):
        for each in (plain, model):
            getattr(each[0], name)(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        model[0].fail(torch.ones(2, 4))
    for each in (plain, model):
        each(torch.ones(2, 4)).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad.full_tensor(), other.grad, rtol=1e-6)
    with pytest.raises(InputError, match="has no method 'nothing'"):
        register_forward_method(model[0], "nothing")
    with pytest.raises(InputError, match="no unit"):
        register_forward_method(GPT(), "forward")
