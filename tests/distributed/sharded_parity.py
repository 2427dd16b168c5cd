"""Trains one model by DDP, by FSDP2 and by memfit's sharded runtime, and compares gradients and parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memfit.sharded import UnitOptions, shard
from memfit.sharded.flat_param import FlatShard
from memfit.sharded.fully_shard import get_runtime, no_sync
from tests.distributed.sharded_models import VOCABULARY

Gradients = dict[str, torch.Tensor | None]

_meshes: dict[tuple[int, int], DeviceMesh] = {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train: a model, its units, the options of `shard`, and what it is compared with.

    Paths in a tuple are one unit.
    `micro_batches` of each step are accumulated, all but the last without communication if `quiet`.
    """

    model: Callable[[], nn.Module]
    units: tuple[str | tuple[str, ...], ...] | dict[str, UnitOptions] = ()
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] | None = None
    peers: tuple[str, ...] = ("ddp", "fsdp2")
    steps: int = 3
    micro_batches: int = 1
    quiet: bool = False
    exact: bool = True
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    loss: Callable[[nn.Module, int], torch.Tensor] | None = None


def resolve_mesh(shape: tuple[int, int] | None) -> DeviceMesh | None:
    """A mesh of replicas and shards, made once."""
    if shape is None:
        return None
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    return _meshes[shape]


def language_loss(model: nn.Module, number: int) -> torch.Tensor:
    """The loss on a batch that is this rank's own."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    output = model(tokens)
    return F.cross_entropy(output.float().flatten(0, 1), tokens.flatten())


def train(kind: str, case: Case) -> tuple[list[Gradients], Gradients]:
    """The first and the last step's gradients and the last parameters, all of them whole."""
    torch.manual_seed(0)
    model = _wrapped(kind, case.model(), case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    gradients = []
    loss = case.loss or language_loss
    torch.manual_seed(dist.get_rank())
    for step in range(case.steps):
        for micro_batch in range(case.micro_batches):
            with _silence(kind, model) if case.quiet and micro_batch < case.micro_batches - 1 else nullcontext():
                loss(model, step * case.micro_batches + micro_batch).backward()
        if kind == "plain":
            average(model)
        if step in (0, case.steps - 1):
            gradients.append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        if kind == "memfit":
            check_freed(model)
    return gradients, whole_parameters(model)


def compare(case: Case) -> None:
    """Fail unless all ways to train give the same: bit by bit at two ranks, else up to rounding."""
    gradients, parameters = train("memfit", case)
    assert parameters
    for peer in case.peers:
        their_gradients, their_parameters = train(peer, case)
        for ours, theirs in zip(gradients, their_gradients, strict=True):
            check_equal(f"gradient against {peer}", ours, theirs, exact=case.exact)
        check_equal(f"parameter against {peer}", parameters, their_parameters, exact=case.exact)


def check_equal(what: str, ours: Gradients, theirs: Gradients, *, exact: bool = True) -> None:
    """Fail at the first tensor that differs."""
    assert ours.keys() == theirs.keys(), (what, ours.keys() ^ theirs.keys())
    for name, our in ours.items():
        their = theirs[name]
        if our is None or their is None:
            assert our is their, f"{what} {name}: {our} and {their}"
        elif exact and dist.get_world_size() == 2:
            assert torch.equal(our, their), f"{what} {name}: differs by {(our - their).abs().max()}"
        else:
            rounding = {"rtol": 1e-4, "atol": 3e-6} if our.dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 1e-3}
            torch.testing.assert_close(our, their, **rounding, msg=lambda text, name=name: f"{what} {name}: {text}")


def check_freed(model: nn.Module) -> None:
    """Fail if gathered memory is left, or gradients are not those of the shards."""
    for unit in get_runtime(model).units:
        for flat in unit.flats:
            left = [whole for whole in flat._unsharded.values() if whole.bytes and whole.allocated]
            assert not left, f"{unit} is still gathered"
            for whole in flat._unsharded.values():
                assert all(parameter.grad is None for parameter in whole.parameters), unit
            assert flat._kept is None, unit
        assert not unit.in_flight, unit
        assert all(not gradients.waiting and not gradients.under_way for gradients in unit.gradients), unit
    shards = {parameter for unit in get_runtime(model).units for flat in unit.flats for parameter in flat.parameters}
    assert {parameter for parameter in model.parameters() if parameter in shards} == shards


def whole_gradients(model: nn.Module) -> Gradients:
    """All gradients under their names, gathered from all ranks; None where there is none."""
    return _whole(model, lambda parameter: parameter.grad)


def whole_parameters(model: nn.Module) -> Gradients:
    """All parameters under their names, gathered from all ranks."""
    return _whole(model, lambda parameter: parameter.detach())


def _whole(model: nn.Module, value: Callable[[torch.Tensor], torch.Tensor | None]) -> Gradients:
    if isinstance(model, DistributedDataParallel):
        model = model.module
    found: Gradients = {}
    runtime = model.__dict__.get("_memfit_runtime")
    if runtime is not None:
        for unit in runtime.units:
            for flat in unit.flats:
                found.update(_gathered(flat, [value(parameter) for parameter in flat.parameters]))
    for name, parameter in model.named_parameters():
        own = value(parameter)
        if name not in found:
            found[name] = own.full_tensor() if isinstance(own, DTensor) else None if own is None else own.clone()
    return dict(sorted(found.items()))


def _gathered(flat: FlatShard, own: Sequence[torch.Tensor | None]) -> Gradients:
    """Tensors that lie as the parameters of a flat shard do, whole."""
    dtype = next((each.dtype for each in own if each is not None), flat.dtype)
    part = torch.zeros(flat.layout.shard_elements, dtype=dtype)
    there = torch.tensor([each is not None for each in own])
    for number, each in enumerate(own):
        if each is not None:
            flat.local(number, part).copy_(each.to_local())
    parts = [torch.empty_like(part) for _ in range(flat.link.ranks)]
    everywhere = [torch.empty_like(there) for _ in range(flat.link.ranks)]
    dist.all_gather(parts, part, group=flat.link.group)
    dist.all_gather(everywhere, there, group=flat.link.group)
    assert all(torch.equal(each, there) for each in everywhere), "a gradient is None on some ranks only"
    whole = torch.cat(parts)
    return {
        slot.names[0]: whole[slot.begin : slot.end].view(slot.shape).clone() if there[number] else None
        for number, slot in enumerate(flat.layout.slots)
    }


def _wrapped(kind: str, model: nn.Module, case: Case) -> nn.Module:
    if kind == "memfit":
        return shard(
            model, mesh=resolve_mesh(case.mesh), **({"units": case.units} if case.units else {}), **case.options
        )
    if kind == "fsdp2":
        paths = case.units or [name for name, _ in model.named_modules() if name.rpartition(".")[0].endswith("blocks")]
        for path in sorted(paths, key=len, reverse=True):
            modules = [model.get_submodule(each) for each in ((path,) if isinstance(path, str) else path)]
            fully_shard(modules, mesh=resolve_mesh(None), mp_policy=case.policy)
        return fully_shard(model, mp_policy=case.policy)
    if kind == "plain":
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=kind == "ddp unused")


def average(model: nn.Module) -> None:
    """What DDP does, for models that it refuses: a parameter that no rank used gets no gradient."""
    for parameter in model.parameters():
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used)
        if used > 0:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient.div_(dist.get_world_size())
            dist.all_reduce(gradient)
            parameter.grad = gradient


def _silence(kind: str, model: Any) -> AbstractContextManager[Any]:
    if kind == "memfit":
        return no_sync(model)
    if kind == "fsdp2":
        return _Unsynced(model)
    return model.no_sync()


class _Unsynced:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._model.set_requires_gradient_sync(True)
