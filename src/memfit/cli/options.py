"""Options that several commands share, and the help that goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


def arg(metavar: str, otherwise: str = "", *aliases: str) -> Any:
    """How an option is shown: what its value is called, and what holds when it is not given."""
    hint = f"(default: {otherwise})" if otherwise else ""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint, aliases=list(aliases))


Json = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
Names = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg("UNIT")]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The training step."""

    step: Annotated[tyro.conf.Positional[str], arg("STEP")]
    """`train.py:function` or `package.module:function` that returns a memfit.Step; `hf:config.json`, a transformers
    configuration; a built-in shape (`memfit shapes`); or a trace (.memfit) from memfit.save_trace."""
    batch: Annotated[int | None, arg("N", "the step's own")] = None
    """Sequences or images in a batch."""
    seq: Annotated[int | None, arg("N", "the step's own")] = None
    """Tokens in a sequence."""


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
    ranks: Annotated[int | None, arg("N", "1", "-n")] = None
    """How many of them; the model is sharded over all of them."""
    budget: Annotated[str | None, arg("SIZE", "all that is usable", "-b")] = None
    """What tensors of one rank may take: 72GiB, 80GB, bytes, 90% or 0.9 of the device."""


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """What the solver may choose from. UNIT is a module path; `layers.*` names several; the option may be repeated."""

    force: Names = ()
    """A unit that must be checkpointed."""
    forbid: Names = ()
    """A unit that must not be."""
    units: Names = ()
    """A unit that may be; when given, no others may."""
    time_limit: Annotated[float | None, arg("SECONDS", "60")] = None
    """How long one solve may take; the best plan so far is given with its gap."""
    shard_units: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg("MODULE")] = ()
    """A module whose parameters are gathered together (default: the repeated blocks)."""
    param_dtype: Annotated[Dtype | None, arg("DTYPE", "autocast's, or the parameter's")] = None
    """In which parameters are gathered: float64, float32, bfloat16 or float16."""
    reduce_dtype: Annotated[Dtype | None, arg("DTYPE", "the parameter's")] = None
    """In which gradients are summed over ranks."""
    shard_dtype: Annotated[Dtype | None, arg("DTYPE", "the parameter's")] = None
    """Of shards, their gradients and the optimizer's state."""


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

    @property
    def by_option(self) -> dict[str, Path | None]:
        """The files, by the option that names them."""
        names = ("html", "perfetto", "snapshot", "markdown")
        return {f"--{name}": getattr(self, name) for name in names}

    @property
    def any(self) -> bool:
        """Whether any file is asked for."""
        return any(path is not None for path in self.by_option.values())
