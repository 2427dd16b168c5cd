"""The first step under a plan is compared with the planned one; what differs is said once, at the user's line."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import Step
from memfit.engines import optimizer_watch
from memfit.errors import PlanDrift
from memfit.solve import SolveOptions
from tests.engines.engine_cases import plan_for

_CLASSES, _WIDTH, _ROWS = 512, 48, 64
_LABELS = torch.arange(_ROWS)


class Block(nn.Module):
    """Feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, around which it may checkpoint by itself, and a head whose output is large beside what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(_WIDTH, _CLASSES)
        self.checkpointing: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return self.head(x)


def loss_of(output: torch.Tensor, _: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(output, _LABELS[: len(output)])


def make(**options: Any) -> tuple[Step, nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(_ROWS, _WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Step(model, batch, loss=loss_of, optimizer=optimizer, **options), model, optimizer, batch


def kept(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    loss = loss_of(output)
    loss.backward()
    return output


def dropped(model: nn.Module, batch: torch.Tensor) -> None:
    loss_of(model(batch)).backward()


def zeroed_between(model: nn.Module, batch: torch.Tensor) -> None:
    loss = loss_of(model(batch))
    model.zero_grad()
    loss.backward()


def seen(train: Callable[[], Any], steps: int = 4) -> list[warnings.WarningMessage]:
    """The warnings of memfit in some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            train()
    return [each for each in caught if issubclass(each.category, PlanDrift)]


@pytest.mark.parametrize(
    ("options", "train", "says"),
    [
        ({}, kept, None),
        ({"keep_output": False}, dropped, None),
        ({"keep_output": False}, kept, "output is kept while backward runs: 128.00 KiB more"),
        ({}, dropped, "output is gone before backward: 128.00 KiB less"),
    ],
    ids=["kept", "dropped", "kept, planned as dropped", "dropped, planned as kept"],
)
def test_an_output_that_is_held_otherwise_is_told_with_its_bytes(
    options: dict[str, Any], train: Callable[..., Any], says: str | None
) -> None:
    step, model, optimizer, batch = make(**options)
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)

    def steps() -> None:
        train(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    found = seen(steps)
    if says is None:
        assert not found
    else:
        assert len(found) == 1 and says in str(found[0].message)
        assert found[0].filename == __file__


@pytest.mark.parametrize("placement", ["after_step", "before_forward", "before_backward", "never"])
@pytest.mark.parametrize("planned", ["after_step", "before_backward"])
def test_gradients_that_are_there_in_forward_are_told_with_their_bytes(placement: str, planned: str) -> None:
    step, model, optimizer, batch = make(keep_output=False, zero_grad=planned)
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)

    def train() -> None:
        if placement == "before_forward":
            optimizer.zero_grad()
        (zeroed_between if placement == "before_backward" else dropped)(model, batch)
        optimizer.step()
        if placement == "after_step":
            optimizer.zero_grad()

    found = seen(train)
    there, expected = placement in ("before_backward", "never"), planned == "before_backward"
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    if there == expected:
        assert not found
    else:
        assert len(found) == 1
        assert ("more than planned" if there else "less than planned") in str(found[0].message)
        assert memfit.units.display_bytes(size) in str(found[0].message)


def test_accumulated_micro_batches_and_an_incomplete_last_window_are_no_difference() -> None:
    step, model, optimizer, batch = make(keep_output=False, accumulation_steps=3)
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)

    def train() -> None:
        for count in (3, 2):
            for _ in range(count):
                dropped(model, batch)
            optimizer.step()
            optimizer.zero_grad()

    assert all("after 2 of 3 micro-batches" in str(each.message) for each in seen(train, 3))


def test_larger_shapes_are_told_once_and_smaller_ones_never() -> None:
    step, model, optimizer, _ = make()
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)
    rows = itertools.chain([_ROWS, _ROWS // 2, 5, _ROWS, _ROWS + 16], itertools.repeat(_ROWS + 24))

    def train() -> None:
        x = torch.randn(next(rows), _WIDTH)
        loss = nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = [each for each in seen(train, 8) if "where the plan has" in str(each.message)]
    assert len(found) == 1
    assert f"({_ROWS + 16}, {_WIDTH}) where the plan has ({_ROWS}, {_WIDTH}), 1.25 times" in str(found[0].message)
    assert found[0].filename == __file__


def test_an_output_that_is_held_until_the_next_one_takes_its_place_is_told() -> None:
    step, model, optimizer, batch = make()
    plan_for(step, 0.3).apply(model, optimizer)
    outputs: dict[str, torch.Tensor] = {}

    def train() -> None:
        outputs["last"] = model(batch)
        loss_of(outputs["last"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = seen(train)
    assert len(found) == 1
    assert "output of the step before is there while forward runs: 128.00 KiB more" in str(found[0].message)


class Masked(Net):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask)


def test_larger_shapes_are_told_where_another_number_of_tensors_is_given() -> None:
    model, batch = Masked(), torch.randn(_ROWS, _WIDTH)
    plan_for(Step(model, batch, loss=loss_of), 0.3).apply(model)
    model(batch, torch.ones(_ROWS, 1))
    with pytest.warns(PlanDrift, match=r"where the plan has \(64, 48\), 2\.00 times"):
        model(torch.cat([batch, batch]), torch.ones(2 * _ROWS, 1))


def test_larger_shapes_are_told_where_only_parts_of_the_model_are_in_train_mode() -> None:
    step, model, optimizer, batch = make()
    plan_for(step, 0.3).apply(model, optimizer)
    model.training = False
    with pytest.warns(PlanDrift, match=r"where the plan has \(64, 48\), 2\.00 times"):
        model(torch.cat([batch, batch]))


def test_larger_shapes_are_told_once_for_several_models() -> None:
    first, second, batch = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), torch.randn(_ROWS, _WIDTH)
    models = {"first": first, "second": second}

    def train(x: torch.Tensor = batch) -> None:
        second(first(x)).square().mean().backward()

    plan = plan_for(
        Step(nn.ModuleDict(models), batch, run=lambda each: each["second"](each["first"](batch)).sum().backward())
    )
    plan.apply(nn.ModuleDict(models))
    assert not seen(train, 1)
    found = seen(lambda: train(torch.cat([batch, batch])), 2)
    assert len([each for each in found if "where the plan has" in str(each.message)]) == 1


def test_units_that_are_replaced_after_apply_are_told_once() -> None:
    step, model, optimizer, batch = make()
    plan_for(step).apply(model, optimizer)
    model.blocks[1] = copy.deepcopy(model.blocks[1])  # type: ignore[index, operator]
    found = [each for each in seen(lambda: dropped(model, batch), 2) if "no longer part" in str(each.message)]
    assert len(found) == 1 and "'blocks.1" in str(found[0].message)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_was_switched_on_after_planning_is_told_once(reentrant: bool) -> None:
    step, model, optimizer, batch = make()
    plan = plan_for(step, 0.3)
    assert any(entry.module.startswith("blocks") for entry in plan.checkpoint)
    plan.apply(model, optimizer)
    model.checkpointing = reentrant  # type: ignore[assignment]

    def train() -> None:
        kept(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    found = [each for each in seen(train) if "torch.utils.checkpoint" in str(each.message)]
    assert len(found) == 1


class Around(nn.Module):
    """Saves tensors of one shape before, in and after its block, so that one can be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.block(torch.sin(x)))


def test_units_inside_what_the_model_checkpoints_give_the_same_gradients() -> None:
    _, model, _, batch = make()
    model.blocks = nn.ModuleList(Around() for _ in range(3))  # type: ignore[assignment]
    options = SolveOptions(force=("blocks.0.block", "blocks.1.block"))
    plan = plan_for(Step(model, batch, loss=loss_of), options=options)
    model.checkpointing = False  # type: ignore[assignment]
    plain = torch.autograd.grad(loss_of(model(batch)), list(model.parameters()))
    plan.apply(model)
    with pytest.warns(PlanDrift, match=r"torch\.utils\.checkpoint"):
        planned = torch.autograd.grad(loss_of(model(batch)), list(model.parameters()))
    assert all(map(torch.equal, planned, plain))


def test_checkpointing_that_was_planned_is_no_difference() -> None:
    step, model, optimizer, batch = make()
    model.checkpointing = False  # type: ignore[assignment]
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)

    def train() -> None:
        kept(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    assert not seen(train)


def test_evaluation_between_steps_is_no_difference() -> None:
    step, model, optimizer, batch = make()
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)

    def train() -> None:
        kept(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        model(torch.randn(4 * _ROWS, _WIDTH))
        model.train()
        with torch.no_grad():
            model(torch.randn(4 * _ROWS, _WIDTH))

    assert not seen(train)


def test_nothing_is_left_behind_by_removal_or_by_a_model_that_goes() -> None:
    gc.collect()
    watchers = dict(optimizer_watch._watchers)
    before = dict(optimizer_module._global_optimizer_post_hooks) if watchers else {}
    step, model, optimizer, _ = make()
    plan = plan_for(step, 0.3)
    plan.apply(model, optimizer)
    plan.remove(model)
    assert dict(optimizer_module._global_optimizer_post_hooks) == before
    assert "forward" not in vars(model)
    plan.apply(model, optimizer)
    gone = weakref.ref(model)
    del step, model, optimizer, _
    gc.collect()
    assert gone() is None
    assert optimizer_watch._watchers == watchers


def test_a_planned_model_that_is_collected_during_a_step_of_another_does_not_disturb_it() -> None:
    """Torch goes over its hooks then, and what a collection takes out of them would end the step with an error."""
    step, model, optimizer, _ = make()
    plan_for(step, 0.3).apply(model, optimizer)
    gone = weakref.ref(model)
    holder = [model]
    holder.append(holder)  # only a collection frees it
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    hooks = [optimizer_module.register_optimizer_step_post_hook(lambda *_: gc.collect()) for _ in range(2)]
    gc.disable()
    try:
        del step, model, optimizer, holder, _
        assert gone() is not None, "a cycle holds it until it is collected"
        other.step()
    finally:
        gc.enable()
        for hook in hooks:
            hook.remove()
    assert gone() is None


def test_a_plan_of_an_earlier_version_is_applied_without_a_comparison() -> None:
    import msgspec

    step, model, optimizer, batch = make(keep_output=False)
    plan = plan_for(step, 0.3)
    plan = msgspec.structs.replace(plan, trace=msgspec.structs.replace(plan.trace, loop=None))
    plan = memfit.Plan.from_json(plan.to_json())
    plan.apply(model, optimizer)

    def train() -> None:
        kept(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    assert not seen(train)
