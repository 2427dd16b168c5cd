"""Plans of one step that may each turn out to be the fastest, although one of them is predicted to be.

Note [Alternatives]: predictions of steps are some percent off, on ranks that share cores more than that, and the plan
that is predicted to be the fastest is so by less, often. Those that come near are

- the plan itself, and the plan without each of the decisions it took, decided anew;
- on a CPU, where decisions that gain little are not taken (`WORTH_ON_CPU`), the plan that takes them;
- checkpointing alone;
- what a person would set by hand of each kind that may be decided, and checkpointing beside it: all units kept
  gathered, the loss in as many chunks as there are, every unit offloading all that compute hides.

All are plans of the same solver under the same budget, each with its own prediction and proof. Which of them is the
fastest is found by running them (`memfit.verify.tune`). The batch is not divided: loops do that by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from memfit.capture import find_chunkable
from memfit.errors import InputError
from memfit.plans.document import Plan
from memfit.plans.joint import WORTH, worth_on
from memfit.plans.planning import plan_problem
from memfit.plans.resolve import Inputs
from memfit.plans.settings import MOST_CHUNKS, can_shard_otherwise, is_reached
from memfit.progress import Progress
from memfit.solve import Decided, Problem, SolveOptions

_NEAR = 0.2
"""A plan that is predicted to take longer than the fastest by more than this part is left out: predictions of single
steps have been up to 18 % off (docs/benchmarks.md, `ranks.py`), those of two plans of one step far less."""

_DECIDED = "as decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan, and in few words how it was asked for."""

    label: str
    plan: Plan


def find_alternatives(inputs: Inputs, *, budget: str | int | float | None = None) -> list[Alternative]:
    """Return plans that differ (Note [Alternatives]), the one that is predicted to be the fastest first.

    Where nothing fits there is one, which says so.
    """
    problem, show = inputs.problem(), inputs.progress
    divides = "micro_batch" in inputs.options.decided
    options = replace(inputs.options, fixed=(*inputs.options.fixed, "micro_batch"))
    inputs = replace(inputs, trace=problem.trace, options=options, progress=False)
    with Progress("planning what may be as fast", show=show, lines=True) as progress:
        decided = plan_problem(inputs, budget=budget)[0]
        if decided.predicted is None:
            note = "a batch in micro-batches, which your loop would run, was not tried: memfit.plan decides that"
            noted = msgspec.structs.replace(decided, notes=(*decided.notes, note))
            return [Alternative(label=_DECIDED, plan=noted if divides else decided)]
        found = [Alternative(label=_DECIDED, plan=decided)]
        if worth_on(problem.target.device) > WORTH and options.decided:
            progress.add("small gains too")
            small = plan_problem(inputs, budget=budget, worth=WORTH)[0]
            found.append(Alternative(label="small gains too", plan=small))
        taken = dict.fromkeys(kind for each in found for kind in _kinds(each.plan))
        for label, other in _other_options(problem, inputs, list(taken)):
            progress.add(label)
            # A loss that cannot be in chunks, or a time limit that is over, is no alternative.
            with contextlib.suppress(InputError):
                plan = plan_problem(replace(inputs, options=other), budget=budget)[0]
                found.append(Alternative(label=label, plan=plan))
    different: dict[bytes, tuple[float, Alternative]] = {}
    for each in found:
        if each.plan.predicted is not None:
            different.setdefault(_what_it_does(each.plan), (each.plan.predicted.step_ms, each))
    ordered = sorted(different.values(), key=lambda pair: pair[0])
    return [each for ms, each in ordered if ms <= (1 + _NEAR) * ordered[0][0]]


def _what_it_does(plan: Plan) -> bytes:
    """Return the same for plans that do the same."""
    return msgspec.json.encode((plan.checkpoint, plan.chunked_loss or None, plan.shard, plan.optimizer))


def _kinds(plan: Plan) -> Iterator[Decided]:
    """Yield the kinds of decisions beside checkpointing that a plan took; without `decide` it does not list them."""
    yield from (each.kind for each in plan.decisions or () if each.kind != "checkpoint")
    if any(entry.offload for entry in plan.checkpoint):
        yield "offload"
    if plan.optimizer is not None:
        yield "optimizer"


def _other_options(problem: Problem, inputs: Inputs, taken: list[Decided]) -> Iterator[tuple[str, SolveOptions]]:
    """Yield what else to ask for, and a label for it; `taken` are the kinds of decisions that plans took."""
    given = inputs.options
    own_chunks = given.loss_chunks is not None
    for kind in taken:
        if kind == "loss" and own_chunks:
            continue
        # `offload` and `optimizer` are asked for by name too
        offload, optimizer = kind != "offload" and given.offload, kind != "optimizer" and given.optimizer
        fixed = (*given.fixed, kind)
        yield f"without {kind}", replace(given, fixed=fixed, offload=offload, optimizer=optimizer)
    alone = replace(given, decide=(), offload=False, optimizer=False)
    if taken:
        yield "checkpointing alone", alone
    if "reshard" in given.decided and can_shard_otherwise(problem):
        kept = replace(given.shard, reshard_after_forward=False, keep_last=False)
        yield "all units kept", replace(alone, shard=kept)
    chunkable = find_chunkable(problem.trace)
    reached = chunkable is not None and inputs.step is not None and is_reached(chunkable, inputs.step)
    if "loss" in given.decided and reached and not own_chunks:
        yield f"the loss in {MOST_CHUNKS} chunks", replace(alone, loss_chunks=MOST_CHUNKS)
    if "offload" in given.decided and problem.offload_link is not None:
        yield "all that is hidden offloaded", replace(alone, offload="hidden")
