"""A mixed-integer linear program for HiGHS: variables and rows go in, a typed result comes out."""

from __future__ import annotations

import enum
import math
import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from memfit.errors import InputError, MemfitError

FREE = math.inf


class Status(str, enum.Enum):
    """How a solve ended. `FEASIBLE` has an answer whose optimality is not proven, `UNKNOWN` has none."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


class SolverError(MemfitError, RuntimeError):
    """The solver failed in a way that no input should make it fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """What the solver knows so far; the objective is infinite before the first answer."""

    objective: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """How far the answer may be from the best one, as a part of itself."""
        return relative_gap(self.objective, self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The end of a solve. `bound` is proven: no answer is below it."""

    status: Status
    values: tuple[float, ...]
    objective: float
    bound: float
    seconds: float
    rows: int
    columns: int

    @property
    def gap(self) -> float:
        """How far the answer may be from the best one, as a part of itself."""
        return relative_gap(self.objective, self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a solve may stop: the gap it must prove, a part of the added time, and the seconds it may take.

    `slack_ms` is a gap in time: a plan is good enough where none adds so much less.
    """

    gap: float = 0.0
    slack_ms: float = 0.0
    time_limit_s: float = 60.0
    threads: int = 1

    def __post_init__(self) -> None:
        if not _is_number(self.gap) or not 0 <= self.gap <= 1:
            raise InputError(f"Limits.gap is {self.gap!r}; write a part from 0 to 1, 0.01 for 1 %")
        if not _is_number(self.slack_ms) or not self.slack_ms >= 0:
            raise InputError(f"Limits.slack_ms is {self.slack_ms!r}; write milliseconds, 0.0 for the best plan")
        if not _is_number(self.time_limit_s) or not self.time_limit_s >= 0:
            raise InputError(
                f"Limits.time_limit_s is {self.time_limit_s!r}; write seconds, such as 60.0, or math.inf for no limit"
            )
        if isinstance(self.threads, bool) or not isinstance(self.threads, numbers.Integral) or self.threads < 1:
            raise InputError(f"Limits.threads is {self.threads!r}; write a whole number of at least 1")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def relative_gap(objective: float, bound: float) -> float:
    """Return 0 when the objective is proven, otherwise the distance to the bound as a part of the objective."""
    if not math.isfinite(objective):
        return math.inf
    return max(0.0, objective - bound) / max(abs(objective), 1e-9)


@dataclass(slots=True)
class Milp:
    """Minimise a sum over variables under rows. Everything is added in a fixed order, so answers repeat."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def variable(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """Add a variable and return its number."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], *, lower: float = -FREE, upper: float = FREE) -> None:
        """Add a row: the sum of factor times variable lies between the two."""
        summed: dict[int, float] = {}
        for index, factor in terms:
            summed[index] = summed.get(index, 0.0) + factor
        self.indices += summed
        self.factors += summed.values()
        self.starts.append(len(self.indices))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    @property
    def rows(self) -> int:
        return len(self.row_lower)

    @property
    def columns(self) -> int:
        return len(self.cost)

    def solve(
        self,
        limits: Limits,
        *,
        start: Sequence[float] | None = None,
        target: float | None = None,
        watch: Callable[[Incumbent], None] | None = None,
    ) -> Solution:
        """Return the best values, from a first answer if one is given; `watch` hears of every better one.

        An answer no worse than `target`, below which the caller knows that there is none, ends the search.
        """
        began = time.perf_counter()
        _use_threads(limits.threads)
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", limits.threads)
        solver.setOptionValue("random_seed", 0)
        solver.setOptionValue("mip_rel_gap", limits.gap)
        solver.setOptionValue("mip_abs_gap", 1e-9)
        solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
        solver.setOptionValue("primal_feasibility_tolerance", 1e-9)
        solver.setOptionValue("time_limit", float(limits.time_limit_s))
        if target is not None:
            solver.setOptionValue("objective_target", target)
        if watch is not None:
            _watch(solver, watch, began)
        _check(solver.passModel(self._model()), "reading the model")
        if start is not None:
            given = highspy.HighsSolution()
            given.col_value = list(start)
            solver.setSolution(given)
        _check(solver.run(), "solving")
        return self._solution(solver, time.perf_counter() - began)

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.columns, self.rows
        model.col_cost_ = np.array(self.cost)
        model.col_lower_, model.col_upper_ = np.array(self.lower), np.array(self.upper)
        model.row_lower_, model.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
        model.integrality_ = [kinds[integer] for integer in self.integer]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self.starts)
        model.a_matrix_.index_ = np.array(self.indices)
        model.a_matrix_.value_ = np.array(self.factors)
        return model

    def _solution(self, solver: highspy.Highs, seconds: float) -> Solution:
        info, ended = solver.getInfo(), solver.getModelStatus()
        has_answer = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if ended == highspy.HighsModelStatus.kOptimal:
            status = Status.OPTIMAL
        elif ended in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            status = Status.INFEASIBLE
        elif has_answer:
            status = Status.FEASIBLE
        elif ended in (highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kInterrupt):
            status = Status.UNKNOWN
        else:
            raise SolverError(f"HiGHS ended with {solver.modelStatusToString(ended)}; please report the model")
        answered = status in (Status.OPTIMAL, Status.FEASIBLE)
        objective = float(info.objective_function_value) if answered else math.inf
        bound = float(info.mip_dual_bound) if any(self.integer) else objective
        return Solution(
            status=status,
            values=tuple(solver.getSolution().col_value) if answered else (),
            objective=objective,
            bound=min(bound, objective) if answered else bound,
            seconds=seconds,
            rows=self.rows,
            columns=self.columns,
        )


_threads_in_use = 0


def _use_threads(threads: int) -> None:
    """Set HiGHS's number of threads, which it keeps from a process's first solve until told otherwise."""
    global _threads_in_use
    if threads != _threads_in_use:
        highspy.Highs.resetGlobalScheduler(True)
        _threads_in_use = threads


def _watch(solver: highspy.Highs, watch: Callable[[Incumbent], None], began: float) -> None:
    def tell(event: highspy.HighsCallbackEvent) -> None:
        data = event.data_out
        watch(
            Incumbent(objective=data.mip_primal_bound, bound=data.mip_dual_bound, seconds=time.perf_counter() - began)
        )

    solver.cbMipImprovingSolution += tell


def _check(status: highspy.HighsStatus, what: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise SolverError(f"HiGHS failed while {what}; please report the model")
