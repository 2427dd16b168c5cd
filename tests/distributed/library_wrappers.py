"""Models that accelerate or Lightning have wrapped, trained with and without the checkpoint policies of a plan."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from memfit.engines.attachment import attached
from memfit.plans import Plan
from memfit.plans.wrappers import named_modules, wrappers_of
from tests.distributed.wrapped_plans import ROWS, WIDTH, built, loss_of, planned_layers

STEPS = 3
Prepare = Callable[[nn.Module, Any], None]
"""Called with the wrapped model, and its optimizer if there is one yet, before the first step."""


def batches() -> DataLoader[Any]:
    rows = torch.randn(2 * STEPS * ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(rows), batch_size=ROWS)


def train_accelerate(prepare: Prepare, *, fsdp2: bool) -> nn.Module:
    """The loop of accelerate's documentation, FSDP2 by its plugin or DDP."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if fsdp2:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"]
        )
    accelerator = Accelerator(cpu=True)
    if plugin is not None:  # accelerate takes up the plugin on GPUs only; its code for FSDP2 runs on CPUs too
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    plain = built()
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches())
    prepare(model, optimizer)
    for (rows,) in loader:
        loss = loss_of(model(rows))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    return model


def train_lightning(prepare: Prepare, *, fsdp2: bool) -> nn.Module:
    """A LightningModule that shards itself (`configure_model`) under `ModelParallelStrategy`, or is replicated."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = built()

        def configure_model(self) -> None:
            mesh: DeviceMesh | None = self.device_mesh
            if mesh is not None:
                for layer in self.model.layers:
                    fully_shard(layer, mesh=mesh["data_parallel"])
                fully_shard(self.model, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, *_: Any) -> torch.Tensor:
            return loss_of(self.model(batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def on_fit_start(self) -> None:
            prepare(self.model, None)

    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if fsdp2:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches())
    return module.model


WAYS: dict[str, Callable[[Prepare], nn.Module]] = {
    "accelerate, FSDP2": lambda prepare: train_accelerate(prepare, fsdp2=True),
    "accelerate, DDP": lambda prepare: train_accelerate(prepare, fsdp2=False),
    "Lightning, ModelParallelStrategy": lambda prepare: train_lightning(prepare, fsdp2=True),
    "Lightning, DDP": lambda prepare: train_lightning(prepare, fsdp2=False),
}


def compared(way: str, folder: str) -> None:
    """A plan sets the checkpoint policies of a model that a library wrapped, and its parameters end as without."""
    plan = planned_layers()
    calls: dict[str, list[bool]] = {"without": [], "with": []}
    with as_torchrun(folder):
        plain = WAYS[way](lambda model, optimizer: watch(model, calls["without"]))
        model = WAYS[way](lambda model, optimizer: apply(plan, model, optimizer, calls["with"], way))
    assert ("fully_shard" in wrappers_of(model)) == ("DDP" not in way)
    assert len(calls["without"]) == STEPS and len(calls["with"]) == 2 * STEPS, "units run again in the backward"
    units = dict(named_modules(model))
    assert all(attached(units[entry.module]) is not None for entry in plan.checkpoint)
    expected, found = values(plain), values(model)
    assert expected and expected.keys() == found.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items()), "other bits"
    plan.remove(model)
    assert all(attached(units[entry.module]) is None for entry in plan.checkpoint)


def apply(plan: Plan, model: nn.Module, optimizer: Any, calls: list[bool], way: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.apply(model, optimizer)
    told = sum("checkpoint policies are carried out, and nothing else" in str(each.message) for each in caught)
    assert told == (way != "Lightning, DDP"), "DDP is around the LightningModule, which the model in it does not know"
    watch(model, calls)


def watch(model: nn.Module, calls: list[bool]) -> None:
    norm = dict(named_modules(model))["layers.0.norm"]
    norm.register_forward_hook(lambda *_: calls.append(True))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, of each rank its part."""
    return {name: getattr(each, "_local_tensor", each).detach().clone() for name, each in model.named_parameters()}


@contextlib.contextmanager
def as_torchrun(folder: str) -> Iterator[None]:
    """Set what torchrun sets, for libraries that look there; the process group is made already."""
    rank, before = dist.get_rank(), dict(os.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT="29511",
        TORCHELASTIC_RUN_ID="none",
        HOME=str(Path(folder)),
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
