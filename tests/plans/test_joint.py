"""Joint plans: the loss in chunks and other settings are decided as trying them all would, and run as predicted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.capture import Step, chunked_losses, find_chunkable, is_chunked, trace
from memfit.cost import Roofline, Runtime
from memfit.errors import InputError, PlanDrift
from memfit.hardware import Target
from memfit.plans import Plan, PlanMismatch
from memfit.plans.joint import WORTH, JointSearch
from memfit.plans.settings import CHUNKS, Answer, Setting
from memfit.presets import step_at
from memfit.sharding import ShardOptions
from memfit.solve import DECISIONS, DEFAULT_DECISIONS, EXACT, Problem, SolveOptions, solve

pytestmark = pytest.mark.usefixtures("frozen_heap")

CLASSES, WIDTH, ROWS, LENGTH = 1536, 32, 4, 48


class Talker(nn.Module):
    """A small language model, mostly head; with labels it computes its loss itself."""

    def __init__(self, loss: Callable[..., torch.Tensor] | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        self.loss = loss

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return logits if self.loss is None else self.loss(logits, tokens)


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def with_z_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, tokens[:, 1:].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()


_imported_by_name = F.cross_entropy


def out_of_reach(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return _imported_by_name(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def real_step(*, inside: bool) -> Step:
    torch.manual_seed(0)
    model = Talker(next_token if inside else None)
    tokens = torch.randint(CLASSES, (ROWS, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Step(model, tokens, loss=None if inside else next_token, optimizer=optimizer, keep_output=False)


def hf_step() -> Step:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=CLASSES, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(CLASSES, (ROWS, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Step(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer, keep_output=False)


STEPS: dict[str, Callable[[], Step]] = {
    "loss of its own": lambda: real_step(inside=False),
    "loss in the model": lambda: real_step(inside=True),
    "transformers": hf_step,
}


def plan_in_chunks(step: Step, chunks: int = 4, **options: Any) -> Plan:
    return memfit.plan(
        step, target="cpu", budget="1GiB", options=SolveOptions(loss_chunks=chunks, **options), progress=False
    )


# -- carried out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_with_a_chunked_loss_takes_the_memory_that_it_predicts_and_gives_close_gradients(name: str) -> None:
    step = STEPS[name]()
    plan = plan_in_chunks(step)
    assert plan.chunked_loss and plan.chunked_loss.chunks == 4 and not plan.exact
    assert plan.chunked_loss.inside == (name != "loss of its own")
    assert plan.predicted is not None and plan.predicted.peak_bytes < plan.baseline.peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanDrift)
        check = plan.verify(step, 1, time_tolerance=None)
    assert check.peak.measured_bytes == check.peak.predicted_bytes == plan.predicted.peak_bytes
    assert check.baseline_peak is not None
    assert check.baseline_peak.measured_bytes == check.baseline_peak.predicted_bytes
    assert check.exactness is not None and check.exactness.equal and check.exactness.tolerance
    assert check.ok, check.findings


class Likelihoods(TorchDispatchMode):
    """Notes the rows of each negative log likelihood that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "nll_loss_forward" in str(func):
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_removing_the_plan_leaves_the_model_and_torch_as_they_were() -> None:
    step = real_step(inside=True)
    model, tokens, original = step.build_model(), step.batch, F.cross_entropy
    plan = plan_in_chunks(step)
    model(tokens).backward()
    whole = gradients(model)
    model.zero_grad()
    plan.apply(model, step.optimizer)
    with Likelihoods() as seen:
        loss = model(tokens)
    assert seen.rows == [47] * 4
    loss.backward()
    assert F.cross_entropy is original and torch.Tensor.float.__name__ == "float"
    for one, two in zip(whole, gradients(model), strict=True):
        torch.testing.assert_close(one, two)
    plan.remove(model)
    model.zero_grad()
    with Likelihoods() as seen:
        loss = model(tokens)
    assert seen.rows == [188]
    loss.backward()
    assert all(torch.equal(one, two) for one, two in zip(whole, gradients(model), strict=True))


def test_copies_and_evaluation_of_a_planned_model_compute_the_whole_loss() -> None:
    step = real_step(inside=True)
    model, tokens = step.build_model(), step.batch
    plan = plan_in_chunks(step)
    plan.apply(model, step.optimizer)
    with torch.no_grad():
        before = model(tokens)
    other = copy.deepcopy(model)
    plan.remove(model)
    assert torch.equal(model(tokens), before) and torch.equal(other(tokens), before)


def test_a_loss_outside_the_model_that_does_not_go_through_the_plan_is_told() -> None:
    step = real_step(inside=False)
    model, tokens = step.build_model(), step.batch
    plan = plan_in_chunks(step)
    plan.apply(model, step.optimizer)
    with pytest.warns(PlanDrift, match="computes the loss in 4 chunks"):
        next_token(model(tokens), tokens).backward()
    plan.remove(model)


# -- decided -----------------------------------------------------------------------------------------------------------


def problem_of(step: Step, target: str, ranks: int = 1, **options: Any) -> Problem:
    aim = Target.parse(target, ranks=ranks)
    return Problem.of(Runtime.of(trace(step, target=aim), Roofline.of(aim)), aim, SolveOptions(**options))


def joint_search(step: Step, target: str, part: float, *kinds: str, ranks: int = 1) -> JointSearch:
    problem = problem_of(step, target, ranks)
    low = problem.min_budget
    assert low is not None
    budget = int(low.peak_bytes + part * (problem.baseline_bytes - low.peak_bytes))
    return JointSearch(Answer(problem=problem, solved=solve(problem, budget)), step, Roofline.of(problem.target), kinds)


def test_nothing_is_captured_where_nothing_is_recomputed() -> None:
    step = Step(Talker, memfit.spec((ROWS, LENGTH), torch.int64), loss=next_token)
    joint = joint_search(step, "h100-sxm", 1.0, "loss")
    assert joint.run() is joint.first and joint.tried == 1
    assert len(joint.problems.captured) == 1


def test_a_budget_that_only_chunks_meet_is_met_by_them() -> None:
    step = Step(Talker, memfit.spec((ROWS, LENGTH), torch.int64), loss=next_token, optimizer=torch.optim.SGD)
    whole = problem_of(step, "cpu").min_budget
    assert whole is not None
    budget = whole.peak_bytes - CLASSES * ROWS * LENGTH * 2
    plan = memfit.plan(step, target="cpu", budget=budget, progress=False)
    assert plan.status == "infeasible"
    plan = memfit.plan(step, target="cpu", budget=budget, options=SolveOptions(decide=("loss",)), progress=False)
    assert plan.status == "optimal" and plan.chunked_loss and plan.chunked_loss.chunks in CHUNKS
    assert plan.decisions and "loss" in [decision.kind for decision in plan.decisions]
    assert plan.predicted is not None and plan.predicted.peak_bytes <= budget
    loss = next(decision for decision in plan.decisions if decision.kind == "loss")
    assert loss.saves_bytes > 0 and loss.costs_ms > 0 and loss.ms_per_gib


@pytest.mark.parametrize("loss", [out_of_reach, lambda logits, tokens: -logits.log_softmax(-1).mean()])
def test_a_loss_that_the_engine_does_not_reach_is_not_offered(loss: Any) -> None:
    step = Step(Talker, memfit.spec((ROWS, LENGTH), torch.int64), loss=loss)
    assert joint_search(step, "cpu", 0.1, "loss").run().setting == Setting()
    with pytest.raises(InputError, match="loss_chunks=4: the loss of this step cannot be computed in chunks"):
        plan_in_chunks(step)


def test_a_loss_in_models_of_a_container_is_not_offered() -> None:
    class Pair(nn.ModuleDict):
        """Two models that a loop calls one after the other."""

    step = Step(
        lambda: Pair({"one": Talker(next_token), "two": Talker(next_token)}),
        memfit.spec((ROWS, LENGTH), torch.int64),
        run=lambda models, optimizer, tokens: (models["one"](tokens) + models["two"](tokens)).backward(),
        optimizer=None,
    )
    assert find_chunkable(trace(step, target="cpu")) is None


def test_a_cast_that_something_else_reads_too_stays_where_it_is() -> None:
    def traced(loss: Any) -> Any:
        step = Step(
            lambda: Talker(dtype=torch.bfloat16), memfit.spec((ROWS, LENGTH), torch.int64), loss=loss, optimizer=None
        )
        return step, trace(step, target="h100-sxm")

    for loss, casts in ((next_token, True), (with_z_loss, False)):
        step, plain = traced(loss)
        found = find_chunkable(plain)
        assert found is not None and found.casts is casts
        with chunked_losses(found):
            assert is_chunked(trace(step, target="h100-sxm"), plain, found)
    assert find_chunkable(traced(out_of_reach)[1]) is None  # its softmax is in bfloat16


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_document_keeps_its_chunks_and_checks_the_step_as_it_runs_it() -> None:
    step = real_step(inside=False)
    plan = plan_in_chunks(step, 8)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.chunked_loss == plan.chunked_loss
    again.check(step)
    whole = memfit.plan(step, target="cpu", budget="1GiB", progress=False)
    assert whole.fingerprint != plan.fingerprint and not whole.chunked_loss
    assert "chunked_loss" not in whole.to_json() and "decisions" not in whole.to_json()
    with pytest.raises(PlanMismatch):
        whole.check(plan.trace_of(step))
    text = str(plan)
    assert "the loss is computed in 8 chunks" in text and "plan.loss(loss)" in text


def test_a_document_that_decides_a_loss_and_does_not_say_how_is_refused() -> None:
    plan = plan_in_chunks(real_step(inside=True), decide=("loss",))
    assert plan.decisions
    broken = msgspec.structs.replace(plan, chunked_loss=msgspec.UNSET)
    with pytest.raises(InputError, match="no chunked_loss that says how"):
        Plan.from_json(broken.to_json())


def test_decisions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="decide has 'los'"):
        SolveOptions(decide=("los",))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss_chunks is 0"):
        SolveOptions(loss_chunks=0)
    assert SolveOptions(decide=("optimizer",)).optimizer


def test_groups_of_decisions_leave_what_has_a_value_and_what_is_fixed() -> None:
    assert SolveOptions(decide="exact").decided == EXACT and SolveOptions(decide="all").decided == DECISIONS
    assert SolveOptions(decide=()).decided == () and SolveOptions().decided == DEFAULT_DECISIONS
    assert set(DECISIONS) - set(SolveOptions(decide="all", fixed=("units", "loss")).decided) == {"units", "loss"}
    given = SolveOptions(decide="all", loss_chunks=4, shard=ShardOptions(prefetch=2, replicas=2, keep_last=1))
    assert set(DECISIONS) - set(given.decided) == {"loss", "prefetch", "replicas", "reshard"}
    assert SolveOptions(decide=("exact", "loss")).decided == (*EXACT, "loss")
    assert SolveOptions(decide=("prefetch",), shard=ShardOptions(prefetch=2)).decided == ("prefetch",)
    with pytest.raises(InputError, match="fixed has 'all'"):
        SolveOptions(fixed=("all",))  # type: ignore[arg-type]


def test_units_offload_unasked_only_where_the_memory_of_the_host_was_granted() -> None:
    step = Step(lambda: Talker(), memfit.spec((64 * ROWS, LENGTH), torch.int64), loss=next_token)
    links = []
    for granted in (None, "1GiB"):
        target = Target.parse("h100-sxm", host_memory=granted)
        links.append(Problem.of(Runtime.of(trace(step, target=target), Roofline()), target).offload_link)
    assert links[0] is None and links[1] is not None
    assert links[1].to_host_bytes_per_s < target.device.host_link.bandwidth_bytes_per_s


def gathering_step() -> Step:
    """Few rows for many parameters: an H100 hides the gathers over NVLink in part, an L40S waits for the bus."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)) for _ in range(4)))

    return Step(build, memfit.spec((512, 1024)), loss=lambda output, batch: output.square().mean())


def plan_gathers(target: str, budget: str | None = None, **options: Any) -> Plan:
    shard = ShardOptions(units=tuple(str(number) for number in range(4)))
    return memfit.plan(
        gathering_step(),
        target=target,
        ranks=4,
        budget=budget,
        options=SolveOptions(shard=shard, **options),
        progress=False,
    )


def test_gpus_that_wait_for_collectives_gather_otherwise_unasked() -> None:
    plan, fixed = plan_gathers("l40s"), plan_gathers("l40s", fixed=("reshard", "prefetch"))
    assert plan.predicted and fixed.predicted and plan.exact
    assert fixed.predicted.exposed_communication_ms >= 0.1 * fixed.predicted.step_ms
    assert plan.predicted.step_ms < fixed.predicted.step_ms
    assert {each.kind for each in plan.decisions or ()} & {"reshard", "prefetch"} and not fixed.decisions
    asked = plan_gathers("l40s", decide=("reshard", "prefetch"))
    assert asked.shard == plan.shard and asked.predicted == plan.predicted


def test_what_fits_does_not_change_unasked() -> None:
    """Less gathered ahead needs less: plans tell of it, and agree with curves on the smallest budget."""
    fixed, free = plan_gathers("l40s", "1MiB", fixed=("reshard", "prefetch")), plan_gathers("l40s", "1MiB")
    assert free.minimum_budget_bytes == fixed.minimum_budget_bytes
    assert any("--decide exact" in note for note in free.notes)
    asked = plan_gathers("l40s", "1MiB", decide="exact")
    assert asked.minimum_budget_bytes is not None and free.minimum_budget_bytes is not None
    assert asked.minimum_budget_bytes < free.minimum_budget_bytes
    found = plan_gathers("l40s", str(asked.minimum_budget_bytes), decide="exact")
    assert found.predicted is not None and found.shard is not None and found.shard.prefetch == 0


@pytest.mark.parametrize("length", [4096, 8192])
def test_gathers_that_are_decided_unasked_leave_the_allocator_its_room(length: int) -> None:
    """Of Llama 3 8B on eight L40S the fastest setting that meets the budget has no room, or not the best with it."""
    step = step_at("llama3-8b", batch=1, seq=length)
    target = Target.parse("l40s", ranks=8)
    fixed = memfit.plan(step, target=target, options=SolveOptions(fixed=("reshard", "prefetch")), progress=False)
    plan = memfit.plan(step, target=target, progress=False)
    assert plan.predicted is not None and fixed.predicted is not None
    assert fixed.predicted.room == plan.predicted.room == "enough"
    assert plan.predicted.step_ms < fixed.predicted.step_ms
    for kept in (8, 16):
        by_hand = SolveOptions(decide=(), shard=ShardOptions(keep_last=kept))
        other = memfit.plan(step, target=target, options=by_hand, progress=False)
        if other.predicted is not None and other.predicted.room == "enough":
            assert plan.predicted.step_ms <= other.predicted.step_ms * (1 + WORTH)
    if plan.status == "feasible":
        assert plan.bound_ms is not None and plan.bound_ms < plan.predicted.step_ms
        assert any("has less room for it" in note for note in plan.notes)


def test_a_budget_of_ones_own_is_taken_as_it_is_where_gathers_are_asked_for() -> None:
    """Unasked, a faster way to gather is no reason to have less room than without it."""
    step, target = step_at("llama3-8b", batch=1, seq=4096), Target.parse("l40s", ranks=8)

    def planned(**options: Any) -> Plan:
        return memfit.plan(step, target=target, budget="40GiB", options=SolveOptions(**options), progress=False)

    asked, unasked, fixed = planned(decide=("reshard", "prefetch")), planned(), planned(fixed=("reshard", "prefetch"))
    assert asked.predicted is not None and unasked.predicted is not None and fixed.predicted is not None
    assert asked.status == "optimal" and asked.predicted.step_ms < fixed.predicted.step_ms
    assert asked.predicted.step_ms <= unasked.predicted.step_ms <= fixed.predicted.step_ms
    rooms = ("enough", "margin", "tight", "too little")
    assert rooms.index(unasked.predicted.room or "") <= rooms.index(fixed.predicted.room or "")
    assert (unasked.status == "feasible") == (asked.predicted.step_ms < unasked.predicted.step_ms * (1 - WORTH))


@pytest.mark.parametrize("length", [6144, 8192])
def test_a_plan_with_room_is_called_the_fastest_only_where_none_meets_its_budget_faster(length: int) -> None:
    """More chunks are faster under the budget of the plan, but the allocator has no room for them there."""
    step, target = step_at("llama3-8b", batch=1, seq=length), Target.parse("l40s", ranks=8)

    def planned(budget: int | None = None, **options: Any) -> Plan:
        return memfit.plan(step, target=target, budget=budget, options=SolveOptions(**options), progress=False)

    plan = planned(decide=("loss",))
    assert plan.predicted is not None and plan.bound_ms is not None and plan.predicted.room == "enough"
    others = [planned(plan.budget_bytes, decide=(), loss_chunks=number).predicted for number in (8, 16)]
    least_ms = min(other.step_ms for other in others if other is not None)
    assert plan.bound_ms <= least_ms * (1 + WORTH)
    assert (plan.status == "feasible") == (least_ms < plan.predicted.step_ms * (1 - WORTH))
    grown = planned(decide=("loss", "segments"))
    assert grown.predicted is not None and grown.predicted.room == "enough"
    assert grown.predicted.step_ms <= plan.predicted.step_ms * (1 + WORTH)


def test_ranks_of_a_cpu_gather_as_they_are_told_unless_asked() -> None:
    plan = plan_gathers("cpu")
    assert plan.predicted and plan.predicted.exposed_communication_ms >= 0.1 * plan.predicted.step_ms
    assert not plan.decisions and plan.shard is not None and plan.shard.prefetch == 1
    assert all(unit.reshard_after_forward is True for unit in plan.shard.units if unit.module)
