"""Options that several commands share, and the help that goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from tyro.constructors import PrimitiveConstructorSpec

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


def arg(metavar: str, otherwise: str = "", *aliases: str) -> Any:
    """Describe how an option is shown: what its value is called, and what holds when it is not given."""
    hint = f"(default: {otherwise})" if otherwise else ""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint, aliases=list(aliases))


def number(kind: type[int] | type[float], example: str) -> PrimitiveConstructorSpec[Any]:
    """Build the parser of a number that may be left out; tyro's own errors speak of types and of None."""

    def read(given: list[str]) -> int | float:
        try:
            return kind(given[0])
        except ValueError:
            raise ValueError(f"{given[0]!r} is no {_KINDS[kind]}; write for example {example}") from None

    return PrimitiveConstructorSpec(
        nargs=1, metavar="N", instance_from_str=read, is_instance=lambda _: True, str_from_instance=_text
    )


def one_of(choices: tuple[str, ...]) -> PrimitiveConstructorSpec[Any]:
    """Build the parser of one of a few words that may be left out."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(choices) + "}",
        instance_from_str=lambda given: given[0],
        is_instance=lambda _: True,
        str_from_instance=_text,
        choices=choices,
    )


def _text(value: object) -> list[str]:
    return [str(value)]


_KINDS: dict[type, str] = {int: "whole number", float: "number"}
Count = Annotated[int | None, number(int, "8")]
Dtypes = Annotated[Dtype | None, one_of(get_args(Dtype))]
Engines = Annotated[Literal["fsdp2", "sharded"] | None, one_of(("fsdp2", "sharded"))]
Autocast = Annotated[Literal["bfloat16", "float16", "float32"] | None, one_of(("bfloat16", "float16", "float32"))]
Json = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
Names = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg("UNIT")]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The training step."""

    step: Annotated[tyro.conf.Positional[str], arg("STEP")]
    """`train.py:function` or `package.module:function` that returns a memfit.Step; `hf:config.json`, a transformers
    configuration, or `hf:org/name`, one in the local cache of Hugging Face; a built-in shape (`memfit shapes`); or
    a trace (.memfit) from memfit.save_trace."""
    batch: Annotated[Count, arg("N", "the step's own")] = None
    """Sequences or images in a batch."""
    seq: Annotated[Count, arg("N", "the step's own")] = None
    """Tokens in a sequence."""
    task: Annotated[str | None, arg("TASK", "what its architectures say")] = None
    """What a configuration (hf:) is trained for: causal-lm, masked-lm, seq2seq, sequence-classification, ctc, ..."""
    autocast: Annotated[Autocast, arg("DTYPE", "the step's own")] = None
    """In which products are computed: bfloat16, float16, or float32 for none."""
    accumulation_steps: Annotated[Count, arg("N", "the step's own")] = None
    """Micro-batches of that size whose gradients are summed before the optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class TimedStepOptions(StepOptions):
    """The training step, and how its ops are timed."""

    cost: Annotated[Literal["roofline", "benchmark"], arg("{roofline,benchmark}", "roofline")] = "roofline"
    """Times from the device's figures, or measured on this machine."""


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """What the step runs on, and how much of it."""

    target: Annotated[str | None, arg("DEVICE", "the GPU that is here", "-t")] = None
    """A device such as h100-sxm (`memfit devices` lists them), or the path of a device file (.toml)."""
    ranks: Annotated[Count, arg("N", "1", "-n")] = None
    """How many of them; the model is sharded over all of them, or replicated (--parallel ddp)."""
    mesh: Annotated[str | None, arg("NAME=N,...", "STEP is not parallel itself")] = None
    """The ranks of a step whose model factory wraps it itself (fully_shard, tensor parallel): dp=8, or dp=8,tp=2."""
    rank: Annotated[str | None, arg("N or NAME=N,...", "the first")] = None
    """Which rank of the mesh is captured, by number or place (pp=3): ranks of a pipeline hold different stages."""
    budget: Annotated[str | None, arg("SIZE", "what the device has room for", "-b")] = None
    """What tensors of one rank may take: 72GiB, 80GB, 90% or 0.9 of the device. A number needs its unit."""
    context: Annotated[str | None, arg("SIZE", "the device's")] = None
    """What the context of a process takes of the device, such as 900MiB; `memfit env` measures it where a GPU is."""
    nccl: Annotated[str | None, arg("SIZE", "what is known of it")] = None
    """What NCCL takes of the device beside the tensors, such as 1GiB."""
    margin: Annotated[str | None, arg("PART", "3%")] = None
    """How much more than predicted the caching allocator may reserve: 3% or 0.03; 0 for none."""
    expandable_segments: Json = False
    """The allocator's segments grow, as with PYTORCH_ALLOC_CONF=expandable_segments:True."""
    host_memory: Annotated[str | None, arg("SIZE", "none, or no limit with --offload")] = None
    """What a rank may take of its host's memory for what units offload, such as 64GiB: the host's, over its ranks."""


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """What the solver may choose from. UNIT is a module path; `layers.*` names several; the option may be repeated."""

    force: Names = ()
    """A unit that must be checkpointed."""
    forbid: Names = ()
    """A unit that must not be."""
    units: Names = ()
    """A unit that may be; when given, no others may."""
    time_limit: Annotated[float | None, number(float, "60"), arg("SECONDS", "60")] = None
    """How long one solve may take; the best plan so far is given with its gap."""
    parallel: Annotated[Literal["fsdp", "ddp"], arg("{fsdp,ddp}", "fsdp")] = "fsdp"
    """How several ranks divide the work: sharded as FSDP2 does it, or replicated with DDP and its gradient buckets."""
    replicas: Annotated[Count, arg("N", "1")] = None
    """Groups that --ranks are divided into, each with a whole model that its ranks shard: a hybrid mesh."""
    engine: Annotated[Engines, arg("{fsdp2,sharded}", "left to apply, predicted as fsdp2")] = None
    """What shards the model: PyTorch's fully_shard, or memfit's own runtime."""
    shard_units: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg("MODULE")] = ()
    """A module whose parameters are gathered together (default: the repeated blocks)."""
    param_dtype: Annotated[Dtypes, arg("DTYPE", "autocast's, or the parameter's")] = None
    """In which parameters are gathered: float64, float32, bfloat16 or float16."""
    reduce_dtype: Annotated[Dtypes, arg("DTYPE", "the parameter's")] = None
    """In which gradients are summed over ranks."""
    shard_dtype: Annotated[Dtypes, arg("DTYPE", "the parameter's")] = None
    """Of shards, their gradients and the optimizer's state."""
    offload: Json = False
    """Units may also offload what they hold for their backward: to the host, or from a CPU to a calibrated disk."""
    decide: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg("KIND")] = ()
    """What else the plan may decide: exact (all that keeps numbers bit for bit), all, or a kind: reshard, prefetch,
    offload, segments, loss (chunks of the cross entropy), optimizer, units, replicas, cpu_offload, micro_batch.
    Unless given: reshard and prefetch, where GPUs wait for what is gathered."""
    fix: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg("KIND")] = ()
    """A kind that stays as it is, whatever else is decided."""
    loss_chunks: Annotated[Count, arg("N", "the step's own, or decided")] = None
    """In how many chunks the cross entropy is computed; 1 leaves it whole."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Other ways to look at it, each written to a file."""

    html: Annotated[Path | None, arg("FILE")] = None
    """A page that opens from disk: memory over the step, modules, decisions."""
    perfetto: Annotated[Path | None, arg("FILE")] = None
    """A trace for ui.perfetto.dev or chrome://tracing."""
    snapshot: Annotated[Path | None, arg("FILE")] = None
    """A memory snapshot for pytorch.org/memory_viz."""
    markdown: Annotated[Path | None, arg("FILE")] = None
    """Text for a pull request."""
    torch_policy: Annotated[Path | None, arg("FILE")] = None
    """A Python file that checkpoints as planned with torch alone, for scripts without memfit."""

    @property
    def by_option(self) -> dict[str, Path | None]:
        """The files, by the option that names them."""
        names = ("html", "perfetto", "snapshot", "markdown", "torch_policy")
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

    @property
    def any(self) -> bool:
        """Whether any file is asked for."""
        return any(path is not None for path in self.by_option.values())
