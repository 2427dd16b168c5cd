"""The region of the loss is a guest among the user's own modes and hooks: exact, and gone when it is over."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_cases import both, plan_for, same
from test_tape import VECTORS, forced_loss
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memfit.capture import Step
from memfit.plans import Plan
from memfit.solve import SolveOptions

TARGETS = torch.arange(32)


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

    def is_exact(self, run: Callable[[nn.Module], Any]) -> bool:
        for model in (self.plain, self.planned):
            model.zero_grad()
            run(model)
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


# -- what the user opens ----------------------------------------------------------------------------------------------


def test_a_mode_opened_after_the_forward_sees_loss_and_backward(pair: Pair) -> None:
    counted = []

    def run(model: nn.Module) -> None:
        output = model(VECTORS)
        with FlopCounterMode(display=False) as flops:
            loss_of(output).backward()
        counted.append(flops.get_total_flops())

    assert pair.is_exact(run)
    assert counted[0] == counted[1] > 0


def test_a_mode_opened_after_the_forward_may_outlive_the_loss(pair: Pair) -> None:
    seen = Sees()
    output = pair.planned(VECTORS)
    with seen:
        loss = loss_of(output)
        count = len(seen.ops)
        torch.zeros(3)
        assert len(seen.ops) == count + 1 and count >= 3
    assert nothing_is_left()
    loss.backward()


def test_hooks_opened_after_the_forward_see_every_tensor(pair: Pair) -> None:
    counts = []

    def run(model: nn.Module) -> None:
        packed: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.shape)
            return tensor

        output = model(VECTORS)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(output)
            loss.backward()
            (loss.detach() * torch.ones(3, requires_grad=True)).sum()
        counts.append(packed)

    assert pair.is_exact(run)
    assert counts[0] == counts[1] and len(counts[0]) >= 4


def test_hooks_opened_in_the_middle_of_a_loss_see_what_is_packed_there(pair: Pair) -> None:
    counts = []

    def run(model: nn.Module) -> None:
        packed: list[torch.Size] = []
        scaled = model(VECTORS).float() * 1.5
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.shape) or tensor, lambda tensor: tensor):
            loss = nn.functional.cross_entropy(scaled, TARGETS)
        loss.backward()
        counts.append(packed)

    assert pair.is_exact(run)
    assert counts[0] == counts[1] and counts[0]


def test_a_loss_may_forbid_hooks(pair: Pair) -> None:
    def run(model: nn.Module) -> None:
        output = model(VECTORS)
        with disable_saved_tensors_hooks("no hooks here"):
            loss = loss_of(output)
        loss.backward()

    assert pair.is_exact(run)


# -- losses that end otherwise ----------------------------------------------------------------------------------------


def test_nothing_is_left_when_the_loss_is_there(pair: Pair) -> None:
    loss = loss_of(pair.planned(VECTORS))
    assert nothing_is_left()
    loss.backward()


def test_an_evaluation_after_a_skipped_step_sees_no_mode(pair: Pair) -> None:
    modes = []
    pair.planned[0].register_forward_pre_hook(lambda *_: modes.append(torch._C._len_torch_dispatch_stack()))
    loss_of(pair.planned(VECTORS))
    pair.planned.eval()
    with torch.no_grad():
        pair.planned(VECTORS)
    with torch.inference_mode():
        pair.planned(VECTORS)
    pair.planned.train()
    assert modes == [0, 0, 0]


def test_half_a_loss_is_over_with_the_next_op(pair: Pair) -> None:
    scaled = pair.planned(VECTORS).float() * 1.5
    with torch.no_grad():
        pair.plain(VECTORS)
    assert nothing_is_left()
    del scaled


def test_a_loss_that_comes_after_something_else_is_told_once(pair: Pair) -> None:
    def run(model: nn.Module) -> None:
        for _ in range(2):
            output = model(VECTORS)
            output.argmax(-1)
            loss_of(output).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pair.is_exact(run)
    found = [each for each in caught if "not the planned loss: its op 0 is aten.argmax" in str(each.message)]
    assert len(found) == 1 and found[0].filename == __file__


def test_a_loss_that_fails_is_over_with_the_next_op(pair: Pair) -> None:
    output = pair.planned(VECTORS)
    with contextlib.suppress(RuntimeError):
        output.float() * torch.ones(3)
    torch.zeros(3)
    assert nothing_is_left()


def test_a_model_that_dies_after_its_forward_leaves_nothing_to_the_next_op() -> None:
    pair = Pair()
    output = pair.planned(VECTORS)
    del pair, output
    gc.collect()
    torch.zeros(3)
    assert nothing_is_left()


def test_a_step_that_was_skipped_holds_nothing_of_it(pair: Pair) -> None:
    output = pair.planned(VECTORS)
    held = torch.multiprocessing.reductions.StorageWeakRef(output.untyped_storage())
    loss = loss_of(output)
    del output, loss
    assert held.expired()


@pytest.mark.parametrize("part", ["the loss and its backward", "the backward"])
def test_another_thread_may_go_on(pair: Pair, part: str) -> None:
    def run(model: nn.Module) -> None:
        output = model(VECTORS)
        loss = loss_of(output) if part == "the backward" else None
        failed: list[BaseException] = []

        def there() -> None:
            try:
                (loss_of(output) if loss is None else loss).backward()
                assert nothing_is_left()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        assert not failed

    assert pair.is_exact(run)
    torch.zeros(3)
    assert nothing_is_left()


# -- scopes that put the dispatcher's keys back -----------------------------------------------------------------------


def _vmapped(model: nn.Module) -> None:
    output = model(VECTORS)
    torch.vmap(lambda row, target: nn.functional.cross_entropy(row * 1.5, target))(output, TARGETS).mean().backward()


def _differs_under_vmap(model: nn.Module) -> None:
    scaled = model(VECTORS).float() * 1.5
    torch.vmap(torch.exp)(scaled).sum().backward()


def _transformed(model: nn.Module) -> None:
    output = model(VECTORS)
    slope = torch.func.grad(lambda x: x.square().sum())(VECTORS)
    (loss_of(output) * slope.mean()).backward()


def _inference_in_between(model: nn.Module) -> None:
    scaled = model(VECTORS).float() * 1.5
    with torch.inference_mode():
        model(VECTORS)
    torch.zeros(3)
    nn.functional.cross_entropy(scaled, TARGETS).backward()


def _compiled_loss(model: nn.Module) -> None:
    torch.compile(loss_of, backend="aot_eager")(model(VECTORS)).backward()


def _compiled_model(model: nn.Module) -> None:
    model(VECTORS)
    loss_of(torch.compile(model, backend="aot_eager")(VECTORS)).backward()


@pytest.mark.parametrize(
    "run", [_vmapped, _differs_under_vmap, _transformed, _inference_in_between, _compiled_loss, _compiled_model]
)
def test_scopes_that_put_the_keys_of_the_dispatcher_back_find_them_right(
    pair: Pair, run: Callable[[nn.Module], None]
) -> None:
    assert pair.is_exact(run)
    torch.zeros(3)
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
