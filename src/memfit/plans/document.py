"""The plan: a versioned, validated document that everything before makes and everything after uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from rich.console import RenderableType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memfit.capture import Implementation, ParameterCast, Step, Trace, chunked_losses, find_step, step_with
from memfit.capture import trace as capture
from memfit.errors import InputError
from memfit.files import write_whole
from memfit.plans.mismatch import PlanMismatch, find_differences
from memfit.plans.record import (
    SCHEMA,
    Blocker,
    Bytes,
    Checkpoint,
    ChunkedLossRecord,
    DdpPlan,
    Decision,
    Engine,
    Estimate,
    MicroBatchRecord,
    Ms,
    OffloadLinkRecord,
    Prediction,
    RecomputedCollective,
    ShardPlan,
    Status,
    TargetRecord,
    TraceRecord,
)
from memfit.plans.validation import check_content
from memfit.solve import EXACT
from memfit.text import counted, json_text, render_text
from memfit.units import display_budget, display_bytes

_AGAIN = "plan the step again"


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decisions for one step, what they are predicted to do, and the step that they are for.

    `bound_ms` is proven: no plan under this budget has a shorter step. `gap` is how far the time that the plan adds may
    be from the least possible, as a part of itself. An infeasible plan has neither, nor a prediction; its `blocker` is
    what stands in the way. `engine` is what `apply` runs the plan on; None leaves it to `apply`.
    """

    schema: Literal[1] = SCHEMA
    memfit: str
    fingerprint: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    target: TargetRecord
    ranks: Annotated[int, Meta(ge=1)]
    budget_bytes: Annotated[int, Meta(ge=1)]
    status: Status
    gap: Annotated[float, Meta(ge=0)] | None
    bound_ms: Ms | None
    baseline: Estimate
    predicted: Prediction | None
    minimum_budget_bytes: Bytes | None
    blocker: Blocker | None
    checkpoint: tuple[Checkpoint, ...]
    shard: ShardPlan | None
    optimizer: Implementation | None
    notes: tuple[str, ...]
    trace: TraceRecord
    ddp: DdpPlan | None = None
    engine: Engine | None = None
    mesh: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """The ranks that the step was captured on, by dimension, wrapped by its own code; other plans have none."""
    rank: int | msgspec.UnsetType = msgspec.UNSET
    """Which of them it was captured as, where they differ: ranks of a pipeline hold different stages."""
    wrappers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """What the step's own code has wrapped or sharded the model with, on a mesh: `fully_shard`, `DTensor`."""
    collectives: tuple[RecomputedCollective, ...] | msgspec.UnsetType = msgspec.UNSET
    """What ranks of the mesh do together once more where units are recomputed, in the order of the forward."""
    offload_link: OffloadLinkRecord | msgspec.UnsetType = msgspec.UNSET
    """What units offload over; plans that offload nothing have none."""
    chunked_loss: ChunkedLossRecord | msgspec.UnsetType = msgspec.UNSET
    """How the loss is computed in chunks; plans that leave it whole have none."""
    micro_batch: MicroBatchRecord | msgspec.UnsetType = msgspec.UNSET
    """How the training loop divides its batch, which memfit does not do by itself; others leave it whole."""
    decisions: tuple[Decision, ...] | msgspec.UnsetType = msgspec.UNSET
    """What was decided beside checkpointing, where the solver was asked to (`SolveOptions.decide`)."""
    price_ms_per_gib: Ms | msgspec.UnsetType = msgspec.UNSET
    """What a little less budget would add to the step, for each GiB; where `decisions` are."""

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "the document") -> Plan:
        """Read a plan. Another kind or version of document, a damaged or an inconsistent one is refused."""
        _check_version(text, where)
        try:
            plan = msgspec.json.decode(text, type=cls)
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            raise InputError(f"{where} is not a valid plan: {error}; {_AGAIN}") from error
        check_content(plan, where)
        return plan

    def to_json(self) -> str:
        """Return the document as JSON; the same plan is the same text everywhere."""
        return json_text(msgspec.to_builtins(self, order="deterministic"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document; the file appears whole or not at all."""
        write_whole(_path(path, "save"), self.to_json().encode(), "plan.json")

    def check(self, trace: Trace | Step | Callable[[], Any]) -> None:
        """Raise `PlanMismatch` with what differs when the plan was made for another step than this.

        A `Step`, or a function that runs one, is captured first, for the plan's device.
        """
        if callable(trace) and not isinstance(trace, nn.Module | type):
            trace = find_step(trace)
        if isinstance(trace, Step):
            trace = self.trace_of(trace)
        if not isinstance(trace, Trace):
            raise InputError(
                f"check takes the step that the plan is to be used for, not a {type(trace).__name__}: a memfit.Trace, "
                "or a memfit.Step or a function that runs the step, which is captured"
            )
        found = find_differences(self, trace)
        if found:
            raise PlanMismatch(found)

    def trace_of(self, step: Step) -> Trace:
        """Capture a step for the plan's device as the plan runs it, its loss and its optimizer's step too."""
        mesh = None if self.mesh is msgspec.UNSET else self.mesh
        rank = None if self.rank is msgspec.UNSET else self.rank
        cast = None
        if self.trace.cast is not msgspec.UNSET:
            cast = ParameterCast(dtype=self.trace.cast.dtype, units=self.trace.cast.units)
        with contextlib.ExitStack() as stack:
            if self.chunked_loss is not msgspec.UNSET:
                stack.enter_context(chunked_losses(self.chunked_loss.setting))
            if self.optimizer is not None:
                step = stack.enter_context(step_with(step, self.optimizer))
            return capture(step, target=self.target.device, mesh=mesh, rank=rank, cast=cast)

    @property
    def exact(self) -> bool:
        """Whether gradients are the same, bit for bit, as without the plan; else sums are in another order."""
        decided = {decision.kind for decision in self.decisions or ()}
        return self.chunked_loss is msgspec.UNSET and self.optimizer is None and decided <= {"checkpoint", *EXACT}

    def apply(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        engine: Engine | None = None,
    ) -> tuple[nn.Module, Any]:
        """Make a model run the plan from its next step on; return model and optimizer.

        Where several optimizers step the model, give a list of them. A plan that does not belong to the model is
        refused with what differs, before anything is changed. A plan for several ranks shards the model over those of
        the process group, or of `mesh`; a model that is already wrapped or sharded runs the checkpoint policies only.

        `engine` is `"local"` for one rank; for several `"fsdp2"`, PyTorch's `fully_shard`, or `"sharded"`, memfit's own
        runtime; by default the plan's, else `"sharded"` where it stays within its budget there. One on which it would
        not is refused: plan with `engine=` for it. FSDP2 makes DTensors of the parameters: the optimizers that are
        given go on with those, others are made afterwards.
        """
        from memfit.engines import apply

        return apply(self, model, optimizer, mesh, engine)

    def remove(self, model: nn.Module) -> nn.Module:
        """Restore a model that runs the plan to what it was before `apply`.

        On `"fsdp2"` every rank must call it: the parameters become whole again, the same objects as before `apply` with
        the values of now, and so does the state of the optimizers that were given or have stepped since. A model that
        memfit did not shard, or that its own runtime did, stays sharded.
        """
        from memfit.engines import remove

        return remove(self, model)

    def loss(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a loss function that the plan recomputes in backward, or in chunks: call it in place of the given one.

        A plan that does this with a loss outside the model needs it, which it prints. The function takes the model's
        output and computes all of the loss. Elsewhere it does no harm: what is returned runs the given one as it is.
        """
        from memfit.engines import plan_loss

        return plan_loss(self, loss)

    def verify(
        self,
        step: Step | Callable[[], Any],
        steps: int = 3,
        *,
        memory_tolerance: float = 0.01,
        time_tolerance: float | None = 0.15,
        engine: Engine | None = None,
    ) -> Any:
        """Run the real step with the plan and without it and compare both with the prediction: a `Verification`.

        Everything is left as it was found. The measured time is the median of `steps` steps; with a `time_tolerance`
        of None it is shown and does not count. A plan for several ranks is verified under `torchrun`, by all ranks at
        once, on the `engine` that `apply` would take.
        """
        from memfit.verify import verify

        return verify(
            self, step, steps, memory_tolerance=memory_tolerance, time_tolerance=time_tolerance, engine=engine
        )

    def __rich__(self) -> RenderableType:
        from memfit.report import plan_report

        return plan_report(self)

    def __str__(self) -> str:
        return render_text(self.__rich__())

    def __repr__(self) -> str:
        what = f"{self.status} for {display_bytes(self.budget_bytes)} on {self.ranks} x {self.target.device}"
        if self.minimum_budget_bytes is not None and self.status == "infeasible":
            answer = f"the smallest budget that works is {display_budget(self.minimum_budget_bytes)}"
        else:
            answer = f"{counted(len(self.checkpoint), 'unit')} checkpointed"
        return f"Plan({what}, {answer}, fingerprint {self.fingerprint[:12]})"


def load(path: str | os.PathLike[str]) -> Plan:
    """Read the plan in a file."""
    source = _path(path, "load")
    if source.is_dir():
        raise InputError(f"{source} is a folder; give the path of a file in it that Plan.save wrote")
    try:
        text = source.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"there is no file {source}; give the path of a file that Plan.save wrote") from error
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}; give a file that Plan.save wrote") from error
    return Plan.from_json(text, where=str(path))


def _path(path: object, verb: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"{verb} takes the path of a file, not {path!r}; write {verb}('plan.json')")
    return Path(path)


class _Version(msgspec.Struct):
    schema: int
    fingerprint: str


def _check_version(text: str | bytes, where: str) -> None:
    try:
        version = msgspec.json.decode(text, type=_Version)
    except msgspec.ValidationError as error:
        raise InputError(f"{where} is not a memfit plan: {error}; give a file that Plan.save wrote") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}; give a file that Plan.save wrote") from error
    if version.schema != SCHEMA:
        raise InputError(f"{where} has plan schema {version.schema}, this memfit reads {SCHEMA}; {_AGAIN}")
