"""Five third-party models and the settings in which FSDP2 shards them: captured as they run, and planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import memfit
from memfit import Step, spec
from memfit.capture import ParameterCast, Trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Timeline
from memfit.sharding import Sharding, ShardOptions, repeated_blocks, shard
from tests.sharding.fsdp2_captures import rounding_of
from tests.zoo.zoo_models import LLAMA, causal_model

BATCH, LENGTH, VOCABULARY = 2, 32, 512


def _language_batch() -> dict[str, Any]:
    return {name: spec((BATCH, LENGTH), torch.int64) for name in ("input_ids", "labels")}


def _image_batch() -> dict[str, Any]:
    return {"pixel_values": spec((BATCH, 3, 64, 64), torch.float32), "labels": spec((BATCH,), torch.int64)}


def _gpt2() -> nn.Module:
    return causal_model("gpt2", n_embd=96, n_layer=3, n_head=4, use_cache=False)


def _llama() -> nn.Module:
    return causal_model("llama", **LLAMA)


def _mixtral() -> nn.Module:
    model = causal_model("mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("grouped_mm")
    return model


def _t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=96, d_kv=24, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _convnext() -> nn.Module:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, image_size=64)
    config.num_labels = 10
    return transformers.ConvNextForImageClassification(config)


@dataclass(frozen=True, kw_only=True)
class GridModel:
    """A model, its batch, and units inside those that are found."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]] = _language_batch
    nested: str = "mlp"
    lists: bool = True
    """Whether modules are prefetched by lists. A model of several outputs runs its hook for each: it gathers again what
    its list names."""


MODELS = {
    "gpt2": GridModel(build=_gpt2),
    "llama": GridModel(build=_llama),
    "t5": GridModel(build=_t5, nested="layer.0", lists=False),
    "convnext": GridModel(build=_convnext, batch=_image_batch, nested="layers.0"),
    "mixtral": GridModel(build=_mixtral),
}


@dataclass(frozen=True, kw_only=True)
class GridSetting:
    """How `fully_shard` is called, and the planner's word for it."""

    bfloat16: bool = False
    accumulation_steps: int = 1
    nested: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def shard_options(self, units: tuple[str, ...]) -> ShardOptions:
        dtypes: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if self.bfloat16 else {}
        return ShardOptions(units=units, **dtypes, **self.options)

    def without_lists(self) -> GridSetting:
        return replace(self, options={**self.options, "prefetch": 1})

    def suits(self, ranks: int) -> bool:
        """Two ranks do not divide further."""
        return ranks > 2 or not {"replicas", "reshard_after_forward"} & {
            name for name, value in self.options.items() if value is not False
        }

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bfloat16 else MixedPrecisionPolicy()


SETTINGS = {
    "plain": GridSetting(),
    "bfloat16, accumulation": GridSetting(bfloat16=True, accumulation_steps=2),
    "not resharded": GridSetting(options={"reshard_after_forward": False}),
    "nested, prefetch of 2": GridSetting(nested=True, options={"prefetch": 2}),
    "to 2 ranks, bfloat16": GridSetting(bfloat16=True, options={"reshard_after_forward": 2}),
    "hybrid, accumulation": GridSetting(accumulation_steps=2, options={"replicas": 2}),
    "hybrid, bfloat16": GridSetting(bfloat16=True, options={"replicas": 2}),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, foreach=False)


def step_of(model: GridModel, setting: GridSetting) -> Step:
    return Step(model.build, model.batch(), optimizer=sgd, accumulation_steps=setting.accumulation_steps)


def find_units(model: GridModel, setting: GridSetting, trace: Trace) -> tuple[str, ...]:
    blocks = repeated_blocks(trace)
    if not setting.nested:
        return blocks
    held = {module.path for module in trace.modules}
    return tuple(path for block in blocks for path in (block, f"{block}.{model.nested}") if path in held)


def captured(step: Step, setting: GridSetting, units: tuple[str, ...], target: str, ranks: int) -> Trace:
    """The step as PyTorch's own code runs it on ranks that are not there."""
    options = setting.shard_options(units)
    sizes = {"shard": ranks} if options.replicas == 1 else {"replicate": options.replicas, "shard": ranks // 2}

    def build(mesh: DeviceMesh) -> nn.Module:
        model = step.build_model()
        reshards: Any = options.reshard_after_forward
        for name in sorted((*units, ""), key=lambda path: -path.count(".") - bool(path)):
            kept = {} if not name else {"reshard_after_forward": reshards}
            fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=setting.policy, **kept)
        if options.prefetch != 1:
            _set_prefetch(model, ("", *_in_order(model, units)), options.prefetch)
        return model

    return memfit.trace(replace(step, model=build), target=target, mesh=sizes)


def _in_order(model: nn.Module, units: tuple[str, ...]) -> list[str]:
    return [name for name, _ in model.named_modules() if name in units]


def _set_prefetch(model: nn.Module, names: tuple[str, ...], count: int) -> None:
    """Every unit gathers so many ahead, as a plan on FSDP2 does."""
    units: list[Any] = [model.get_submodule(name) for name in names]
    for place, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        following = units[place + 1 : place + 1 + count]
        before = units[max(1, place - count) : place] if place else units[max(1, len(units) - count) :]
        if following:
            unit.set_modules_to_forward_prefetch(following)
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])


def planned(
    step: Step, setting: GridSetting, units: tuple[str, ...], target: str, ranks: int
) -> tuple[Timeline, Sharding]:
    """The plain step, and what the planner makes of it for so many ranks."""
    cast = ParameterCast(dtype="bfloat16", units=("", *units)) if setting.bfloat16 else None
    timeline = Timeline.of(memfit.trace(step, target=target, cast=cast), rounding_of(target))
    runtime = Runtime.of(timeline.trace, Roofline())
    return timeline, shard(timeline, runtime, Target.parse(target, ranks=ranks), setting.shard_options(units))
