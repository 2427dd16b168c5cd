"""Loops that do not keep to the planned number of micro-batches stay within the budget, and are told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.engines import plan_of_model
from memfit.engines.step_position import needs_step
from memfit.memory import measured
from memfit.plans import Plan
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for
from tests.engines.test_exact import squares

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

ROWS, WIDTH, PLANNED = 96, 48, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)))


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def plan() -> Plan:
    step = Step(built(), batch(0), loss=squares, optimizer=torch.optim.SGD, accumulation_steps=PLANNED)
    return plan_for(step, 0.35)


class Loop:
    """A loop of one's own; `peaks` are those of its steps, with what was there at their beginning."""

    def __init__(self, plan: Plan | None, *, give_optimizer: bool = False) -> None:
        self.model = built()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.peaks: list[int] = []
        self.plan = plan
        if plan is not None:
            plan.apply(self.model, self.optimizer if give_optimizer else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self.model(x), None)

    def step(self, micro_batches: int, before: Callable[[], Any] = lambda: None) -> None:
        before()
        x = batch(len(self.peaks))
        resident = sum(each.nbytes for each in (*self.model.parameters(), x))
        with measured() as found:
            for _ in range(micro_batches):
                (self.forward(x) / micro_batches).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.peaks.append(resident + found.peak_bytes)


@pytest.fixture
def said() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        found += [str(each.message) for each in caught if each.category is UserWarning]


def epochs(loop: Loop, counts: list[int], before: Callable[[], Any] = lambda: None) -> None:
    for count in counts:
        loop.step(count, before)


THREE_EPOCHS = [PLANNED, PLANNED, 3] * 3


@pytest.mark.parametrize("give_optimizer", [False, True])
@pytest.mark.parametrize("counts", [THREE_EPOCHS, [8, 8, 4], [1, 2, 7, 4]])
def test_any_number_of_micro_batches_stays_within_the_budget(
    plan: Plan, counts: list[int], give_optimizer: bool
) -> None:
    loop, plain = Loop(plan, give_optimizer=give_optimizer), Loop(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs(loop, counts)
    epochs(plain, counts)
    assert max(plain.peaks) > plan.budget_bytes, "without the plan it does not fit"
    assert [peak for peak in loop.peaks if peak > plan.budget_bytes] == []
    for one, other in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backward", [False, True])
def test_a_stray_forward_in_train_mode_shifts_nothing(plan: Plan, backward: bool) -> None:
    loop = Loop(plan)

    def stray() -> None:
        loss = loop.forward(batch(99))
        if backward:
            loss.backward()
            loop.optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs(loop, [PLANNED])
        stray()
        epochs(loop, [PLANNED] * 3)
        epochs(loop, [PLANNED] * 2, stray)
    assert [peak for peak in loop.peaks if peak > plan.budget_bytes] == []


@pytest.mark.parametrize("give_optimizer", [False, True])
def test_what_differs_is_said_once(plan: Plan, give_optimizer: bool, said: list[str]) -> None:
    loop = Loop(plan, give_optimizer=give_optimizer)
    epochs(loop, [PLANNED] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs(loop, [PLANNED] * 2)
    assert not caught
    with pytest.warns(UserWarning, match="after 3 of 4 micro-batches"):
        epochs(loop, [3])
    with pytest.warns(UserWarning, match="5 micro-batches since the optimizer's last step, and 4 in the plan"):
        epochs(loop, [8])
    kept = loop.forward(batch(0))
    with pytest.warns(UserWarning, match="is called 2 times since the last backward, and 1 times in the plan"):
        epochs(loop, [PLANNED])
    del kept
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs(loop, [3, 8, PLANNED])
    assert not caught


def test_accumulation_that_was_not_planned_is_said(said: list[str]) -> None:
    plan = plan_for(Step(built(), batch(0), loss=squares, optimizer=torch.optim.SGD), 0.35)
    loop = Loop(plan)
    epochs(loop, [1, 1])
    with pytest.warns(UserWarning, match=r"2 micro-batches .* 1 in the plan.*accumulation_steps"):
        epochs(loop, [2])


def test_a_skipped_step_is_no_additional_micro_batch(plan: Plan) -> None:
    """As a gradient scaler does it: gradients were not finite, the optimizer does nothing, gradients go."""
    loop = Loop(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for _ in range(PLANNED):
                loop.forward(batch(0)).backward()
            loop.optimizer.zero_grad()
        epochs(loop, [PLANNED])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_planned_model_that_is_compiled_keeps_its_budget_and_says_that_it_runs_eagerly(backend: str) -> None:
    torch._dynamo.reset()
    plan = plan_for(Step(built(), batch(0), loss=squares, optimizer=torch.optim.SGD), 0.1)
    loop, plain = Loop(plan), Loop(None)
    compiled = torch.compile(loop.model, backend=backend)
    loop.forward = lambda x: squares(compiled(x), None)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"called through torch\.compile: all of it runs eagerly"):
        epochs(loop, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs(loop, [1] * 3)
    assert [peak for peak in loop.peaks if peak > plan.budget_bytes] == []
    epochs(plain, [1] * 4)
    for one, other in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("applied_first", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_units_that_are_compiled_one_by_one_keep_the_budget_in_every_step(backend: str, applied_first: bool) -> None:
    """As torchtitan compiles: `for block in model.blocks: block.compile()`."""
    torch._dynamo.reset()
    plan = plan_for(Step(built(), batch(0), loss=squares, optimizer=torch.optim.SGD), 0.1)
    loop, plain = Loop(None), Loop(None)
    if applied_first:
        plan.apply(loop.model)
    for name in sorted({entry.module for entry in plan.checkpoint if not entry.is_loss}):
        loop.model.get_submodule(name).compile(backend=backend)
    if not applied_first:
        plan.apply(loop.model)
    with pytest.warns(UserWarning, match="is compiled by itself: it and others like it run eagerly"):
        epochs(loop, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs(loop, [1] * 3)
    assert [peak for peak in loop.peaks if peak > plan.budget_bytes] == []
    epochs(plain, [1] * 4)
    assert max(plain.peaks) > plan.budget_bytes
    for one, other in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


# -- policies of their own --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Plan:
    step = Step(built(), batch(0), loss=squares, optimizer=torch.optim.SGD, accumulation_steps=PLANNED)
    plan = plan_for(step, 0.35, SolveOptions(micro_batches="own"))
    assert needs_step(plan) is not None, "micro-batches differ"
    return plan


def test_policies_by_micro_batch_need_the_optimizer(own: Plan) -> None:
    model = built()
    with pytest.raises(memfit.InputError, match=r"apply\(model, optimizer\).*micro_batches='same'"):
        own.apply(model)
    assert plan_of_model(model) is None


def test_policies_by_micro_batch_are_faster_and_within_the_budget_in_the_planned_loop(own: Plan, plan: Plan) -> None:
    assert own.predicted is not None and plan.predicted is not None
    assert own.predicted.recompute_ms < plan.predicted.recompute_ms
    loop = Loop(own, give_optimizer=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs(loop, [PLANNED] * 3)
    assert [peak for peak in loop.peaks if peak > own.budget_bytes] == []


def test_policies_by_micro_batch_hold_the_budget_in_loops_that_differ(own: Plan) -> None:
    loop = Loop(own, give_optimizer=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs(loop, [PLANNED, 8, 3, PLANNED])
    assert [peak for peak in loop.peaks if peak > own.budget_bytes] == []


# -- several optimizers -----------------------------------------------------------------------------------------------


class Game:
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self) -> None:
        self.generator, self.discriminator = built(), built()
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.generator, self.discriminator)]

    def step(self) -> None:
        first, second = self.optimizers
        real, noise = batch(1), batch(2)
        loss = squares(self.discriminator(real), None) - squares(
            self.discriminator(self.generator(noise).detach()), None
        )
        loss.backward()
        second.step()
        second.zero_grad()
        squares(self.discriminator(self.generator(noise)), None).backward()
        first.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def models(self) -> nn.ModuleDict:
        return nn.ModuleDict({"generator": self.generator, "discriminator": self.discriminator})


def test_two_models_with_two_optimizers_run_their_plan_bit_for_bit() -> None:
    game, plain = Game(), Game()
    least = memfit.plan(game.step, target="cpu", budget="1KiB", progress=False).minimum_budget_bytes
    plan = memfit.plan(game.step, target="cpu", budget=least, progress=False)
    assert plan.checkpoint
    plan.apply(game.models(), game.optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            game.step()
    for _ in range(3):
        plain.step()
    for one, other in zip(game.models().parameters(), plain.models().parameters(), strict=True):
        assert torch.equal(one, other)
