"""The guard of a model that several ranks train together: what one has no memory for is planned anew on all.

Note [A fault on one rank]: the rank that fails cuts all connections, and so do those that raise because of it; all meet
in a vote (Note [One vote a step]) and tell each other what happened. Then every rank brings its engine back to between
two steps, rolls the step back, makes its connections anew, gets the tighter plan that one of them has solved, and runs
the step again. The first rank that has not run out of memory solves it, because it has the room to.
"""

from __future__ import annotations

import gc
import hashlib
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from memfit.capture import Phase, Step, Trace
from memfit.cost import Cost
from memfit.engines import EngineState, check_known, engine_of, plan_of_model, replace_policies
from memfit.errors import InputError, MemfitError, StateError
from memfit.plans import Plan, wrappers_of
from memfit.recovery.drift import Drift, PlanDrift
from memfit.recovery.explanation import Explanation, OutOfMemory, describe_place
from memfit.recovery.guarding import Guard, list_lost, tell_all_allowed
from memfit.recovery.rank_talk import RankTalk
from memfit.recovery.replan import Replanner, single_tensor
from memfit.recovery.rollback import Before
from memfit.sharded import RankError
from memfit.solve import SolveOptions
from memfit.units import display_bytes
from memfit.verify import is_out_of_memory, release

_P = ParamSpec("_P")
_R = TypeVar("_R")
_GOES_ON, _FAILED = 0, 1
_KINDS = ("", "higher", "lower", "growth", "inputs")


class RankGuard(Guard):
    """A guard on one of several ranks, which make, enter and leave theirs together.

    `faults` are the failures so far that were planned around, with the rank of each.
    """

    def __init__(self, plan: Plan, model: torch.nn.Module, **given: Any) -> None:
        self._talk = RankTalk()
        self._divided = True
        self.faults: tuple[Explanation, ...] = ()
        self._calls = 0
        self._voted = self._abandoned = False
        self._drift: tuple[str, int, int] | None = None
        self._talk.together("guard", lambda: super(RankGuard, self).__init__(plan, model, **given))
        if len(set(self._talk.gather(hashlib.sha256(plan.to_json().encode()).hexdigest()))) > 1:
            raise InputError(
                "ranks gave the guard different plans; solve on one rank and load the document on the others"
            )
        if self._keeper is not None:
            self._talk.together("guard", self._check_repeatable)

    def __enter__(self) -> RankGuard:
        try:
            self._talk.together("guard", super().__enter__)
        except BaseException:
            self._remove_hooks()
            raise
        if self._keeper is not None:
            self._talk.prepare()
            self._talk.watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        self._talk.stop()
        if error is not None and not isinstance(error, MemfitError):
            if is_out_of_memory(error):  # of a step outside guard.step: the others are told, and nobody goes on
                self._talk.cut(f"rank {self._talk.rank} ran out of memory: {_first_line(error)}")
            elif self._talk.follows(error) and (said := self._talk.notice()) is not None:
                super().__exit__(kind, error, trail)
                raise RankError(f"{said}. Start all ranks again and go on from the last save") from error
        super().__exit__(kind, error, trail)

    def _check_repeatable(self) -> None:
        check_known(self._model)
        self._talk.check_backends()

    def _make_replanner(
        self, step: Step | Trace | Callable[[], Any], cost: Cost | str | None, options: SolveOptions | None
    ) -> Replanner:
        if isinstance(step, Step) and isinstance(step.model, torch.nn.Module) and _is_divided(step.model, self._model):
            raise InputError(
                "the model of this step is divided between ranks, and plans are made of the whole one: give guard "
                "step=memfit.Step(factory, memfit.spec(...), ...), where factory builds the model, or the trace that "
                "memfit.trace(step) returned before apply"
            )
        engine = engine_of(self.plan, self._model)
        return Replanner(
            self.plan, step, self._model, cost=cost, options=options, engine=engine, spare=self._talk.rank == 0
        )

    # -- one step ---------------------------------------------------------------------------------------------------

    def step(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run one training step on every rank; where one is out of memory, all roll back, plan tighter and repeat it.

        Raises on every rank: `OutOfMemory` when no tighter plan is left, when some rank could not take the step back,
        or after `retries`; another error of one rank there, and `RankError` with its text on the others.
        """
        if not self._hooks:
            raise StateError("the guard is not at work; write `with memfit.guard(...) as guard:` around the steps")
        if self._keeper is None:
            raise StateError("guard.step must know the optimizer to take steps back; give optimizer= to memfit.guard")
        self._calls += 1
        history: list[str] = []
        while True:
            attempt = self._attempt(lambda: function(*args, **kwargs))
            if attempt.meeting is None:
                return attempt.result
            self._recover(attempt, history)
            del attempt

    def _attempt(self, function: Callable[[], Any]) -> _Attempt:
        """Run the step once, up to the vote at the least; where a rank failed, all ranks have met when it returns."""
        assert self._keeper is not None
        made = _Attempt(engine=EngineState(self._model))
        self._voted = self._abandoned = False
        try:
            made.before = self._before = self._keeper.before()
            self._in_step = self._in_optimizer = False
            made.result = function()
            if not self._voted or (self._copies and not self._abandoned):
                self._vote()
            if not self._abandoned:
                self._keeper.learn(made.before)
                return made
        except _Abandoned:
            pass
        except RankError:  # a rank has gone, and with it the way to the others
            raise
        except Exception as error:
            made.failure = error
            made.said = self._describe(error)
            self._talk.cut(None if made.said.kind == "followed" else made.said.text)
            try:
                self._tell(_FAILED)
            except RankError as gone:  # nobody is left to go on with: this rank's own error is what is known
                raise self._own_error(made) or gone from error
        except BaseException as error:
            self._talk.leave(f"rank {self._talk.rank} was ended by {type(error).__name__}")
            raise
        finally:
            self._before = None
            self._in_step = self._in_optimizer = False
        if made.failure is None:
            self._talk.cut(None)
        committed = made.before is not None and made.before.optimizer_began
        made.said = replace(made.said, call=self._calls, committed=committed and not self._copies)
        made.meeting = self._talk.gather(made.said)
        return made

    def _describe(self, error: Exception) -> _Said:
        who = f"rank {self._talk.rank}"
        if self._talk.follows(error):
            return _Said(kind="followed", text=f"{who}: {_first_line(error)}")
        if not is_out_of_memory(error):
            return _Said(kind="error", text=f"{type(error).__name__}: {error}")
        try:
            explanation = self._explain(error)
        except Exception as again:  # the others wait, whatever it is
            return _Said(kind="error", text=f"{_first_line(error)}, which could not be explained: {again!r}")
        return _Said(
            kind="memory", text=f"{who} ran out of memory", explanation=explanation, inputs=_sendable(self._call)
        )

    def _explain(self, error: BaseException) -> Explanation:
        return replace(super()._explain(error), rank=self._talk.rank)

    def _own_error(self, attempt: _Attempt) -> Exception | None:
        """Return what this rank raises where no other rank takes part any more; None where it only followed."""
        if attempt.said.explanation is not None:
            return OutOfMemory(attempt.said.explanation, restored=False)
        return attempt.failure if attempt.said.kind == "error" else None

    def _commit(self) -> None:
        if not self._voted:
            self._vote()

    def _vote(self) -> None:
        """Ask whether every rank goes on; leave the step where one does not."""
        self._voted = True
        self._tell(_GOES_ON)
        if self._abandoned:
            raise _Abandoned

    def _tell(self, status: int) -> None:
        kind, measured, planned = self._drift or ("", 0, 0)
        self._drift = None
        told = self._talk.vote([status, _KINDS.index(kind), measured, planned])
        self._compare_drifts(told)
        self._abandoned = any(each[0] != _GOES_ON for each in told)

    # -- after a fault ----------------------------------------------------------------------------------------------

    def _recover(self, attempt: _Attempt, history: list[str]) -> None:
        """Bring every rank back to before the step with a plan that takes less; raise on all where that cannot be."""
        meeting = attempt.meeting
        assert meeting is not None
        failure = attempt.failure
        if failure is not None:
            release(failure)
        out = [each.explanation for each in meeting if each.explanation is not None]
        other = next((rank for rank, each in enumerate(meeting) if each.kind == "error"), None)
        first = out[0] if other is None and out else None
        lost = self._talk.together("taking the step back", lambda: self._roll_back(attempt, tensors=first is not None))
        if not self._talk.together("making the connections between ranks anew", self._talk.renew):
            text = "a rank has no memory left for new connections to the others: start all ranks again"
            unknown = self._other_error(other, meeting, failure)
            raise unknown if first is None else OutOfMemory(replace(first, history=(*history, text)), restored=False)
        attempt.engine.renewed()
        if first is None:
            raise self._other_error(other, meeting, failure)
        restored = self._taken_back(meeting, self._talk.gather(lost), history)
        if not restored or not self._tighten_all(out, [each.inputs for each in meeting], history):
            raise OutOfMemory(replace(first, history=tuple(history)), restored=restored) from failure
        told = replace(first, history=tuple(history))
        self.faults = (*self.faults, told)
        self._talk.prepare()
        if self._talk.rank == 0:
            warnings.warn(str(told), PlanDrift, stacklevel=3)

    def _roll_back(self, attempt: _Attempt, *, tensors: bool) -> list[str]:
        """Roll back this rank's engine, and with `tensors` its state; return the names of what could not be restored.

        After an error that is not about memory tensors stay as they are, as on one device.
        """
        if self._device.type == "cuda":  # kernels of the aborted collectives may still be ending
            torch.cuda.synchronize(self._device)
        attempt.engine.restore()
        lost = []
        if tensors and attempt.before is not None:
            lost = attempt.before.restore()
            if attempt.engine.holds_gradients:
                lost.append("gradients that earlier steps accumulated without reducing them")
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return lost

    def _taken_back(self, meeting: Sequence[_Said], lost: Sequence[Sequence[str]], history: list[str]) -> bool:
        """Write down what became of the step; return whether every rank is as before it."""
        failed = [(rank, said.explanation) for rank, said in enumerate(meeting) if said.explanation is not None]
        places = ", ".join(f"{describe_place(each.at)} on rank {rank}" for rank, each in failed if each is not None)
        apart = len({said.call for said in meeting}) > 1 or len({said.committed for said in meeting}) > 1
        if apart:
            history.append(
                f"the step failed {places}, when other ranks had begun to write to their parameters: go on from a "
                "checkpoint, and give guard copies=True"
            )
            return False
        for rank, names in enumerate(lost):
            if names:
                history.append(f"on rank {rank} {list_lost(names)}")
                return False
        history.append(f"the step failed {places} and was taken back on every rank")
        return True

    def _other_error(self, rank: int | None, meeting: Sequence[_Said], failure: Exception | None) -> Exception:
        """Return what a rank raises after an error that was not about memory."""
        if failure is not None and (rank is None or meeting[self._talk.rank].kind == "error"):
            return failure
        if rank is None:
            said = next((each.text for each in meeting if each.kind == "followed"), "no rank says why")
            return RankError(f"ranks lost their connections in a step: {said}")
        error = RankError(f"the step failed on rank {rank}: {meeting[rank].text}")
        error.__cause__ = failure
        return error

    def _tighten_all(self, out: Sequence[Explanation], inputs: Sequence[Any], history: list[str]) -> bool:
        """Apply on every rank what one of them decides; return False when nothing is left to try."""
        if self._replanner is None:
            return False
        assert self._optimizer is not None
        tries = len(history) // 2
        if tries >= self._retries:
            history.append(tell_all_allowed(self._retries))
            return False
        if any(each.at.phase is Phase.OPTIMIZER for each in out):
            changed = self._talk.gather(single_tensor(self._optimizer))
            if all(changed):
                self._switched, self._sizes = True, None
                history.append("the optimizer now updates one parameter after the other (foreach=False), on every rank")
                return True
            history.append("no plan lowers what the optimizer's step takes: activations are gone by then")
            return False
        failed = {each.rank for each in out}
        solver = next((rank for rank in range(self._talk.ranks) if rank not in failed), 0)
        self._call = next((each for each in inputs if each is not None), None)
        self._captured = all(self._talk.gather(self._talk.together("capturing the step", self._capture_again)))
        decided = _Decision()
        if self._talk.rank == solver:
            decided = self._decide(out, last=tries == self._retries - 1)
        decided = self._talk.gather(decided)[solver]
        if decided.error is not None:
            raise RankError(f"planning the step anew failed on rank {solver}: {decided.error}")
        if decided.document is None:
            history.append(decided.text)
            return False
        plan = Plan.from_json(decided.document)
        self._talk.together("the tighter plan", lambda: self._run(plan))
        history.append(decided.text)
        return True

    def _capture_again(self) -> bool:
        """Capture the step for the inputs of the rank that failed, where they are not the plan's; on every rank."""
        if self._call is None or self._replanner is None:
            return True
        self._planning = True
        try:
            return self._replanner.for_inputs(self.plan, *self._call)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._planning = False

    def _decide(self, out: Sequence[Explanation], *, last: bool) -> _Decision:
        """Solve for a tighter plan; on one rank."""
        assert self._replanner is not None
        failed = min(min(each.expected.total_bytes, each.planned_peak_bytes) for each in out)
        try:
            found = self._replanner.tighter(self.plan, failed, last=last)
            if found is None or found.predicted is None:
                return _Decision(text=self._gave_up())
        except Exception as error:
            if is_out_of_memory(error):
                return _Decision(text="there was not enough memory left to plan the step anew")
            return _Decision(error=f"{type(error).__name__}: {error}")
        return _Decision(
            document=found.to_json(),
            text=f"it was planned anew for {display_bytes(found.budget_bytes)}, peak "
            f"{display_bytes(found.predicted.peak_bytes)}, and run again on every rank",
        )

    def replan(self, budget: str | int | float) -> Plan:
        """Solve the step for another budget on rank 0, and make every rank run that plan; all ranks must call it."""
        if self._replanner is None:
            raise StateError("replan must know the step; give step= to memfit.guard")
        if self._in_step:
            raise StateError("a step is running; replan between steps")
        replanner = self._replanner
        text = self._talk.together(
            "replan", lambda: replanner.plan(self.plan, budget).to_json() if self._talk.rank == 0 else ""
        )
        plan = Plan.from_json(self._talk.gather(text)[0])
        if plan.predicted is None:
            least = plan.minimum_budget_bytes
            most = "" if least is None else f" of {display_bytes(least)} or more"
            raise InputError(f"no plan of this step fits {display_bytes(plan.budget_bytes)}; give a budget{most}")
        self._talk.together("replan", lambda: self._run(plan))
        return plan

    def _run(self, plan: Plan) -> None:
        replace_policies(plan, self._model, self._optimizer)
        applied = plan_of_model(self._model)
        if applied is not None:
            applied.leave_inputs()
        self.plan = plan
        self._timeline = None if self._replanner is None else self._replanner.timeline(plan)
        self._sizes = None

    # -- drifts -----------------------------------------------------------------------------------------------------

    def _warn(self, kind: str, measured: int | None, planned: int, inputs: tuple[str, ...]) -> None:
        """Tell the others with the next vote, which costs nothing; without guard.step each rank warns by itself."""
        if self._keeper is None or not self._voted:
            super()._warn(kind, measured, planned, inputs)
        elif not any(each.kind == kind for each in self.drifts):
            self._drift = (kind, -1 if measured is None else measured, planned)

    def _compare_drifts(self, told: Sequence[Sequence[int]]) -> None:
        """Note of each kind the rank where it is largest; rank 0 warns."""
        for number, kind in enumerate(_KINDS):
            found = [(each[2], rank, each[3]) for rank, each in enumerate(told) if number and each[1] == number]
            if not found or any(each.kind == kind for each in self.drifts):
                continue
            measured, rank, planned = min(found) if kind == "lower" else max(found)
            own = None if measured < 0 else measured
            drift = Drift(kind=kind, step=self.steps, measured_bytes=own, planned_bytes=planned, inputs=(), rank=rank)
            self.drifts = (*self.drifts, drift)
            if self._talk.rank == 0:
                warnings.warn(str(drift), PlanDrift, stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a rank says of a step that some rank has left. `kind` is `memory`, `error`, `followed` or empty."""

    kind: str = ""
    text: str = "another rank left the step"
    explanation: Explanation | None = None
    inputs: Any = None
    call: int = 0
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What the rank that solved has decided for all: a plan's document, or why there is none."""

    document: str | None = None
    text: str = ""
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One run of a step; `meeting` is what all ranks said when one has left it."""

    engine: EngineState
    before: Before | None = None
    result: Any = None
    failure: Exception | None = None
    said: _Said = _Said()
    meeting: list[_Said] | None = None


class _Abandoned(Exception):
    """Unwinds a step that another rank has left."""


def _is_divided(model: torch.nn.Module, trained: torch.nn.Module) -> bool:
    return model is trained or bool(wrappers_of(model))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _sendable(call: Any) -> Any:
    """Return the inputs of a call where they can be sent to other ranks, else None: the plan's own are used then."""
    try:
        pickle.dumps(call)
    except Exception:  # whatever a user's object raises
        return None
    return call
