"""torchtitan's own `Trainer` on a CPU, run by torchrun's variables in a process of its own: losses, and the peak.

    python titan_training.py out.json [budget]

torchtitan asks for an accelerator; here its device is the CPU, and its data are random tokens. All else is its own:
the configuration, the constructor, `train()`, the optimizers and schedulers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan import train
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils

from memfit.capture import trace
from memfit.integrations import torchtitan
from memfit.memory import Timeline
from memfit.verify.rank_memory import measure_rank_rise, resident_bytes

STEPS, BATCH, LENGTH = 20, 2, 128


@dataclass(frozen=True)
class _Properties:
    total_memory: int = 16 << 30


class _CPU:
    """What torchtitan asks of a device module."""

    def set_device(self, device: Any) -> None: ...
    def synchronize(self) -> None: ...
    def reset_peak_memory_stats(self) -> None: ...
    def empty_cache(self) -> None: ...
    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "cpu"

    def get_device_properties(self, device: Any) -> _Properties:
        return _Properties()

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}


class _RandomTokens(BaseDataLoader):
    def __init__(self, rank: int) -> None:
        self._numbers = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(0, 2048, (BATCH, LENGTH + 1), generator=self._numbers)
            yield {"input": tokens[:, :-1].clone()}, tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def config() -> JobConfig:
    """llama3's debug model for twenty steps, checkpointed as torchtitan's own configuration of it says."""
    found = JobConfig()
    found.model.name, found.model.flavor = "llama3_random", "debugmodel"
    found.training.local_batch_size, found.training.seq_len, found.training.steps = BATCH, LENGTH, STEPS
    found.lr_scheduler.warmup_steps = 2
    found.optimizer.implementation = "for-loop"
    found.debug.seed = 0
    found.metrics.log_freq = 1
    found.comm.init_timeout_seconds = 300
    return found


def on_cpu() -> None:
    """Let torchtitan's device be the CPU, and register its llama3 with random tokens for data."""
    utils.device_type, utils.device_module = "cpu", _CPU()
    for module in (metrics, parallel_dims, distributed_utils):
        for name in ("device_type", "device_module"):
            if hasattr(module, name):
                setattr(module, name, getattr(utils, name))
    spec = get_train_spec()
    register_train_spec(
        "llama3_random",
        replace(spec, build_tokenizer_fn=None, build_dataloader_fn=lambda dp_rank, **_: _RandomTokens(dp_rank)),
    )


def main(path: str, budget: int | None) -> None:
    """Train with a plan for the budget, or plain; write the losses, the peak of one more step, the plan's."""
    on_cpu()
    settings = _unplanned() if budget is None else config()
    kind = train.Trainer if budget is None else torchtitan.planned_trainer(budget=budget)
    mesh = torchtitan.mesh(settings, ranks=int(os.environ["WORLD_SIZE"]))
    captured = trace(torchtitan.step(_unplanned()), target="cpu", mesh=mesh)
    trainer = kind(settings)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # torchtitan has FSDP2 divide by 1, which NCCL can do and Gloo cannot
            module.set_force_sum_reduction_for_comms(True)
    losses: list[float] = []
    step = trainer.forward_backward_step

    def noted(**given: Any) -> torch.Tensor:
        loss = step(**given)
        losses.append(float(loss.detach()))
        return loss

    trainer.forward_backward_step = noted
    trainer.train()
    trainer.forward_backward_step = step
    data = trainer.batch_generator(trainer.dataloader)
    trainer.metrics_processor.should_log = lambda _: False
    rise = measure_rank_rise(lambda: trainer.train_step(data), torch.device("cpu"))
    (adamw,) = trainer.optimizers.optimizers
    resident = resident_bytes(captured, trainer.model_parts[0], adamw, "cpu", 1)
    plan = getattr(trainer, "plan", None)
    found = {
        "losses": losses,
        "peak_bytes": resident + rise,
        "unplanned_bytes": Timeline.of(captured, 1).peak_bytes,
        "checkpointed": None if plan is None else len(plan.checkpoint),
        "predicted_bytes": None if plan is None else plan.predicted.peak_bytes,
    }
    if int(os.environ["RANK"]) == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    trainer.close()
    dist.destroy_process_group()


def _unplanned() -> JobConfig:
    found = config()
    found.activation_checkpoint.mode = "none"
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
