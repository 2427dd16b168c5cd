"""What was written on the command line, turned into steps, traces, plans, targets and options of the library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.options import HardwareOptions, SolverOptions, StepOptions
from memfit.cli.output import say
from memfit.cli.problems import UsageError, about
from memfit.errors import InputError
from memfit.progress import Progress

if TYPE_CHECKING:
    from memfit.analysis import EarlyCaptures, Lever, Report
    from memfit.capture import Step, Trace
    from memfit.hardware import Target
    from memfit.plans import Plan
    from memfit.presets import NamedSteps
    from memfit.solve import SolveOptions

_TRACE = b"memfit trace"
_EXAMPLES = "--target h100-sxm, --target a100-sxm-80gb, --target rtx-4090 or --target cpu; `memfit devices` lists all"


@dataclass(frozen=True, kw_only=True)
class ResolvedStep:
    """The step or trace that STEP names, its title, and notes on the defaults that were chosen."""

    step: Step | Trace
    title: str
    notes: tuple[str, ...] = ()

    def show(self) -> None:
        """Say what is looked at, on the error output; results say the rest."""
        say("; ".join((self.title, *self.notes)))


def step_and_target(step: StepOptions, hardware: HardwareOptions) -> tuple[ResolvedStep, Target]:
    """Resolve the step and the target; a named target is checked first, since loading a step may take long."""
    if hardware.target is not None:
        resolve_target(hardware)
    found = resolve_step(step)
    return found, resolve_target(hardware, found.step)


def resolve_step(options: StepOptions) -> ResolvedStep:
    """Return the step that STEP names, or the trace when it is the file of one."""
    return resolve_steps(options)(options)


def resolve_steps(options: StepOptions) -> Callable[[StepOptions], ResolvedStep]:
    """Return a function from --batch and --seq to the step that STEP names, which is loaded once."""
    _check_counts(options)
    path = Path(options.step)
    if path.is_file() and is_trace(path):
        return partial(_of_trace, path)
    if path.suffix == ".memfit":
        raise UsageError(f"STEP: there is no trace {path}; memfit.save_trace(trace, path) writes one")
    if path.is_file() and path.suffix == ".json":
        raise UsageError(
            f"STEP: {path} is a file of JSON; for a configuration of transformers write hf:{path}, and the step that a "
            "plan was made for is the one given to memfit plan"
        )
    from memfit.presets import named_steps_at

    with asked("STEP: "):
        return partial(_of_name, named_steps_at(options.step, task=options.task))


def _of_trace(path: Path, options: StepOptions) -> ResolvedStep:
    for name in ("batch", "seq", "task", "autocast", "accumulation_steps"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option}: {path} is a trace, of one batch and one step; give the step it was captured from"
            )
    return ResolvedStep(step=read_trace(path), title=f"the trace {path.name}")


def _of_name(steps: NamedSteps, options: StepOptions) -> ResolvedStep:
    with asked():
        found = steps(batch=options.batch, seq=options.seq)
    return ResolvedStep(
        step=_changed(found.step, options), title=_changed_title(found.title, options), notes=found.notes
    )


def _changed(step: Step, options: StepOptions) -> Step:
    """Return the step with what the options say of its compute and of its micro-batches."""
    import torch

    from memfit.presets import in_autocast

    changes: dict[str, Any] = {}
    if options.autocast is not None:
        changes["autocast"] = None if options.autocast == "float32" else getattr(torch, options.autocast)
    if options.accumulation_steps is not None:
        changes["accumulation_steps"] = options.accumulation_steps
    if changes and step.run is not None:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in changes)
        raise UsageError(f"{named}: this step runs a loop of its own (run=), which says so itself; change it there")
    if "autocast" in changes:
        step = in_autocast(step, changes["autocast"])
    return replace(step, **changes) if changes else step


def _changed_title(title: str, options: StepOptions) -> str:
    words = [title]
    if options.autocast is not None:
        words.append("no autocast" if options.autocast == "float32" else f"autocast to {options.autocast}")
    if options.accumulation_steps is not None:
        words.append(f"{options.accumulation_steps} micro-batches a step")
    return ", ".join(words)


def _check_counts(options: StepOptions) -> None:
    for name in ("batch", "seq", "accumulation_steps"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {number}; write a whole number of at least 1")


@contextmanager
def asked(of: str = "") -> Iterator[None]:
    """Raise it as a usage error when the step does not exist or cannot be as asked; errors inside the step pass."""
    from memfit.presets import WrongRequest

    try:
        yield
    except WrongRequest as error:
        raise UsageError(f"{of}{error}") from error


def read_trace(path: Path) -> Trace:
    """Return the trace in a file."""
    from memfit.capture import load_trace

    with reading(path):
        return load_trace(path)


def is_trace(path: Path) -> bool:
    """Return whether a file begins as traces do."""
    with reading(path), open(path, "rb") as file:
        return file.read(len(_TRACE)) == _TRACE


def read_plan(path: Path, option: str = "PLAN") -> Plan:
    """Return the plan in a file."""
    from memfit.plans import load

    check_is_there(path, option, "a plan that `memfit plan -o` or Plan.save wrote")
    with reading(path):
        return load(path)


def check_is_there(path: Path, option: str, what: str) -> None:
    """Refuse a file that is not there, by the option that names it."""
    if not path.is_file():
        raise UsageError(f"{option}: there is no file {path}; give {what}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an `InputError` for a file that is there and cannot be read."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def resolve_target(options: HardwareOptions, step: Step | Trace | None = None) -> Target:
    """Return the target: the one that is named, the one of a trace, or the GPU that is here."""
    from memfit.capture import Trace
    from memfit.hardware import Target

    ranks = options.ranks
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks is {ranks}; write a whole number of at least 1")
    sizes = step.mesh if isinstance(step, Trace) and options.mesh is None else parse_mesh(options.mesh)
    if sizes:
        own = math.prod(sizes.values())
        if ranks not in (None, own):
            raise UsageError(f"--ranks is {ranks}, and the mesh has {own} ranks; leave --ranks out")
        ranks = own
    if options.target is not None:
        with about("--target"):
            target = Target.parse(options.target, ranks=ranks)
    elif isinstance(step, Trace):
        target = Target.parse(step.hardware, ranks=ranks)
    else:
        target = Target.parse(_gpu_here(), ranks=ranks)
    with about("--context"):
        target = Target.parse(target, context=options.context)
    with about("--nccl"):
        target = Target.parse(target, nccl=options.nccl)
    with about("--margin"):
        target = Target.parse(target, margin=options.margin)
    with about("--host-memory"):
        target = Target.parse(target, host_memory=options.host_memory)
    if options.expandable_segments:
        target = Target.parse(target, expandable_segments=True)
    if isinstance(step, Trace) and step.device != target.device.name:
        raise UsageError(
            f"--target: the trace was captured for {step.device}, and the kernels of {target.device.name} may be "
            "others; leave --target out, or give the step"
        )
    with about("--budget"):
        target.budget_bytes(options.budget)
    return target


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """Return the sizes of a mesh by name, from `dp=8,tp=2`."""
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or not size.isdigit() or int(size) < 1 or name in sizes:
            raise UsageError(f"--mesh is {text!r}; write the ranks of each dimension by name, as in dp=8 or dp=8,tp=2")
        sizes[name] = int(size)
    return sizes


def parse_rank(text: str | None) -> dict[str, int] | int | None:
    """Return a rank of a mesh: its number, or its place by dimension, from `pp=3`."""
    if text is None or text.isdigit():
        return None if text is None else int(text)
    place: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if not name or not number.isdigit() or name in place:
            raise UsageError(f"--rank is {text!r}; write its number, or its place in the mesh, as in pp=3")
        place[name] = int(number)
    return place


def _gpu_here() -> str:
    import torch

    from memfit.hardware import load_device

    if not torch.cuda.is_available():
        raise UsageError(f"--target: there is no GPU here to plan for; name one: {_EXAMPLES}")
    name = torch.cuda.get_device_name()
    try:
        return load_device(name).name
    except InputError as error:
        raise UsageError(
            f"--target: the GPU here is {name!r}, of which memfit has no figures; name one: {_EXAMPLES}"
        ) from error


def capture_step(
    step: Step | Trace, target: Target, options: HardwareOptions, solver: SolverOptions | None = None
) -> Trace:
    """Return the trace of a step for the target's device; on a mesh, of one that is parallel itself."""
    from memfit.capture import Trace, resolve_rank, trace
    from memfit.plans import find_cast
    from memfit.sharding import ShardOptions

    mesh, rank = parse_mesh(options.mesh), parse_rank(options.rank)

    if isinstance(step, Trace):
        if mesh is not None and mesh != step.mesh:
            raise UsageError(f"--mesh: the trace was captured on {step.mesh or 'none'}; leave it out, or give the step")
        if rank is not None:
            raise UsageError(f"--rank: the trace was captured as rank {step.rank}; leave it out, or give the step")
        return step
    if rank is not None and mesh is None:
        raise UsageError("--rank: say of which mesh, as in --mesh pp=4")
    cast = None
    if mesh is not None:
        with about("--rank"):
            rank = resolve_rank(rank, mesh)
    elif solver is not None and solver.parallel == "fsdp":
        cast = find_cast(step, target, ShardOptions(param_dtype=solver.param_dtype))
    with Progress("capturing one training step"):
        return trace(step, target=target, mesh=mesh, rank=rank, cast=cast)


def solve_options(
    options: SolverOptions,
    trace: Trace | None,
    *,
    several_ranks: bool,
    ranks: int | None = None,
    optimizer: bool = False,
) -> SolveOptions:
    """Return the solver's options; names with a star stand for all units that they match.

    Names are looked up in the trace, which may be left out when there are none. `ranks` are left out where a search
    goes through several numbers of them.
    """
    from memfit.sharding import ShardOptions
    from memfit.solve import Limits, SolveOptions
    from memfit.tradeoff import find_units

    found = () if trace is None else find_units(trace)
    names = [unit.name for unit in found]
    named = {option: _expanded(option, getattr(options, option), names) for option in ("force", "forbid", "units")}
    for option, given in named.items():
        with about(f"--{option}"):
            SolveOptions(ac_units=given).allowed(found, ())
    modules = [] if trace is None else sorted({call.module for call in trace.calls if call.module})
    sharded = _expanded("shard-units", options.shard_units, modules)
    if options.time_limit is not None and not options.time_limit > 0:
        raise UsageError(f"--time-limit is {options.time_limit:g}; write seconds, more than 0")
    limits = Limits() if options.time_limit is None else Limits(time_limit_s=options.time_limit)
    _check_sharding(options, several_ranks)
    if options.replicas is not None and options.replicas < 1:
        raise UsageError(f"--replicas is {options.replicas}; write a whole number of at least 1")
    if options.replicas is not None and ranks is not None:
        with about("--replicas"):
            ShardOptions(replicas=options.replicas).shard_ranks(ranks)
    with about("--decide"):
        SolveOptions(decide=options.decide)  # type: ignore[arg-type]
    with about("--fix"):
        SolveOptions(fixed=options.fix)  # type: ignore[arg-type]
    with about("--loss-chunks"):
        SolveOptions(loss_chunks=options.loss_chunks)
    with about("--force and --forbid"):
        return SolveOptions(
            offload=options.offload,
            decide=options.decide or None,  # type: ignore[arg-type]
            fixed=options.fix,  # type: ignore[arg-type]
            loss_chunks=options.loss_chunks,
            force=named["force"],
            forbid=named["forbid"],
            ac_units=named["units"] or None,
            shard=ShardOptions(
                parallel=options.parallel,
                replicas=options.replicas or 1,
                units=sharded or None,
                shard_dtype=options.shard_dtype,
                param_dtype=options.param_dtype,
                reduce_dtype=options.reduce_dtype,
                engine=options.engine,
            ),
            limits=limits,
            optimizer=optimizer,
        )


def _check_sharding(options: SolverOptions, several_ranks: bool) -> None:
    """Refuse options of several ranks that would change nothing."""
    replicated = options.parallel == "ddp"
    if replicated and not several_ranks:
        raise UsageError("--parallel ddp is for several ranks, and there is one; add --ranks 8, or leave it out")
    for name in ("replicas", "engine", "shard_units", "param_dtype", "reduce_dtype", "shard_dtype"):
        if getattr(options, name) and (replicated or not several_ranks):
            why = "--parallel ddp has none" if replicated else "one rank has none; add --ranks 8, or leave it out"
            raise UsageError(f"--{name.replace('_', '-')} is for sharded parameters, and {why}")


def _expanded(option: str, given: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    """Expand patterns to the names that they match; a star stands for one part of a path."""
    found: list[str] = []
    for each in given:
        if "*" not in each:
            found.append(each)
            continue
        pattern = re.compile(re.escape(each).replace(r"\*", r"[^.#]*"))
        fitting = [name for name in names if pattern.fullmatch(name)]
        if not fitting:
            paths = [name for name in names if name]
            shown, more = ", ".join(paths[:4]), len(paths) - 4
            rest = f" and {more} more" if more > 0 else ""
            raise UsageError(f"--{option}: nothing fits {each!r}; there are {shown}{rest}")
        found += fitting
    return tuple(dict.fromkeys(found))


def find_levers(report: Report, step: Step | Trace, cost: str, early: EarlyCaptures | None = None) -> tuple[Lever, ...]:
    """Return what would lower the step's peak under its plan, or under the smallest budget where nothing fits."""
    from memfit.analysis import Case, find_levers
    from memfit.capture import Step
    from memfit.plans import resolve_cost

    budget_bytes = report.target.usable_bytes if report.plan is None else report.plan.budget_bytes
    case = Case(
        report=report,
        step=step if isinstance(step, Step) else None,
        cost=resolve_cost(cost, report.target),
        budget_bytes=budget_bytes,
        early=early,
    )
    with Progress("working out levers") as work:
        return find_levers(case, watch=work.add)
