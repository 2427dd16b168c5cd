"""`plan.loss` recomputes a loss outside the model: exact, beside the user's modes and hooks, and told when missing."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memfit
from memfit.capture import Step
from memfit.errors import PlanDrift
from memfit.plans import Plan
from memfit.solve import SolveOptions
from tests.engines.engine_cases import both, plan_for, same
from tests.engines.test_tape import VECTORS, forced_loss

pytestmark = pytest.mark.usefixtures("frozen_heap")

TARGETS = torch.arange(32)
Loss = Callable[..., torch.Tensor]
Run = Callable[[nn.Module, Callable[[Loss], Loss]], Any]
"""Trains a model by one step; the function makes its loss what the plan needs, and nothing of the plain one."""


def loss_of(output: torch.Tensor, _: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float() * 1.5, TARGETS)


class Pair:
    """A plain model and an equal one that runs a plan for its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(16, 500))
        self.plan = forced_loss(self.plain, loss_of)
        self.planned = copy.deepcopy(self.plain)
        self.plan.apply(self.planned)
        self.loss = self.plan.loss(loss_of)

    def is_exact(self, run: Run) -> bool:
        for model, plan_loss in ((self.plain, lambda loss: loss), (self.planned, self.plan.loss)):
            model.zero_grad()
            run(model, plan_loss)
        return all(
            one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
            for one, other in zip(self.plain.parameters(), self.planned.parameters(), strict=True)
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.plan.remove(pair.planned)
    assert nothing_is_left()


def nothing_is_left() -> bool:
    """Neither modes nor their key, neither hooks nor functions that stand for torch's."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._dispatch_tls_is_dispatch_key_included("Python")
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch.autograd.backward.__module__ == torch.autograd.grad.__module__ == "torch.autograd"
    )


class Sees(TorchDispatchMode):
    """The ops of a user's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


# -- with and without plan.loss ----------------------------------------------------------------------------------------


def test_a_loss_that_goes_through_the_plan_is_recomputed_in_backward(pair: Pair) -> None:
    recomputed = []

    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        value = plan_loss(loss_of)(model(VECTORS))
        assert nothing_is_left()
        with Sees() as seen:
            value.backward()
        recomputed.append("aten.nll_loss_forward.default" in seen.ops)

    assert pair.is_exact(run)
    assert recomputed == [False, True]


def test_a_loss_that_does_not_go_through_the_plan_is_told_once_in_its_backward(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        for _number in range(2):
            loss_of(model(VECTORS)).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pair.is_exact(run)
    found = [each for each in caught if "did not go through plan.loss" in str(each.message)]
    assert len(found) == 1 and found[0].category is PlanDrift and found[0].filename == __file__


def test_a_forward_without_a_backward_needs_no_loss(pair: Pair) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*loss")
        pair.planned(VECTORS)
        pair.loss(pair.planned(VECTORS)).backward()


def test_a_plan_says_that_it_needs_its_loss_and_can_be_asked_to_leave_it_alone(pair: Pair) -> None:
    assert "loss = plan.loss(loss)" in str(pair.plan)
    step = Step(pair.plain, VECTORS, loss=loss_of)
    left = memfit.plan(step, target="cpu", budget="1GiB", options=SolveOptions(forbid=("<loss>",)), progress=False)
    assert "plan.loss" not in str(left)


def test_the_function_looks_like_the_one_that_was_given_and_does_nothing_elsewhere(pair: Pair) -> None:
    assert pair.loss.__name__ == "loss_of" and inspect.signature(pair.loss) == inspect.signature(loss_of)
    with torch.no_grad():
        assert torch.equal(pair.loss(pair.planned(VECTORS)), loss_of(pair.plain(VECTORS)))
    with pytest.raises(memfit.InputError, match="takes the function that computes the loss, not a Tensor"):
        pair.plan.loss(VECTORS)  # type: ignore[arg-type]
    module = nn.CrossEntropyLoss()
    assert torch.equal(pair.plan.loss(module)(VECTORS, TARGETS % 16), module(VECTORS, TARGETS % 16))


def test_two_models_may_be_called_before_their_losses(pair: Pair) -> None:
    other = nn.Sequential(nn.Linear(16, 500), nn.Tanh())
    plan = forced_loss(other, lambda output, _=None: output.exp().exp().mean())
    plan.apply(other)
    loss = plan.loss(lambda output, _=None: output.exp().exp().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two = pair.planned(VECTORS), other(VECTORS)
        pair.loss(one).backward()
        loss(two).backward()
    plan.remove(other)


def test_a_loss_of_two_calls_of_the_model_is_recomputed(pair: Pair) -> None:
    def contrast(outputs: tuple[torch.Tensor, torch.Tensor], _: Any = None) -> torch.Tensor:
        return loss_of(outputs[0] - outputs[1])

    def step(model: nn.Module, _: Any, batch: torch.Tensor) -> None:
        outputs = model(batch), model(batch + 1)
        loss(outputs).backward()
        model.zero_grad()

    loss: Loss = contrast
    model = nn.Sequential(nn.Linear(16, 500))
    trace = memfit.trace(Step(model, VECTORS, run=step, optimizer=None), target="cpu")
    plan = memfit.plan(trace, budget="1GiB", options=SolveOptions(force=("<loss>",)), progress=False)
    plan.apply(model)
    with pytest.warns(PlanDrift, match="did not go through plan.loss"):
        step(model, None, VECTORS)
    loss = plan.loss(contrast)
    with warnings.catch_warnings(), Sees() as seen:
        warnings.filterwarnings("error", message=".*loss")
        step(model, None, VECTORS)
    assert seen.ops.count("aten.nll_loss_forward.default") == 2
    plan.remove(model)


def test_a_loss_goes_on_under_another_plan_of_the_model(pair: Pair) -> None:
    pair.plan.remove(pair.planned)
    pair.plan = msgspec.structs.replace(pair.plan, budget_bytes=pair.plan.budget_bytes + 1)
    pair.plan.apply(pair.planned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.loss(pair.planned(VECTORS)).backward()


# -- what the user opens ----------------------------------------------------------------------------------------------


def test_a_mode_opened_after_the_forward_sees_loss_and_backward(pair: Pair) -> None:
    counted = []

    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        output = model(VECTORS)
        with FlopCounterMode(display=False) as flops:
            plan_loss(loss_of)(output).backward()
        counted.append(flops.get_total_flops())

    assert pair.is_exact(run)
    assert counted[0] == counted[1] > 0


def test_a_mode_around_the_loss_sees_its_ops_and_outlives_it(pair: Pair) -> None:
    seen = Sees()
    output = pair.planned(VECTORS)
    with seen:
        loss = pair.loss(output)
        count = len(seen.ops)
        torch.zeros(3)
        assert len(seen.ops) == count + 1 and count >= 3
    assert nothing_is_left()
    loss.backward()


def test_hooks_opened_after_the_forward_see_every_tensor(pair: Pair) -> None:
    counts = []

    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        packed: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.shape)
            return tensor

        output = model(VECTORS)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = plan_loss(loss_of)(output)
            loss.backward()
            (loss.detach() * torch.ones(3, requires_grad=True)).sum()
        counts.append(packed)

    assert pair.is_exact(run)
    assert counts[0] == counts[1] and len(counts[0]) >= 4


def test_hooks_opened_in_the_middle_of_a_loss_see_what_is_packed_there(pair: Pair) -> None:
    counts = []

    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        packed: list[torch.Size] = []

        def hooked(output: torch.Tensor) -> torch.Tensor:
            scaled = output.float() * 1.5
            with saved_tensors_hooks(lambda tensor: packed.append(tensor.shape) or tensor, lambda tensor: tensor):
                return nn.functional.cross_entropy(scaled, TARGETS)

        plan_loss(hooked)(model(VECTORS)).backward()
        counts.append(packed)

    assert pair.is_exact(run)
    assert counts[0] == counts[1] and counts[0]


def test_a_loss_may_be_called_where_hooks_are_forbidden(pair: Pair) -> None:
    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        output = model(VECTORS)
        with disable_saved_tensors_hooks("no hooks here"):
            loss = plan_loss(loss_of)(output)
        loss.backward()

    assert pair.is_exact(run)


# -- losses that end otherwise ----------------------------------------------------------------------------------------


def test_an_evaluation_after_a_skipped_step_sees_no_mode(pair: Pair) -> None:
    modes = []
    pair.planned[0].register_forward_pre_hook(lambda *_: modes.append(torch._C._len_torch_dispatch_stack()))
    pair.loss(pair.planned(VECTORS))
    pair.planned.eval()
    with torch.no_grad():
        pair.planned(VECTORS)
    with torch.inference_mode():
        pair.planned(VECTORS)
    pair.planned.train()
    assert modes == [0, 0, 0]


def test_a_loss_that_comes_after_something_else_is_told_once(pair: Pair) -> None:
    def after_something(output: torch.Tensor) -> torch.Tensor:
        output.argmax(-1)
        return loss_of(output)

    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        for _ in range(2):
            plan_loss(after_something)(model(VECTORS)).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pair.is_exact(run)
    found = [each for each in caught if "not the planned loss: its op 0 is aten.argmax" in str(each.message)]
    assert len(found) == 1 and found[0].filename == __file__


def test_half_a_loss_is_told_and_metrics_after_it_are_not(pair: Pair) -> None:
    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        scaled = plan_loss(lambda output: output.float() * 1.5)(model(VECTORS))
        nn.functional.cross_entropy(scaled, TARGETS).backward()

    with pytest.warns(PlanDrift, match="it ran 1 ops"):
        assert pair.is_exact(run)

    def with_metrics(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_of(output), output.argmax(-1).eq(TARGETS).sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the planned loss")
        pair.plan.loss(with_metrics)(pair.planned(VECTORS))[0].backward()  # type: ignore[arg-type]


def test_nothing_is_left_of_a_loss_that_fails(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        pair.plan.loss(lambda output: output.float() * torch.ones(3))(pair.planned(VECTORS))
    assert nothing_is_left()


def test_a_step_that_was_skipped_holds_nothing_of_it(pair: Pair) -> None:
    output = pair.planned(VECTORS)
    held = torch.multiprocessing.reductions.StorageWeakRef(output.untyped_storage())
    loss = pair.loss(output)
    del output, loss
    assert held.expired()


@pytest.mark.parametrize("part", ["the loss and its backward", "the backward"])
def test_another_thread_may_go_on(pair: Pair, part: str) -> None:
    def run(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
        output = model(VECTORS)
        loss = plan_loss(loss_of)(output) if part == "the backward" else None
        failed: list[BaseException] = []

        def there() -> None:
            try:
                (plan_loss(loss_of)(output) if loss is None else loss).backward()
                assert nothing_is_left()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        assert not failed

    assert pair.is_exact(run)
    assert nothing_is_left()


# -- scopes that put the dispatcher's keys back -----------------------------------------------------------------------


def _vmapped(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    rows = torch.vmap(lambda row, target: nn.functional.cross_entropy(row * 1.5, target))
    plan_loss(lambda output: rows(output, TARGETS).mean())(model(VECTORS)).backward()


def _differs_under_vmap(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    plan_loss(lambda output: torch.vmap(torch.exp)(output.float() * 1.5).sum())(model(VECTORS)).backward()


def _transformed(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    output = model(VECTORS)
    slope = torch.func.grad(lambda x: x.square().sum())(VECTORS)
    (plan_loss(loss_of)(output) * slope.mean()).backward()


def _inference_in_between(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        scaled = output.float() * 1.5
        with torch.inference_mode():
            model(VECTORS)
        return nn.functional.cross_entropy(scaled, TARGETS)

    plan_loss(loss)(model(VECTORS)).backward()


def _compiled_loss(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    plan_loss(torch.compile(loss_of, backend="aot_eager"))(model(VECTORS)).backward()


def _compiled_planned_loss(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    torch.compile(plan_loss(loss_of), backend="aot_eager")(model(VECTORS)).backward()


def _compiled_model(model: nn.Module, plan_loss: Callable[[Loss], Loss]) -> None:
    model(VECTORS)
    plan_loss(loss_of)(torch.compile(model, backend="aot_eager")(VECTORS)).backward()


@pytest.mark.parametrize(
    "run",
    [
        _vmapped,
        _differs_under_vmap,
        _transformed,
        _inference_in_between,
        _compiled_loss,
        _compiled_planned_loss,
        _compiled_model,
    ],
)
def test_scopes_that_put_the_keys_of_the_dispatcher_back_find_them_right(pair: Pair, run: Run) -> None:
    assert pair.is_exact(run)
    assert nothing_is_left()


# -- losses that are planned otherwise --------------------------------------------------------------------------------


def test_a_loss_runs_again_with_the_memory_that_was_predicted() -> None:
    step = Step(nn.Sequential(nn.Linear(16, 500)), VECTORS, loss=loss_of)
    plan = plan_for(step, 1.0, SolveOptions(force=("<loss>",)))
    assert sum(entry.discarded_bytes for entry in plan.checkpoint) > 0
    checked = plan.verify(step, steps=1, time_tolerance=None)
    assert checked.exactness.equal
    assert abs(checked.peak.measured_bytes - checked.peak.predicted_bytes) <= 64


class LossInside(nn.Module):
    """Its last module is called in a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 500)
        self.within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.within():
            output = self.body(x)
        return nn.functional.cross_entropy(output.float() * 1.5, TARGETS)


@pytest.fixture
def inside() -> Plan:
    plan = forced_loss(LossInside(), None)
    assert [entry.after for entry in plan.checkpoint] == ["body"]
    return plan


@pytest.mark.parametrize(
    "within", [contextlib.nullcontext, lambda: FlopCounterMode(display=False), torch.autograd.graph.save_on_cpu]
)
def test_a_loss_inside_of_the_model_may_begin_in_a_block_of_the_user(
    inside: Plan, within: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    def build() -> nn.Module:
        model = LossInside()
        model.within = within
        return model

    plain, planned, _, _ = both(build, Step(build(), VECTORS, loss=None), inside)
    assert same(plain, planned)
    assert nothing_is_left()
