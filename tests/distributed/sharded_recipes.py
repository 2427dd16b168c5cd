"""What scripts do with FSDP2's parameters, done with memfit's: each function runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, distribute_tensor

from memfit.errors import InputError, StateError
from memfit.sharded import FlatDTensor, full_state_dict, shard
from tests.distributed.sharded_behaviour import loss_of
from tests.distributed.sharded_models import GPT

Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, **options)


def by_memfit(model: nn.Module) -> nn.Module:
    return shard(model)


def by_fsdp2(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def built(wrap: Callable[[nn.Module], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return wrap(GPT())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().detach() for name, each in model.named_parameters() if isinstance(each, DTensor)}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


def checkpoint_with_dcp(folder: str) -> None:
    """Save and load as FSDP2's recipe does, and go on as if nothing had happened; a peer's file is loaded, too."""
    for wrap in (by_memfit, by_fsdp2):
        model = built(wrap)
        optimizer = adamw(model.parameters())
        train(model, optimizer, range(3))
        path = f"{folder}/{wrap.__name__}"
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
        saved = whole(model)
        train(model, optimizer, range(3, 5))
        for again in (by_memfit, by_fsdp2):
            other = built(again, seed=1)
            other_optimizer = adamw(other.parameters())
            state, of_optimizer = get_state_dict(other, other_optimizer)
            dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
            set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
            assert_same(saved, whole(other))
            if again is wrap or dist.get_world_size() == 2:  # else sums are taken in another order
                train(other, other_optimizer, range(3, 5))
                assert_same(whole(model), whole(other))


def asynchronous_checkpoint(folder: str) -> None:
    """`async_save` writes the state of when it was called, whatever its stager, while training goes on."""
    writers = dist.new_group(backend="gloo")  # its thread's collectives must not meet those of the training
    for stager in (None, BlockingAsyncStager()):
        model = built(by_memfit)
        optimizer = adamw(model.parameters())
        train(model, optimizer, range(2))
        saved = whole(model)
        state, of_optimizer = get_state_dict(model, optimizer)
        path = f"{folder}/{type(stager).__name__}"
        given: dict[str, Any] = {"model": state, "optimizer": of_optimizer}
        under_way: Any = dcp.async_save(given, checkpoint_id=path, process_group=writers, async_stager=stager)
        train(model, optimizer, range(2, 4))
        under_way.result()
        other = built(by_memfit, seed=1)
        other_optimizer = adamw(other.parameters())
        state, of_optimizer = get_state_dict(other, other_optimizer)
        dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
        set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
        assert_same(saved, whole(other))
        train(other, other_optimizer, range(2, 4))
        assert_same(whole(model), whole(other))


def load_with_dcp(folder: str) -> dict[str, torch.Tensor]:
    """Load what another number of ranks saved, and return the whole parameters after a step on the same batch."""
    model = built(by_memfit, seed=2)
    optimizer = adamw(model.parameters())
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=f"{folder}/by_memfit")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # the same on any number of ranks
    optimizer.step()
    return whole(model)


def whole_state_of_torch() -> None:
    """`torch.distributed.checkpoint.state_dict` gives and takes whole state, of the model and of the optimizer."""
    model = built(by_memfit)
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, of_optimizer = (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )
    wanted = full_state_dict(model, optimizer)
    if dist.get_rank() == 0:  # as with FSDP2, rank 0 has it
        assert_same(state, wanted["model"])
        for name, values in wanted["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(of_optimizer["state"][name][key], value), (name, key)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other = built(by_memfit, seed=1)
    other_optimizer = adamw(other.parameters())
    set_model_state_dict(other, state, options=options)
    # a copy, because torch makes the tensor of `step` that it is given the optimizer's own
    set_optimizer_state_dict(other, other_optimizer, deepcopy(of_optimizer), options=options)
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(each, its_optimizer, range(2, 4))
    assert_same(whole(model), whole(other))


def state_by_distribute_tensor() -> None:
    """FSDP2's tutorial loads a whole state dict by `distribute_tensor` and `load_state_dict(assign=True)`."""
    torch.manual_seed(3)
    full = GPT().state_dict()
    model = built(by_memfit)
    optimizer = adamw(model.parameters())
    held = dict(model.named_parameters())
    sharded = {
        name: nn.Parameter(distribute_tensor(value, held[name].device_mesh, held[name].placements))
        if name in held
        else value
        for name, value in full.items()
    }
    model.load_state_dict(sharded, assign=True)
    assert_same(whole(model), {name: full[name] for name in held})
    train(model, optimizer, range(2))
    peer = built(by_fsdp2)
    peer.load_state_dict(
        {
            name: distribute_tensor(full[name], each.device_mesh, each.placements)
            if isinstance(each, DTensor)
            else full[name]
            for name, each in peer.state_dict().items()
        }
    )
    train(peer, adamw(peer.parameters()), range(2))
    assert_same(whole(model), whole(peer))


def clipping_and_scaling_of_torch() -> None:
    """`clip_grad_norm_` and `GradScaler` of torch see whole gradients; what one rank finds infinite, all do."""
    found: dict[str, list[Any]] = {}
    for wrap in (by_memfit, by_fsdp2):
        model = built(wrap)
        loss_of(model, 0).backward()
        for foreach in (None, True, False):
            for norm_type in (2.0, 1.0, float("inf")):
                norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type, foreach=foreach)
                found.setdefault(wrap.__name__, []).append(norm.full_tensor())  # as FSDP2's scripts have it
        before: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        after: Any = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        assert before.full_tensor().item() > 0.01
        assert after.full_tensor().item() == pytest.approx(0.01, rel=1e-3)
    for ours, theirs in zip(found["by_memfit"], found["by_fsdp2"], strict=True):
        assert type(ours) is type(theirs) is torch.Tensor
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    model = built(by_memfit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, 0)).backward()
    if dist.get_rank() == 1:
        next(each for each in model.parameters() if each.to_local().numel()).grad.to_local()[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_same(before, whole(model))


def optimizers_of_torch() -> None:
    """Optimizers step as on a plain model, by loops, lists and fused; groups by the number of dimensions are right."""
    for kind in (
        lambda parameters: adamw(parameters),
        lambda parameters: adamw(parameters, foreach=True),
        lambda parameters: adamw(parameters, fused=True),
        lambda parameters: adamw(parameters, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
        lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
        lambda parameters: torch.optim.Adadelta(parameters),
    ):
        results = []
        for wrap in (by_memfit, by_fsdp2):
            model = built(wrap)
            matrices = [each for each in model.parameters() if each.dim() >= 2]
            others = [each for each in model.parameters() if each.dim() < 2]
            assert matrices and others
            optimizer = kind([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
            train(model, optimizer, range(2))
            results.append(whole(model))
        assert_same(*results)


def losses_of_parameters() -> None:
    """What a loss computes from sharded parameters, outside of the model, has the gradient of the whole ones."""
    torch.manual_seed(0)
    plain = GPT()
    model = shard(GPT())
    model.load_state_dict(plain.state_dict())

    def loss(parameters: Any) -> torch.Tensor:
        parameters = list(parameters)
        squares = sum(each.square().sum() for each in parameters)
        return squares + parameters[0].norm() + parameters[1].abs().mean() + parameters[-1].amax()

    ours, theirs = loss(model.parameters()), loss(plain.parameters())
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    ours.backward()
    theirs.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-7)
    first, of_plain = next(model.parameters()), next(plain.parameters())
    first.grad = of_plain.grad = None
    (first.full_tensor() * torch.arange(of_plain.numel()).view(of_plain.shape)).sum().backward()
    (of_plain * torch.arange(of_plain.numel()).view(of_plain.shape)).sum().backward()
    assert torch.equal(first.grad.full_tensor(), of_plain.grad)


def values_are_drawn_as_on_one_device() -> None:
    """`reset_parameters` and `nn.init` after sharding give what a plain model gets from the same seed."""
    model, plain = shard(GPT()), GPT()
    for each in (model, plain):
        torch.manual_seed(7)
        for module in each.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.kaiming_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.Embedding):
                module.reset_parameters()
    assert_same(whole(model), {name: each.detach() for name, each in plain.named_parameters()})


def what_is_refused() -> None:
    """An op that would see this rank's elements only is an error on every rank, and changes nothing."""
    model = built(by_memfit)
    weight = next(each for each in model.parameters() if each.dim() == 2)
    assert isinstance(weight, FlatDTensor) and isinstance(weight, nn.Parameter)
    for number, act in enumerate(
        (
            lambda: weight @ weight.detach(),
            lambda: weight[0],
            lambda: weight.sum(dim=0),
            lambda: weight.view(-1),
            lambda: torch.zeros(weight.shape).add_(weight.detach()),
            lambda: torch.cat([weight.detach(), weight.detach()]),
            lambda: weight.detach() + torch.ones(weight.shape[1]),
        )
    ):
        refused = ""
        try:
            act()
        except StateError as error:
            refused = str(error)
        assert "rank only" in refused or "no rows and columns" in refused, number
    with pytest.raises(StateError, match="before shard"):
        weight.data = weight.data.double()
    before = whole(model)
    weight.data = weight.data * 2
    assert torch.equal(
        weight.full_tensor(), before[next(n for n, each in model.named_parameters() if each is weight)] * 2
    )


def _small(seed: int = 0) -> nn.Sequential:
    """Weights and biases of which a rank may have no element."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 1))


def _without_first(value: torch.Tensor) -> torch.Tensor:
    factors = torch.ones(value.shape)
    factors.view(-1)[0] = float("nan")
    return value.detach() * factors


_RIGHT: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "smallest of uint8": lambda weight, _: (weight.abs() * 4).to(torch.uint8).min(),
    "smallest of int64": lambda weight, _: (weight * 100).long().sub_(2**62).sub_(2**62).min(),
    "smallest of truth values": lambda weight, _: (weight > 0).min(),
    "all of uint8": lambda weight, _: (weight.abs() * 2).to(torch.uint8).all(),
    "how many are not zero": lambda weight, _: torch.count_nonzero(weight),
    "largest beside NaN": lambda weight, _: _without_first(weight).max(),
    "smallest beside NaN": lambda weight, _: _without_first(weight).amin(),
    "infinity norm beside NaN": lambda weight, _: torch.linalg.vector_norm(_without_first(weight), float("inf")),
    "a negative norm": lambda _, bias: torch.linalg.vector_norm(bias, -1),
    "a complex norm": lambda weight, _: torch.linalg.vector_norm(weight.to(torch.complex64)),
    "NaN anywhere": lambda weight, _: torch.isnan(_without_first(weight)).any(),
    "where": lambda weight, _: torch.where(weight > 0, weight, 0.0),
    "times a parameter of one number": lambda weight, bias: weight * bias,
    "list times one number": lambda weight, bias: torch._foreach_mul([weight.detach()], [bias.detach()])[0],
    "norms of sharded and whole": lambda weight, _: torch.stack(torch._foreach_norm([weight, torch.ones(2)])),
    "sharded and whole added": lambda weight, _: torch._foreach_add(
        [torch.ones(2), weight.detach()], [torch.ones(2), torch.ones(5, 3)]
    )[1],
    "drawn": lambda weight, _: (torch.manual_seed(1), torch.randint_like(weight.detach(), 5))[1],
    "dropped": lambda weight, _: (torch.manual_seed(1), torch.dropout(weight.detach(), 0.5, True))[1],
    "copied": lambda weight, _: deepcopy(weight),
}
"""Ops of a weight of 5 x 3 and a bias of 1 that give what they give for whole tensors."""

_REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "a draw that reads the values": lambda weight, *_: torch.bernoulli(weight.sigmoid()),
    "a draw around the values": lambda weight, *_: torch.normal(weight, 1.0),
    "rows and columns": lambda weight, _, row: weight * row,
    "a row and rows": lambda weight, _, row: row * weight,
    "a list of rows and columns": lambda weight, _, row: torch._foreach_mul([weight], [row]),
    "a sum into a tensor": lambda weight, *_: torch.sum(weight, (0, 1), out=torch.zeros(())),
    "a dimension twice": lambda weight, *_: weight.sum(dim=(0, 0)),
    "two results": lambda weight, *_: torch.frexp(weight, out=(torch.zeros(5, 3), torch.zeros(5, 3).int())),
    "a list of sums": lambda weight, *_: torch._foreach_max([weight, torch.ones(2)]),
    "a list of power sums": lambda weight, *_: torch._foreach_powsum([weight], 2),
    "into whole tensors": lambda weight, *_: torch._foreach_add_([torch.zeros(5, 3)], [weight]),
    "copies into whole tensors": lambda weight, *_: torch._foreach_copy_([torch.zeros(5, 3)], [weight]),
    "an average in whole tensors": lambda weight, *_: torch._foreach_lerp_([torch.zeros(5, 3)], [weight], 0.5),
    "a vector": lambda *values: nn.utils.parameters_to_vector(values),
    "another shape": lambda weight, *_: weight.unsqueeze_(0),
}


def operations_on_parameters() -> None:
    """An op on sharded parameters gives what it gives on whole ones, or it is refused, on every rank alike."""
    plain, model = _small(), shard(_small())
    for name, act in _RIGHT.items():
        with torch.no_grad():
            expected = act(plain[0].weight, plain[2].bias)
            found = act(model[0].weight, model[2].bias)  # type: ignore[index]
        found = found.full_tensor() if isinstance(found, FlatDTensor) else found
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        assert torch.allclose(found, expected, equal_nan=True), (name, found, expected)
    assert isinstance(deepcopy(model[0].weight), nn.Parameter)  # type: ignore[index]
    values = [each.detach() for each in (model[0].weight, model[2].bias, model[1].bias)]  # type: ignore[index]
    before = whole(model)
    for name, refused in _REFUSED.items():
        with pytest.raises(StateError, match=r"rank only|no rows and columns"):
            raise AssertionError(f"{name} gave {refused(*values)}")
    assert_same(whole(model), before)
    for unable in ("numpy", "tolist"):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            getattr(values[0], unable)()


def loops_of_torch() -> None:
    """What loops do around steps: optimizers that must be refused, averages, schedulers, gradients that are changed."""
    ranks = range(dist.get_world_size())
    inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in ranks]

    def loss(model: nn.Module, whole_batch: bool = False) -> torch.Tensor:
        given = torch.cat(inputs) if whole_batch else inputs[dist.get_rank()]
        return model(given).square().mean()

    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
        model = shard(_small())
        before = whole(model)
        chosen = [each for each in model.parameters() if kind is not torch.optim.Muon or each.dim() == 2]
        optimizer = kind(chosen)
        loss(model).backward()
        with pytest.raises(StateError, match="rank only"):
            optimizer.step(partial(loss, model))
        assert_same(whole(model), before)
    with pytest.raises(StateError, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(model)
    results = []
    for model in (shard(_small()), _small()):
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(3):
            penalty = 0.1 * sum(each.sum() for each in model.parameters() if each.requires_grad)
            scaler.scale(loss(model, whole_batch=bool(results)) + penalty).backward()
            scaler.unscale_(optimizer)
            for each in model.parameters():
                assert (each.grad is not None) == each.requires_grad
                if each.grad is not None:
                    each.grad.mul_(0.5)
            model[2].bias.grad = None  # type: ignore[index]
            model[1].bias.grad.zero_()  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model[0].weight.requires_grad_(number == 1)  # type: ignore[index]
        results.append({**whole(model)} or {name: each.detach() for name, each in model.named_parameters()})
    for name, value in results[0].items():
        assert torch.allclose(value, results[1][name], rtol=1e-4, atol=1e-6), name


def hooks_and_gathered_modules() -> None:
    """A hook that would never run is refused; values loaded while a unit is gathered are not lost."""
    model = _small()
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match=r"parameter '0\.weight' has a hook"):
        shard(model)
    handle.remove()
    shard(model)
    with pytest.raises(StateError, match="would never run"):
        model[0].weight.register_hook(lambda gradient: gradient)
    ran: list[str] = []
    for name, each in model.named_parameters():
        each.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    model(torch.ones(2, 3)).sum().backward()
    assert sorted(ran) == sorted(name for name, _ in model.named_parameters())
    other = _small(seed=1).state_dict()
    for unit in (model, *model.children()):
        if hasattr(unit, "unshard"):
            unit.unshard()
    model.load_state_dict(other)
    assert_same(whole(model), dict(other))
    with torch.no_grad():
        plain = _small(seed=1)
        assert torch.allclose(model(torch.ones(2, 3)), plain(torch.ones(2, 3)))
    assert_same(whole(model), dict(other))


def several_optimizers_in_backward() -> None:
    """Each of the optimizers that were registered for a parameter steps it, and then the gradient goes."""
    ours, theirs = shard(_small()), shard(_small())
    for rate in (0.1, 0.2):
        _apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": rate})
    for model in (ours, theirs):
        model(torch.ones(2, 3)).sum().backward()
    for rate in (0.1, 0.2):
        torch.optim.SGD(theirs.parameters(), lr=rate).step()
    assert all(each.grad is None for each in ours.parameters())
    assert_same(whole(ours), whole(theirs))
