"""Published torchtitan runs, captured from torchtitan's own code: model, parallelize function, loss, optimizer.

`memory_steps.py` and `whole_steps.py` emulate the code of each source's date for the plain model, and the planner adds
FSDP2. Here the torchtitan that is installed runs on ranks that are not there, as its configuration says; what it does
otherwise than the code of a source's date is said in `titan.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import memfit
from memfit.capture import Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.integrations import torchtitan
from memfit.memory import Reserved, Timeline, reserved
from memfit.sharding import captured_ranks
from tests.evidence import memory_steps, whole_steps
from tests.evidence.memory_steps import GIB, PublishedMemory, device_of
from tests.evidence.step_models import SHAPES
from tests.evidence.whole_steps import PublishedRun

_CHECKPOINTING = {
    "none": ("none", "2"),
    "full": ("full", "2"),
    "every second": ("selective", "2"),
    "selective": ("selective", "op"),
}
"""`activation_checkpoint.mode` and `selective_ac_option`."""


def model_arguments(model: str) -> tuple[str, str, Any]:
    """The name and flavor of a model in torchtitan's configuration, and its arguments where no flavor has them."""
    if model.startswith("Llama 3 "):
        return "llama3", model.split()[-1], None
    from torchtitan.models.llama3 import TransformerModelArgs

    shape = SHAPES[model]
    hidden = 4 * shape.width * 2 // 3  # torchtitan's rule, before a factor and the rounding to a multiple
    args = TransformerModelArgs(
        dim=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        multiple_of=256 if shape.width < 8192 else 4096,
        ffn_dim_multiplier=None if shape.width < 8192 else 1.3,
    )
    made = args.multiple_of * -(-int((args.ffn_dim_multiplier or 1) * hidden) // args.multiple_of)
    if made != shape.feed_forward:
        raise ValueError(f"{model} would have feed-forward layers of {made}, not {shape.feed_forward}")
    return "llama3", "8B", args


def job(run: PublishedMemory | PublishedRun, *, fused: bool, tensor_parallel: int = 1) -> tuple[Any, Any]:
    """The torchtitan configuration of a published run, and the model's arguments where no flavor has them."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.model.name, config.model.flavor, args = model_arguments(run.model)
    config.training.local_batch_size, config.training.seq_len = run.batch, run.length
    config.optimizer.implementation = "fused" if fused else "foreach"
    config.parallelism.tensor_parallel_degree = tensor_parallel
    config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option = _CHECKPOINTING[
        run.checkpointing
    ]
    return config, args


@dataclass(frozen=True)
class CapturedRun:
    """A published run of torchtitan, and both ways to predict it."""

    memory: PublishedMemory | None
    speed: PublishedRun | None

    @property
    def run(self) -> PublishedMemory | PublishedRun:
        found = self.memory or self.speed
        assert found is not None
        return found

    @cached_property
    def trace(self) -> Trace:
        """The step as the installed torchtitan runs it on so many ranks."""
        fused = self.memory.optimizer == "fused" if self.memory else bool(self.speed and self.speed.fused)
        config, args = job(self.run, fused=fused)
        step = torchtitan.step(config, model_args=args)
        return memfit.trace(step, target=self._target.device, mesh=torchtitan.mesh(config, ranks=self.run.ranks))

    @property
    def _target(self) -> Target:
        return Target.parse(device_of(self.run.gpu), ranks=self.run.ranks)

    @cached_property
    def reserved(self) -> Reserved:
        """What the allocator of a rank does."""
        return reserved(Timeline.of(self.trace).allocations, self._target.device)

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens each second for each GPU."""
        timeline = Timeline.of(self.trace)
        sharding = captured_ranks(timeline, Runtime.of(self.trace, Roofline()), self._target)
        return self.run.batch * self.run.length / (sharding.runtime.total_ms + sharding.exposed_ms) * 1e3

    def figures(self) -> list[tuple[str, float, float, float]]:
        """The published figures, each with the planner's and the captured: its name, and the three."""
        found = []
        if self.memory is not None and any(self.memory.published_gib.values()):
            captured = {
                "allocated": self.reserved.peak_allocated_bytes,
                "reserved": self.reserved.peak_reserved_bytes,
                "reserved, step 1": self.reserved.first_step_reserved_bytes,
            }
            errors = self.memory.errors()
            for kind, published in self.memory.published_gib.items():
                if published is not None:
                    found.append((f"{kind}, GiB", published, published * (1 + errors[kind]), captured[kind] / GIB))
        if self.speed is not None:
            published = self.speed.tokens_per_s
            found.append(("tokens/s", published, self.speed.predicted_tokens_per_s(), self.tokens_per_s))
        return found


def read_runs() -> list[CapturedRun]:
    """Every published run of torchtitan's Llama under FSDP2, eager."""
    memory = {run.name: run for run in memory_steps.read_runs() if run.name.startswith(("titan-", "pt-"))}
    speed = {run.name: run for run in whole_steps.read_runs() if run.name.startswith("titan-")}
    names = [name for name in {**memory, **speed} if "fsdp1" not in name and "qwen3" not in name]
    return [CapturedRun(memory.get(name), speed.get(name)) for name in names]
