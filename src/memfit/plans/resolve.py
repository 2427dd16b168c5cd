"""What users give to `plan`, `curve`, `explain` and `search`, checked and turned into what the solver takes."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import nn

from memfit.capture import Mesh, ParameterCast, RankLike, Step, Trace, find_step, resolve_mesh, resolve_rank, trace
from memfit.cost import BENCHMARK, ROOFLINE, Cost, Roofline, Runtime, cost_model
from memfit.errors import InputError
from memfit.hardware import Device, Target, list_devices
from memfit.plans.document import Plan
from memfit.progress import Progress
from memfit.sharding import ShardEngine, ShardOptions, repeated_blocks
from memfit.solve import Problem, SolveOptions
from memfit.text import close_names, did_you_mean

Model = nn.Module | Callable[[], Any] | Step | Trace
TargetLike = str | os.PathLike[str] | torch.device | Device | Target
_COSTS = (*ROOFLINE, *BENCHMARK)


class StepInputs(TypedDict, total=False):
    """What `plan`, `curve` and `explain` take beside the model and its batch, all by keyword.

    `loss`, `optimizer` (AdamW unless given) and `autocast` are parts of the step, as in `Step`. `target` is the
    hardware by name, of `ranks` ranks. `engine` is what shards the model over several, `"fsdp2"` or `"sharded"`: the
    plan is for that one (`ShardOptions.engine`). `cost` times the ops: `"roofline"`, by the device's figures, unless
    given. `options` are for the solver. With `progress` a terminal shows what is being done. With a `mesh` the step is
    captured on so many ranks as it is (`memfit.trace`), and planned as its own code shards it: as the first of them, or
    as `rank`, a number or a place such as `{"pp": 3}`.
    """

    loss: Callable[..., torch.Tensor] | None
    optimizer: Any
    autocast: torch.dtype | None
    target: TargetLike | None
    ranks: int | None
    engine: ShardEngine | None
    cost: Cost | str | None
    options: SolveOptions | None
    progress: bool
    mesh: Mesh | None
    rank: RankLike | None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A step on a target, as a user gave it: the one way into `plan`, `curve` and `explain`.

    `step` is None where only its trace was given, `trace` is None where the step is still to be captured.
    """

    step: Step | None
    trace: Trace | None
    target: Target
    cost: Cost
    options: SolveOptions
    progress: bool = True
    mesh: Mapping[str, int] | None = None
    rank: int | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        batch: Any = None,
        *,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: Any = torch.optim.AdamW,
        autocast: torch.dtype | None = None,
        target: TargetLike | None = None,
        ranks: int | None = None,
        engine: ShardEngine | None = None,
        cost: Cost | str | None = None,
        options: SolveOptions | None = None,
        progress: bool = True,
        mesh: Mesh | None = None,
        rank: RankLike | None = None,
        **unknown: Any,
    ) -> Inputs:
        """Check what was given, before anything is captured."""
        for name in unknown:
            known = ("budget", *StepInputs.__annotations__)
            instead = did_you_mean(close_names(name, known), f"known ones are {', '.join(known)}")
            raise TypeError(f"unexpected keyword argument {name!r}; {instead}")
        sizes = None if mesh is None else resolve_mesh(mesh)
        if isinstance(model, Trace) and model.mesh:
            if sizes not in (None, model.mesh):
                raise InputError(f"the trace was captured on the mesh {model.mesh}, not {sizes}; leave mesh out")
            sizes = model.mesh
            if rank is not None and resolve_rank(rank, sizes) != model.rank:
                raise InputError(f"the trace was captured as rank {model.rank}, not {rank}; leave rank out")
        if rank is not None and sizes is None:
            raise InputError(f"rank={rank!r} is for a step on several ranks; give their mesh, as in mesh={{'pp': 4}}")
        if sizes is not None:
            if ranks not in (None, math.prod(sizes.values())):
                raise InputError(
                    f"the mesh {sizes} has {math.prod(sizes.values())} ranks, not {ranks}; leave ranks out"
                )
            ranks = math.prod(sizes.values())
        aim = resolve_target(model, target, ranks)
        if isinstance(model, Step | Trace):
            check_nothing_beside(f"the {type(model).__name__}", batch, loss, optimizer, autocast)
        step = None
        if not isinstance(model, Trace):
            step = resolve_step(model, batch, loss=loss, optimizer=optimizer, autocast=autocast)
        wanted = _with_engine(resolve_options(options), engine, aim, sizes)
        _check_replicated(step, aim, wanted, sizes)
        return cls(
            step=step,
            trace=model if isinstance(model, Trace) else None,
            target=aim,
            cost=resolve_cost(cost, aim),
            options=wanted,
            progress=progress,
            mesh=sizes,
            rank=None if sizes is None or rank is None else resolve_rank(rank, sizes),
        )

    def problem(self) -> Problem:
        """Capture the step where that is to be done, and build its problem."""
        captured = self.trace
        if captured is None:
            assert self.step is not None
            cast = find_cast(self.step, self.target, self.options.shard) if self.mesh is None else None
            with Progress("capturing one training step", show=self.progress):
                captured = trace(self.step, target=self.target, mesh=self.mesh, rank=self.rank, cast=cast)
        captured = self._cast(captured)
        with Progress("timing its ops, working out frontiers", show=self.progress):
            return Problem.of(Runtime.of(captured, self.cost), self.target, self.options)

    def _cast(self, captured: Trace) -> Trace:
        """Capture the step again where an engine runs it in another dtype than the model's (Note [Cast parameters])."""
        cast = find_gathered_cast(captured, self.target, self.options.shard)
        if cast is None:
            return captured
        if self.step is None:
            own = " and ".join(_floating_dtypes(captured))
            raise InputError(
                f"param_dtype={cast.dtype!r} changes what the step computes in, and its trace is in {own}; give the "
                "step, not its trace"
            )
        with Progress(f"capturing it in {cast.dtype}", show=self.progress):
            return trace(self.step, target=self.target, cast=cast)


def find_cast(step: Step, target: Target, options: ShardOptions) -> ParameterCast | None:
    """Return the cast of parameters that are gathered in autocast's dtype; their engines leave inputs to autocast.

    None where nothing is gathered in another dtype than the model's, or it is not known yet of which units.
    """
    if target.ranks == 1 or options.parallel == "ddp" or step.autocast is None:
        return None
    return ParameterCast(dtype=options.param_dtype or str(step.autocast)[6:])


def find_gathered_cast(captured: Trace, target: Target, options: ShardOptions) -> ParameterCast | None:
    """Return the cast of parameters that are gathered in another dtype than a step without autocast computes in.

    Its trace says which units there are; None where it is as it runs already.
    """
    wanted = options.param_dtype
    if wanted is None or captured.autocast is not None or target.ranks == 1 or captured.mesh:
        return None
    if captured.cast is not None or _floating_dtypes(captured) == [wanted]:
        return None
    units = repeated_blocks(captured) if options.units is None else options.units
    return ParameterCast(dtype=wanted, units=tuple(dict.fromkeys(("", *units))))


def _floating_dtypes(captured: Trace) -> list[str]:
    return sorted({each.dtype for each in captured.parameters if getattr(torch, each.dtype).is_floating_point})


def resolve_target(model: object, target: TargetLike | None, ranks: int | None) -> Target:
    """Resolve the target, by default one rank of the device that a trace was captured for."""
    if target is None:
        if not isinstance(model, Trace):
            names = ", ".join(device.name for device in list_devices())
            raise InputError(
                "name the hardware to plan for, for example target='h100-sxm', or the path of a device file (.toml); "
                f"memfit.hardware.list_devices() has {names}"
            )
        return Target.parse(model.hardware, ranks=ranks)
    aim = Target.parse(os.fspath(target) if isinstance(target, os.PathLike) else target, ranks=ranks)
    if isinstance(model, Trace) and model.device != aim.device.name:
        raise InputError(
            f"the trace was captured for {model.device}; capture the step again for {aim.device.name}, "
            "whose kernels may be others"
        )
    return aim


def resolve_step(
    model: nn.Module | Callable[[], Any] | Step,
    batch: Any,
    *,
    loss: Callable[..., torch.Tensor] | None,
    optimizer: Any,
    autocast: torch.dtype | None,
) -> Step:
    """Build the step of a model and what belongs to it, or of a function that runs one by itself."""
    if isinstance(model, Step):
        return model
    _refuse_trainer(model)
    if callable(model) and not isinstance(model, nn.Module):
        needed = _needed(model)
        name = getattr(model, "__qualname__", type(model).__name__)
        if needed and isinstance(model, type):
            raise InputError(f"{name} needs arguments ({needed}); write lambda: {name}(...), which builds the model")
        if needed:
            raise InputError(
                f"{name} needs arguments ({needed}); give a model, a function without arguments that builds one, or "
                f"memfit.Step(model, batch, optimizer=..., run={name}), called with model, optimizer and batch"
            )
        found = _found_model(model) if batch is None and not isinstance(model, type) else None
        if found is not None:
            check_nothing_beside("the function that runs the step", None, loss, optimizer, autocast)
            return found
    return Step(model, batch, loss=loss, optimizer=optimizer, autocast=autocast)


def _refuse_trainer(model: object) -> None:
    """Say how the step of another library's trainer is planned."""
    for kind in type(model).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ == "Trainer" and library == "transformers":
            raise InputError(
                "this is a transformers Trainer; plan its step, memfit.plan(memfit.integrations.transformers.step("
                "trainer), target=..., budget=...), or let it plan by itself: trainer.add_callback(memfit.integrations."
                "transformers.MemfitCallback(budget=...))"
            )
        if kind.__name__ == "Trainer" and library in ("lightning", "pytorch_lightning"):
            raise InputError(
                "this is a Lightning Trainer; plan the step of its module, memfit.plan(memfit.integrations.lightning."
                "step(module, batch, trainer=trainer), target=..., budget=...), or let it plan by itself: "
                "Trainer(callbacks=[memfit.integrations.lightning.MemfitCallback(budget=...)])"
            )


def check_nothing_beside(
    whole: str, batch: Any, loss: Callable[..., torch.Tensor] | None, optimizer: Any, autocast: torch.dtype | None
) -> None:
    """Refuse what is part of the step already, and would be ignored."""
    beside = [name for name, value in (("batch", batch), ("loss", loss), ("autocast", autocast)) if value is not None]
    beside += ["optimizer"] if optimizer is not torch.optim.AdamW else []
    if beside:
        verb, them = ("is", "it") if len(beside) == 1 else ("are", "them")
        raise InputError(f"{' and '.join(beside)} {verb} part of {whole}; give {them} there")


def resolve_cost(cost: Cost | str | None, target: Target) -> Cost:
    """Resolve the cost model, by its name or as it is; the target's roofline by default."""
    if cost is None:
        return Roofline.of(target)
    if isinstance(cost, str):
        if cost not in _COSTS:
            near = map(repr, close_names(cost.lower(), _COSTS))
            hint = did_you_mean(near, f"write {ROOFLINE[0]!r} or {BENCHMARK[0]!r}")
            raise InputError(f"no cost model is called {cost!r}; {hint}")
        return cost_model(cost, target)
    if isinstance(cost, type):
        name = cost.__name__
        raise InputError(f"cost is the class {name}; write {name}(), or a name: 'roofline', 'benchmark'")
    if not callable(getattr(cost, "op_ms", None)):
        raise InputError(
            f"cost is a {type(cost).__name__}; write 'roofline' or 'benchmark', or give an object with op_ms(trace)"
        )
    return cost


def resolve_options(options: SolveOptions | None) -> SolveOptions:
    """Resolve the options; by default none are set."""
    if options is None:
        return SolveOptions()
    if isinstance(options, SolveOptions):
        return options
    written = ", ".join(f"{name}={value!r}" for name, value in options.items()) if isinstance(options, dict) else "..."
    raise InputError(f"options is {_kind(options)}; write options=memfit.solve.SolveOptions({written})")


def _with_engine(
    options: SolveOptions, engine: ShardEngine | None, target: Target, mesh: Mapping[str, int] | None
) -> SolveOptions:
    """Return the options with the engine that was given; one that would change nothing is refused."""
    if engine is None:
        return options
    if options.shard.engine not in (None, engine):
        raise InputError(f"engine is {engine!r}, and the options have {options.shard.engine!r}; leave one of them out")
    if mesh is not None:
        raise InputError(f"engine {engine!r} shards a plain model, and the step shards its own (mesh); leave it out")
    if target.ranks == 1:
        raise InputError(f"engine {engine!r} shards a model over several ranks, and there is one; give ranks=...")
    return replace(options, shard=replace(options.shard, engine=engine))


def _check_replicated(step: Step | None, target: Target, options: SolveOptions, mesh: Mapping[str, int] | None) -> None:
    """Refuse to shard a model that its user has wrapped in DDP, which would keep its buckets and not be sharded."""
    replicated = step is not None and isinstance(step.model, nn.parallel.DistributedDataParallel)
    if replicated and target.ranks > 1 and mesh is None and options.shard.parallel == "fsdp":
        raise InputError(
            f"the model is wrapped in DistributedDataParallel, and a plan for {target.ranks} ranks shards it; write "
            "options=memfit.solve.SolveOptions(shard=memfit.sharding.ShardOptions(parallel='ddp')) for a plan of DDP, "
            "or give model.module, which is sharded"
        )


def check_start(start: object) -> None:
    """Refuse what is no plan to begin with."""
    if start is not None and not isinstance(start, Plan):
        how = "memfit.load(path) reads one" if isinstance(start, str | os.PathLike) else "give a memfit.Plan"
        raise InputError(f"start is a plan to begin with, not {_kind(start)}; {how}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _needed(function: Callable[..., Any]) -> str:
    """Return the arguments that a callable cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        each.name for each in parameters if each.default is inspect.Parameter.empty and each.kind not in optional
    )


def _found_model(function: Callable[[], Any]) -> Step | None:
    """Return the step of a function that works on a model of its own; None when it has none yet."""
    try:
        return find_step(function)
    except InputError:
        return None
