"""Parameters that are tensor subclasses, beside FSDP2: each function runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from memfit.errors import InputError
from memfit.sharded import FlatDTensor, full_parameters, full_state_dict, get_runtime, load_state_dict, save, shard
from memfit.sharded.unit import State
from tests.distributed.tensor_subclasses import ByteWeight, CastWeight, PairWeight

Make = Callable[[torch.Tensor], torch.Tensor]


class Seen(nn.Linear):
    """Notes what kind of weight its forward has."""

    kinds: set[type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kinds = {*getattr(self, "kinds", set()), type(self.weight)}
        return super().forward(x)


def built(make: Make, sizes: tuple[int, ...] = (8, 16, 8)) -> nn.Sequential:
    """Blocks with a plain norm and a weight of the subclass; the numbers of rows may be odd."""
    torch.manual_seed(0)
    blocks = []
    for given, wanted in pairwise(sizes):
        linear = Seen(given, wanted)
        linear.weight = nn.Parameter(make(linear.weight.detach().clone()))
        blocks.append(nn.Sequential(nn.LayerNorm(given), linear, nn.ReLU()))
    return nn.Sequential(*blocks)


def by_fsdp2(model: nn.Sequential, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def by_memfit(model: nn.Sequential, **options: Any) -> nn.Module:
    return shard(model, units=list(model), **options)


def trained(
    model: Any, width: int, steps: int = 3, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.optim.Optimizer]:
    """Return the losses and the norms of all gradients, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **options)
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        loss = model(torch.randn(4, width, generator=generator)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        norm: Any = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, optimizer


def rows(model: Any) -> list[torch.Tensor]:
    """Return this rank's rows of the subclass weights, plain."""
    return [plain(block[1].weight.to_local()) for block in model]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, PairWeight):
        return tensor.value()
    return (tensor.inner if isinstance(tensor, CastWeight) else tensor).clone()


def trains_as_with_fsdp2() -> None:
    """Losses and weights are FSDP2's to the bit; the forward has the class that the extension made; foreach or not."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cases: tuple[tuple[Make, type, tuple[int, ...], bool, bool | None, dict[str, Any]], ...] = (
        (CastWeight, ByteWeight, (8, 16, 8), True, None, {}),
        (CastWeight, ByteWeight, (8, 16, 8), True, False, {"mp_policy": low, "reshard_after_forward": False}),
        (CastWeight, ByteWeight, (8, 16, 8), True, False, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (PairWeight.of, PairWeight, (8, 16, 8), False, False, {}),
        (PairWeight.of, PairWeight, (6, 5, 7), True, False, {}),  # rows that ranks cannot divide evenly
    )
    for make, inside, sizes, trains, foreach, options in cases:
        exact, close = [], []
        for wrap in (by_fsdp2, by_memfit):
            plain = built(make, sizes)
            for block in plain:
                block[1].weight.requires_grad_(trains)
            model: Any = wrap(plain, **options)
            losses, norms, _ = trained(model, sizes[0], foreach=foreach)
            assert all(block[1].kinds == {inside} for block in model)
            exact.append([*losses, *rows(model)])
            close.append(norms)  # of other elements on each rank, which are added up in another order
        for number, (one, other) in enumerate(zip(*exact, strict=True)):
            assert torch.equal(one, other), (make, sizes, options, number, one, other)
        torch.testing.assert_close(*close)


def trains_on_replicas() -> None:
    """Replicas that shard within have the gradients of FSDP2's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for wrap in (fully_shard, shard):
        model: Any = wrap(built(PairWeight.of, (6, 5, 7)), mesh=mesh)
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
        results.append([block[1].weight.grad.full_tensor() for block in model])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class Failing(CastWeight):
    """A weight whose gather fails when it is told to."""

    fails = ""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        if self.fails == "pre":
            raise ValueError("not now")
        return super().fsdp_pre_all_gather(mesh)

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails == "post":
            raise ValueError("not now")
        return super().fsdp_post_all_gather(*args, **kwargs)


def in_inference_mode_and_after_errors() -> None:
    """A model runs in inference mode, first or between steps; an error of an extension point leaves nothing behind."""
    model, peer = by_memfit(built(Failing)), by_memfit(built(CastWeight))
    given = torch.ones(2, 8)
    with torch.inference_mode():
        wanted = peer(given)
        assert torch.equal(model(given), wanted)
    for Failing.fails in ("pre", "post"):
        with pytest.raises(ValueError, match="not now"):
            model(given)
        assert all(unit.state is State.IDLE and not unit.in_flight for unit in get_runtime(model).units)
        Failing.fails = ""
        assert torch.equal(model(given), wanted)
    for each in (model, peer):
        trained(each, 8)
    assert all(torch.equal(*each) for each in zip(rows(model), rows(peer), strict=True))


def state_of_subclasses(folder: str) -> None:
    """Whole weights are of their class again; state goes out and in, by DCP too; memfit's own save refuses."""
    model: Any = by_memfit(built(CastWeight))
    optimizer = trained(model, 8)[-1]
    before = rows(model)
    weight = model[0][1].weight
    assert isinstance(weight, FlatDTensor) and isinstance(weight.to_local(), CastWeight)
    whole = weight.full_tensor()
    assert isinstance(whole, CastWeight) and whole.shape == (16, 8)
    state = full_state_dict(model, optimizer)
    assert torch.equal(state["model"]["0.1.weight"].inner, whole.inner)
    assert state["optimizer"]["state"]["0.1.weight"]["exp_avg"].shape == (16, 8)
    other: Any = by_memfit(built(CastWeight))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-4)
    load_state_dict(other, state, other_optimizer)
    assert all(torch.equal(one, two) for one, two in zip(before, rows(other), strict=True))
    trained(model, 8, 1)
    with full_parameters(other, write_back=True):
        assert isinstance(other[0][1].weight, CastWeight) and torch.equal(other[0][1].weight.inner, whole.inner)
        with torch.no_grad():
            other[0][1].weight.inner.add_(1)
    assert torch.equal(rows(other)[0], before[0] + 1)
    with pytest.raises(InputError, match="tensor subclass"):
        save(folder, model)
    torch.serialization.add_safe_globals([CastWeight])
    dcp.save({"model": other.state_dict()}, checkpoint_id=f"{folder}/dcp")
    again: Any = by_memfit(built(CastWeight))
    target = {"model": again.state_dict()}
    dcp.load(target, checkpoint_id=f"{folder}/dcp")
    again.load_state_dict(target["model"])
    assert all(torch.equal(one, two) for one, two in zip(rows(other), rows(again), strict=True))


class Unknowing(torch.Tensor):
    """A subclass that says nothing of gathers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Half(Unknowing):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise NotImplementedError


class ThreeArguments(Half):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError

    def fsdp_post_all_gather(self) -> Any:
        raise NotImplementedError


class Labelled(nn.Parameter):
    """A class that only names a parameter."""


def what_cannot_be_gathered_is_refused() -> None:
    """Never made plain in silence: the error says what to do, and nothing has changed."""
    for kind, said in ((Unknowing, "extension points"), (Half, "needs both"), (ThreeArguments, "takes 3 arguments")):
        model: Any = built(lambda value, kind=kind: value.as_subclass(kind))
        with pytest.raises(InputError, match=said):
            by_memfit(model)
        assert type(model[0][1].weight) is kind
        shard(model, units=list(model), ignored=[block[1] for block in model])
        assert type(model[0][1].weight) is kind
    with pytest.raises(InputError, match="from_rank_0"):
        shard(built(CastWeight), from_rank_0=True)
    with pytest.raises(InputError, match="lazy"):
        shard(nn.Sequential(nn.LazyLinear(4)))
    model = built(lambda value: value)
    model[0][1].weight = Labelled(model[0][1].weight.detach())
    model = by_memfit(model)
    model(torch.ones(2, 8)).sum().backward()
    assert model[0][1].kinds == {Labelled}
