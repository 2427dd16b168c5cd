"""Models on meshes of several dimensions, sharded beside tensor, sequence and expert parallel, and FSDP2's beside them.

Each function runs on every rank.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from memfit.errors import InputError
from memfit.sharded import (
    FlatDTensor,
    Precision,
    RankMismatch,
    full_parameters,
    full_state_dict,
    move_optimizer,
    save,
    shard,
)
from tests.distributed.sharded_recipes import adamw, assert_same

WIDTH, HIDDEN, TOKENS = 16, 24, 8
Wrap = Callable[..., nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TENSOR_PARALLEL: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PARALLEL: dict[str, ParallelStyle] = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


@cache
def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    """Return the same mesh in every test: its groups are made once."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parallel(mesh: DeviceMesh, plan: dict[str, ParallelStyle] | None = None, seed: int = 0) -> Model:
    """Return a model whose blocks are tensor parallel, and whose head is plain."""
    torch.manual_seed(seed)
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan or TENSOR_PARALLEL)
    return model


def by_memfit(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """FSDP2's recipe, but for the name of the function."""
    for block in model.blocks:
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def by_fsdp2(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def at_once(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return shard(model, mesh=mesh, **options)


def batch(number: int, data_rank: int) -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * number + data_rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, data_rank: int) -> list[float]:
    """Train on batches that ranks of `tp` share; return norms of the gradients."""
    norms = []
    for number in steps:
        model(batch(number, data_rank)).square().mean().backward()
        squares = [each.grad.full_tensor().square().sum() for each in model.parameters() if each.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().detach() for name, each in model.named_parameters() if isinstance(each, DTensor)}


def parity_with_fsdp2() -> None:
    """Tensor and sequence parallel beside sharding, at 2 x 2 ranks, to FSDP2's bits."""
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    for plan in (TENSOR_PARALLEL, SEQUENCE_PARALLEL):
        results = []
        for wrap in (at_once, by_memfit, by_fsdp2):
            model = wrap(parallel(mesh, plan), mesh["dp"])
            norms = train(model, adamw(model.parameters()), range(3), rank)
            results.append((norms, whole(model)))
        for norms, parameters in results[:2]:
            assert norms == results[2][0]
            assert_same(parameters, results[2][1])


def parity_in_three_dimensions() -> None:
    """Replicas that shard tensor parallel models, in the shapes that four ranks have, to FSDP2's bits."""
    for sizes in ((2, 2, 1), (1, 2, 2), (2, 1, 2)):
        mesh = mesh_of(*sizes, names=("replicate", "shard", "tp"))
        data = mesh["replicate", "shard"]
        rank = mesh["replicate"].get_local_rank() * sizes[1] + mesh["shard"].get_local_rank()
        results = []
        for wrap in (at_once, by_memfit, by_fsdp2):
            model = wrap(parallel(mesh), data)
            norms = train(model, adamw(model.parameters()), range(2), rank)
            results.append((norms, whole(model)))
        weight = model.blocks[0].up.weight  # type: ignore[index, union-attr]
        assert weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
        for norms, parameters in results[:2]:
            assert norms == results[2][0], sizes
            assert_same(parameters, results[2][1])


class Experts(nn.Module):
    """Experts that ranks of `tp` share: each computes its own, and all add up what they found."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        hidden = torch.einsum("btw,ewh->ebth", x, up).relu()
        return torch.einsum("ebth,ehw->btw", hidden, down)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale


def expert_parallel() -> None:
    """Experts divided over one dimension and sharded over the other, beside plain parameters, to FSDP2's bits."""
    mesh = mesh_of(2, 2)
    results = []
    for wrap in (at_once, by_memfit, by_fsdp2):
        torch.manual_seed(0)
        model = Mixture()
        for block in model.blocks:
            for name, parameter in list(block.named_parameters()):
                distributed = distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])
                block.register_parameter(name, nn.Parameter(distributed))
        model.scale = nn.Parameter(torch.ones(1))  # FSDP2 takes no scalars
        wrap(model, mesh["dp"])
        norms = train(model, adamw(model.parameters()), range(2), dist.get_rank())
        results.append((norms, {name: each for name, each in whole(model).items() if name != "scale"}))
        assert tuple(model.scale.shape) == (1,)
    for norms, parameters in results[:2]:
        assert norms[0] == results[2][0][0]
        assert_same(parameters, results[2][1])


class Chosen(nn.Module):
    """An expert of which only one rank of `tp` gets something to do."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.used = mesh.get_local_rank() == 0
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.expert = nn.Parameter(distribute_tensor(torch.ones(2, WIDTH), mesh, [Shard(0)]))
        self.unused = nn.Parameter(distribute_tensor(torch.ones(2, WIDTH), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.expert.to_local()  # type: ignore[operator]
        return x * expert.sum() if self.used else x.detach() + self.blocks[0](x)


def experts_without_work() -> None:
    """An expert that another rank used has a gradient on all ranks, of zeros; one that no rank used has none."""
    mesh = mesh_of(2, 2)
    model = shard(Chosen(mesh["tp"]), mesh=mesh["dp"], units=[])
    model(batch(0, dist.get_rank())).sum().backward()
    assert model.unused.grad is None and model.expert.grad is not None
    rows = model.expert.grad.full_tensor().abs().sum(1)
    assert rows[0] > 0 and rows[1] == 0
    names = [name for name, each in model.named_parameters() if each.grad is not None]
    assert names == ["expert", *(name for name, _ in model.named_parameters() if name.startswith("blocks.0"))]
    gradients = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters() if each.grad is not None])
    assert torch.isfinite(gradients).all() and torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def the_last_rank_fails(how: str, timeout_s: float) -> tuple[str, float]:
    """Return the error that a rank gets when the last one fails in a forward, and after how many seconds."""
    mesh = mesh_of(2, 2)
    model: Any = shard(parallel(mesh), mesh=mesh["dp"], timeout=timedelta(seconds=timeout_s))
    if how != "takes another order":  # in the first pass
        train(model, adamw(model.parameters()), range(1), mesh["dp"].get_local_rank())
    if dist.get_rank() == 3:
        if how == "dies":
            model.blocks[1].register_forward_pre_hook(lambda *_: os._exit(1))
        elif how == "stops":
            model.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        else:
            blocks = model.blocks._modules
            blocks["0"], blocks["1"] = blocks["1"], blocks["0"]
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model(batch(1, 0)).square().mean().backward()
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


def parameters_know_both_dimensions() -> None:
    """Outside of a forward a parameter is a DTensor on both meshes; inside, that of tensor parallel."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    plain = Model()
    model = at_once(parallel(mesh), mesh["dp"])
    seen: list[Any] = []
    model.blocks[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))  # type: ignore
    out = model(batch(0, mesh["dp"].get_local_rank()))
    assert isinstance(seen[0], DTensor) and not isinstance(seen[0], FlatDTensor)
    assert seen[0].device_mesh == mesh["tp"] and seen[0].placements == (Shard(0),)
    assert torch.allclose(out, plain(batch(0, mesh["dp"].get_local_rank())), atol=1e-6)
    held, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    for name, parameter in held.items():
        value = wanted[name].detach()
        assert isinstance(parameter, FlatDTensor) and parameter.shape == value.shape
        assert torch.equal(parameter.full_tensor(), value)
        with torch.no_grad():
            assert torch.allclose(parameter.sum(), value.sum(), atol=1e-5)
            assert torch.allclose(parameter.mean(), value.mean(), atol=1e-6)
            assert torch.allclose(parameter.norm(), value.norm())
            assert torch.equal(parameter.amax(), value.amax()) and torch.equal(parameter.min(), value.min())
            assert torch.count_nonzero(parameter) == torch.count_nonzero(value)
            assert torch.equal(parameter, value) and not torch.equal(parameter, value + 1)
        assert torch.equal((parameter.detach() * 2 + value).full_tensor(), value * 3)
    up, down, head = held["blocks.0.up.weight"], held["blocks.0.down.weight"], held["head.weight"]
    for each, placement in ((up, Shard(0)), (down, Shard(1))):
        assert each.device_mesh.mesh_dim_names == ("dp", "tp") and each.placements[1] == placement
        here = torch.tensor(each.to_local().numel())
        dist.all_reduce(here)
        assert here == each.numel()
    assert head.device_mesh.mesh_dim_names == ("dp",)
    rows = up.redistribute(placements=[Shard(0), Replicate()])
    assert torch.equal(rows.full_tensor(), wanted["blocks.0.up.weight"])
    for each in held.values():  # values are drawn as on one device, and taken from DTensors of any placement
        torch.manual_seed(5)
        nn.init.normal_(each)
        torch.manual_seed(5)
        drawn = nn.init.normal_(torch.empty(each.shape))
        assert torch.equal(each.full_tensor(), drawn)
        with torch.no_grad():
            each.copy_(distribute_tensor(drawn + 1, each.device_mesh, each.placements))
            assert torch.equal(each.full_tensor(), drawn + 1)
            each.copy_(distribute_tensor(drawn + 2, mesh["tp"], [Shard(0)]))
            assert torch.equal(each.full_tensor(), drawn + 2)
        (each.full_tensor() * drawn).sum().backward()
        assert torch.equal(each.grad.full_tensor(), drawn)
    with full_parameters(model, write_back=True):
        inside = model.blocks[0].down.weight  # type: ignore[index, union-attr]
        assert isinstance(inside, DTensor) and inside.placements == (Shard(1),)
        with torch.no_grad():
            inside.copy_(distribute_tensor(wanted["blocks.0.down.weight"].detach(), mesh["tp"], [Shard(1)]))
        whole_one = nn.Parameter(torch.full((HIDDEN, WIDTH), 3.0))
        model.blocks[0].up.weight = whole_one  # type: ignore[index, union-attr]
    assert torch.equal(down.full_tensor(), wanted["blocks.0.down.weight"]) and bool((up == 3.0).all())
    model.zero_grad()
    model(batch(0, mesh["dp"].get_local_rank())).square().mean().backward()
    values = whole(model)
    gradients = {name: each.grad.full_tensor() for name, each in held.items() if each.grad is not None}
    with full_parameters(model, rank_0_only=True, with_grads=True):
        for name, each in model.named_parameters() if dist.get_rank() == 0 else ():  # no other rank takes part in ops
            assert type(each) is nn.Parameter and torch.equal(each, values[name])
            assert each.grad is not None and torch.equal(each.grad, gradients[name])
    with full_parameters(model, write_back=True, with_grads=True):
        for each in model.parameters():
            assert each.grad is not None
            each.grad.mul_(2)
    assert_same({name: each.grad.full_tensor() / 2 for name, each in held.items() if each.grad is not None}, gradients)


def clipping() -> None:
    """torch's own clipping, and the scaler's look for what is not finite, count both dimensions of the mesh once."""
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    for plan in (TENSOR_PARALLEL, SEQUENCE_PARALLEL):  # with and without parameters that ranks of `tp` have alike
        for order in (2.0, 1.0, float("inf")):
            model = at_once(parallel(mesh, plan), mesh["dp"])
            model(batch(0, rank)).square().mean().backward()
            gradients = [each.grad.full_tensor() for each in model.parameters()]
            expected = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients]), order)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order)
            assert torch.allclose(norm, expected), (order, norm, expected)
            clipped = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters()])
            assert torch.allclose(torch.linalg.vector_norm(clipped, order), torch.tensor(0.01), rtol=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model)
    if dist.get_rank() == 3:
        next(each for each in model.parameters() if each.grad.to_local().numel()).grad.to_local()[0] = float("inf")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert_same(before, whole(model))


def checkpoints(folder: str) -> None:
    """DCP's recipe at 2 x 2 ranks: save, load into FSDP2's and memfit's, also over another mesh, and go on."""
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    for wrap in (at_once, by_fsdp2):
        model = wrap(parallel(mesh, SEQUENCE_PARALLEL), mesh["dp"])
        optimizer = adamw(model.parameters())
        train(model, optimizer, range(2), rank)
        path = f"{folder}/{wrap.__name__}"
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
        saved = whole(model)
        train(model, optimizer, range(2, 3), rank)
        for again, over in ((at_once, mesh), (by_fsdp2, mesh), (at_once, mesh_of(4, 1))):
            other = again(parallel(over, SEQUENCE_PARALLEL, seed=1), over["dp"])
            other_optimizer = adamw(other.parameters())
            state, of_optimizer = get_state_dict(other, other_optimizer)
            dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
            set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
            assert_same(saved, whole(other))
            if over is mesh:
                train(other, other_optimizer, range(2, 3), rank)
                assert_same(whole(model), whole(other))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    ours = at_once(parallel(mesh, SEQUENCE_PARALLEL, seed=1), mesh["dp"])
    set_model_state_dict(ours, dict(full), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(whole(ours), whole(model))
    found = full_state_dict(ours, adamw(ours.parameters()), rank_0_only=True)
    if dist.get_rank() == 0:
        assert_same(found["model"], full)
    else:
        assert not found
    with pytest.raises(InputError, match=r"torch\.distributed\.checkpoint"):
        save(folder, ours)


def starts() -> None:
    """What is on the meta device is filled, and ranks that begin differently get the first one's values."""
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = parallel(mesh)
    at_once(model, mesh["dp"])
    for block in model.blocks:  # as reset_parameters draws them
        weight = block.up.weight.full_tensor()  # type: ignore[union-attr, operator]
        assert 0 < weight.abs().max() <= WIDTH**-0.5 and bool((block.norm.weight == 1).all())  # type: ignore
    model, peer = parallel(mesh), parallel(mesh)
    optimizers = [adamw(each.parameters()) for each in (model, peer)]
    for number in range(2):  # an optimizer that was made before, and has state of DTensors
        for each, optimizer in zip((model, peer), optimizers, strict=True):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, 0.5 + number)
            optimizer.step()
            optimizer.zero_grad()
        if not number:
            at_once(model, mesh["dp"])
            move_optimizer(optimizers[0])
    whole_peer = {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in peer.named_parameters()
    }
    assert_same(whole(model), whole_peer)
    different = parallel(mesh, seed=mesh["dp"].get_local_rank())
    model = shard(different, mesh=mesh["dp"], from_rank_0=True)
    first = parallel(mesh)
    for one, other in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor() if isinstance(other, DTensor) else other)


class Between(Model):
    """Blocks that hand DTensors to each other, and an odd number of columns, which ranks have unevenly."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.up, block.down = nn.Linear(WIDTH, HIDDEN + 1), nn.Linear(HIDDEN + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)  # type: ignore[arg-type]
        for block in self.blocks:
            given = checkpoint(block, given, use_reentrant=False)
        return self.head(given.full_tensor())


def odd_models() -> None:
    """Checkpointed blocks that exchange DTensors, uneven blocks, frozen and tied ones, in bfloat16: FSDP2's bits."""
    mesh = mesh_of(2, 2)
    plan: dict[str, ParallelStyle] = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }

    def build(kind: str) -> Any:
        torch.manual_seed(0)
        model: Any = Between()
        model.mesh = mesh["tp"]
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        model.blocks[0].up.weight.requires_grad_(kind != "frozen")
        if kind == "tied":
            model.blocks[1].down.weight = model.blocks[0].down.weight
        return model

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_inputs="none")
    for kind in ("plain", "frozen", "bfloat16", "tied"):
        model, peer = build(kind), build(kind)
        options = {"precision": precision} if kind == "bfloat16" else {"units": [], "keep": True}
        shard(model, mesh=mesh["dp"], **({} if kind == "frozen" else options))
        if kind == "tied":
            fully_shard(peer, mesh=mesh["dp"])
        else:
            by_fsdp2(peer, mesh["dp"], **({"mp_policy": policy} if kind == "bfloat16" else {}))
        results = []
        for each in (model, peer):
            optimizer = adamw(each.parameters())
            for step in range(2):
                given = batch(step, mesh["dp"].get_local_rank()).to(torch.bfloat16 if kind == "bfloat16" else None)
                each(given).float().square().mean().backward()
                if kind == "frozen":
                    assert each.blocks[0].up.weight.grad is None
                optimizer.step()
                optimizer.zero_grad()
            results.append(whole(each))
        assert_same(*results)


def reduce_scatters_before_an_all_reduce() -> None:
    """Micro-batches that are summed within replicas only, and the last one over all, to FSDP2's bits."""
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    results = []
    for wrap in (at_once, by_memfit, by_fsdp2):
        torch.manual_seed(0)
        model: Any = wrap(Model(), mesh)
        optimizer = adamw(model.parameters())
        for step in range(2):
            for micro in range(3):
                model.set_requires_all_reduce(micro == 2)
                model(batch(3 * step + micro, dist.get_rank())).square().mean().backward()
                assert all((each.grad is None) == (micro < 2) for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole(model))
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])
    found = []
    for partial in (False, True):  # what the last micro-batch does not use is summed all the same
        torch.manual_seed(0)
        model = at_once(Model(), mesh)
        model.blocks[1].set_requires_all_reduce(not partial)
        model(batch(0, dist.get_rank())).square().mean().backward()
        model.blocks[1].set_requires_all_reduce(True)
        model.blocks[0](batch(1, dist.get_rank())).square().mean().backward()
        found.append({name: each.grad.full_tensor() for name, each in model.named_parameters()})
    assert_same(*found)


def refusals() -> None:
    """What cannot be sharded is refused on all ranks, also where only one of them has it, and changes nothing."""
    mesh = mesh_of(2, 2)

    def partial(model: Any) -> None:
        weight = model.head.weight.detach()
        model.head.weight = nn.Parameter(DTensor.from_local(weight, mesh["tp"], [Partial()], run_check=False))

    cases: list[tuple[Callable[[Any], Any], dict[str, Any], str]] = [
        (lambda model: None, {}, "no mesh was given"),
        (lambda model: None, {"mesh": mesh["tp"]}, "which overlap with those given"),
        (lambda model: None, {"mesh": mesh}, "which overlap with those given"),
        (lambda model: None, {"mesh": mesh_of(2, 2, 1, names=("replicate", "shard", "tp"))}, "3 dimensions"),
        (lambda model: by_fsdp2(model, mesh["dp"]), {"mesh": mesh["dp"]}, "which overlap with those given"),
        (partial, {"mesh": mesh["dp"]}, "Partial"),
    ]
    for prepare, options, message in cases:
        model = parallel(mesh)
        prepare(model)
        before = list(model.parameters())
        with pytest.raises(InputError, match=message):
            shard(model, **options)
        assert all(one is each for one, each in zip(before, model.parameters(), strict=True))
    model = parallel(mesh)
    if dist.get_rank() == 1:
        model.head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RankMismatch, match="has a hook"):
        shard(model, mesh=mesh["dp"])
    shard(parallel(mesh), mesh=mesh["dp"])
