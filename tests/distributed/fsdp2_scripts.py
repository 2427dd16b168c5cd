"""Scripts as users of FSDP2 write them: `fully_shard` is PyTorch's or `memfit.shard`, and nothing else differs.

Each function runs on every rank and returns what the script would report: losses, norms, whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.sharded_models import GPT, VOCABULARY

FullyShard = Callable[..., Any]
Reported = dict[str, Any]


@cache
def mesh_of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    """Return the same mesh for every script that asks for it: its groups are made once."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: each.full_tensor().detach() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }


class AppState(Stateful):
    """The object that PyTorch's tutorial on checkpoints saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def checkpoint_with_dcp(fully_shard: FullyShard, folder: str, *, resume: bool) -> Reported:
    """Train and save, or load what any number of ranks saved and go on; groups of parameters have their own options."""
    torch.manual_seed(int(resume))
    with torch.device("meta"):
        model: Any = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, eps=1e-4
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"app": AppState(model, optimizer), "schedule": schedule}
    if resume:
        dcp.load(state, checkpoint_id=folder)
    losses = []
    for step in range(3, 6) if resume else range(3):
        loss = loss_of(model, tokens(step, 0))  # the same on every rank, so that their number makes no difference
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not resume:
        dcp.save(state, checkpoint_id=folder)
    return {"losses": losses, "lr": schedule.get_last_lr(), "parameters": whole(model)}


def scaler_with_accumulation(fully_shard: FullyShard) -> Reported:
    """Half precision with a scaled loss, three micro-batches a step of which the last is sent, and clipping."""
    torch.manual_seed(0)
    model: Any = GPT()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    losses, norms, scales = [], [], []
    for step in range(4):
        for micro in range(3):
            last = micro == 2
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            loss = loss_of(model, tokens(10 * step + micro, dist.get_rank())) / 3
            if step == 1 and dist.get_rank() == 1:
                loss = loss * float("inf")  # of one rank: no rank may take this step
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item())  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "scales": scales, "parameters": whole(model)}


def hybrid(fully_shard: FullyShard) -> Reported:
    """Two replicas of two ranks each; the sum over replicas is left to the last micro-batch; prefetch by hand."""
    torch.manual_seed(0)
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    model: Any = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[number + 1 : number + 2]))
        block.set_modules_to_backward_prefetch(list(reversed(model.blocks[max(number - 1, 0) : number])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=True)
    losses, norms = [], []
    for step in range(3):
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            model.unshard(async_op=True)
            loss = loss_of(model, tokens(10 * step + micro, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True).full_tensor().item())  # type: ignore
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, tokens(99, dist.get_rank())).item())
    return {"losses": losses, "norms": norms, "parameters": whole(model)}


class Mlp(nn.Module):
    """A block for tensor and sequence parallel."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MlpModel(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Mlp(width, 3 * width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel(fully_shard: FullyShard, folder: str) -> Reported:
    """Sequence parallel within pairs of ranks, sharded between them, saved and loaded, as torchtitan does it."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))

    def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = MlpModel()
        parallelize_module(
            model,
            mesh["tp"],
            {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
        for block in model.blocks:
            parallelize_module(
                block,
                mesh["tp"],
                {
                    "norm": SequenceParallel(),
                    "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                    "down": RowwiseParallel(output_layouts=Shard(1)),
                },
            )
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(input_layouts=Shard(1))})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = loss_of(model, tokens(step, mesh["dp"].get_local_rank()))
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found += [loss.item(), norm.full_tensor().item()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    model, optimizer = build(0)
    found = train(model, optimizer, range(3))
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    model, optimizer = build(1)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    found += train(model, optimizer, range(3, 5))
    return {"losses and norms": found, "parameters": whole(model)}


class LoraLinear(nn.Module):
    """A linear whose weight is frozen as integers with a scale for each row, and two small matrices that train."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self.used = nn.Parameter(torch.ones(1, dtype=torch.bool), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        small = F.linear(F.linear(x, self.a), self.b)
        return F.linear(x, weight, self.bias) + torch.where(self.used, small, torch.zeros_like(small))


def lora(fully_shard: FullyShard) -> Reported:
    """Train adapters beside frozen integer weights, save what trains, and put it into another model."""

    def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = GPT()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        torch.manual_seed(5 + seed)
        for block in model.blocks:
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, LoraLinear(getattr(block, name), 2))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        trained = [each for each in model.parameters() if each.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(model, tokens(step, dist.get_rank()))
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 1.0)
            losses += [loss.item(), norm.full_tensor().item()]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model, optimizer = build(0)
    losses = train(model, optimizer, range(4))
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=options)
    other, other_optimizer = build(0)
    set_model_state_dict(
        other,
        adapters,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
    losses += train(other, other_optimizer, range(4, 6))
    return {"losses": losses, "saved": sorted(adapters), "parameters": whole(other)}
