"""Steps that read random values: the largest path is captured, it is said, and a plan for it holds on every other."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import CaptureError, Step, Trace
from memfit.memory import Timeline, measured

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
GENERATOR = np.random.default_rng(1)
Skips = Callable[[torch.Tensor], bool]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.sigmoid(self.a(x)))


class LayerDrop(nn.Module):
    """Skips its layers at random while it is trained; the last one runs always."""

    def __init__(self, skips: Skips, count: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            if self.training and self.skips(x):
                continue
            x = block(x)
        return self.blocks[-1](x).square().mean()


SKIPS: dict[str, Skips] = {
    "torch.rand": lambda _: bool(torch.rand([]) < 0.5),
    "torch.rand on the device": lambda x: bool(torch.rand((), device=x.device) < 0.5),
    "uniform_": lambda _: torch.empty(1).uniform_(0, 1).item() < 0.5,
    "torch.randn": lambda _: torch.randn(1).item() < 0,
    "torch.randint": lambda _: torch.randint(0, 2, (1,)).item() == 0,
    "torch.bernoulli": lambda _: torch.bernoulli(torch.tensor(0.5)).item() == 1,
    "torch.rand by tolist": lambda _: torch.rand(2).tolist()[0] < 0.5,
    "torch.rand by numpy": lambda _: bool(torch.rand(2).numpy()[0] < 0.5),
    "np.random.uniform": lambda _: np.random.uniform(0, 1) < 0.5,
    "np.random.choice": lambda _: bool(np.random.choice([True, False])),
    "random.random": lambda _: random.random() < 0.5,
    "random.choice": lambda _: random.choice([True, False]),
    "a generator of the file": lambda _: bool(GENERATOR.random() < 0.5),
}


def capture(model: nn.Module, target: str = "cpu") -> Trace:
    return memfit.trace(Step(model, X, optimizer=None), target=target)


def blocks(trace: Trace) -> int:
    return sum(call.kind == "Block" for call in trace.calls)


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", SKIPS)
def test_no_layer_is_dropped_in_what_is_captured(name: str, target: str) -> None:
    model = LayerDrop(SKIPS[name])
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    trace = capture(model, target)
    assert blocks(trace) == 8
    assert any("depends on random values" in note for note in trace.notes)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == states[2]


@pytest.mark.parametrize(
    "skips", [lambda _: bool(np.random.default_rng().random() < 0.5), lambda _: random.Random().random() < 0.5]
)
def test_generators_that_a_step_makes_without_a_seed_are_said(skips: Skips) -> None:
    try:
        notes = " ".join(capture(LayerDrop(skips)).notes)
    except CaptureError as error:  # no draw that was tried runs all layers
        notes = str(error)
    assert "at random" in notes or "could not be chosen" in notes
    assert "test_random_paths.py" in notes


def test_a_measured_step_on_a_smaller_path_is_no_fault_of_the_plan() -> None:
    model = LayerDrop(lambda _: bool(torch.rand([]) < 0.999))
    step = Step(model, X, optimizer=None)
    plan = memfit.plan(memfit.trace(step, target="cpu"), budget="1GiB", progress=False)
    check = plan.verify(step, steps=1, time_tolerance=None)
    assert check.peak.error < -check.memory_tolerance
    assert check.ok and "paths at random" in str(check)
    assert not dataclasses.replace(check, random_path=False).ok


def test_a_generator_that_a_module_holds_adds_no_op() -> None:
    model = LayerDrop(lambda _: False)
    ops = capture(model).ops
    model.generator = torch.Generator()
    assert len(capture(model).ops) == len(ops)


def test_a_step_without_random_reads_is_captured_once_and_without_a_note() -> None:
    calls = itertools.count()  # a number would be put back as it was

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            next(calls)
            order = torch.randperm(64, device=x.device)[:32]
            x = torch.dropout(x + torch.rand(32, device=x.device), 0.5, self.training)
            return self.linear(x[order]).square().mean()

    assert not capture(Noisy()).notes
    assert next(calls) == 1


def test_the_same_trace_comes_from_every_state_of_the_generators() -> None:
    prints = set()
    model = LayerDrop(SKIPS["torch.rand"])
    for seed in range(3):
        torch.manual_seed(seed)
        prints.add(capture(model).fingerprint)
    assert len(prints) == 1


LENGTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.randint": lambda x: x[: int(torch.randint(1, 65, (1,)))],
    "random.randint": lambda x: x[: random.randint(1, 64)],
    "np.random.randint": lambda x: x[: np.random.randint(1, 65)],
    "mask": lambda x: x[torch.rand(64, device=x.device) < 0.5],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_longest_of_random_lengths_is_captured(name: str) -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(LENGTHS[name](x)).square().mean()

    trace = capture(Cut())
    assert any(ref.shape == (64, 128) for op in trace.ops for ref in op.outputs)
    assert any("depends on random values" in note for note in trace.notes)


def test_choices_of_several_lines_are_made_one_by_one() -> None:
    class Opposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Block(), Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if torch.rand(()) < 0.5:
                x = self.second(x)
            if torch.rand(()) > 0.5:
                x = self.third(x)
            return x.square().mean()

    assert blocks(capture(Opposed())) == 3


def test_values_that_change_no_op_are_told_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * random.random()).square().mean()

    notes = capture(Scaled()).notes
    assert len(notes) == 1 and "lead through the same ops; other values were not tried" in notes[0]


class Rare(nn.Module):
    """Takes the large path for some draws only."""

    def __init__(self, large: Callable[[], bool | torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.large = nn.Linear(32, 32), large

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (x.repeat(1, 64).sigmoid() if self.large() else x).square().mean()


RARE: dict[str, Callable[[], bool | torch.Tensor]] = {
    "an index of a Categorical": lambda: torch.distributions.Categorical(torch.ones(8)).sample() == 3,
    "the other index of multinomial": lambda: torch.multinomial(torch.ones(2), 1).item() == 0,
    "the first of randperm": lambda: torch.randperm(4)[0] == 1,
    "a place of the largest": lambda: torch.rand(4).argmax() == 2,
    "an integer": lambda: torch.randint(5, 13, ()) == 10,
    "a window of torch.rand": lambda: bool(0.1 < torch.rand(()) < 0.3),
    "a window of random.random": lambda: 0.1 < random.random() < 0.3,
    "one of random.choice": lambda: bool(random.choice([0, 0, 1, 0, 0, 0])),
    "one of np.random.choice": lambda: bool(np.random.choice([0, 0, 0, 0, 1, 0])),
    "a large normal number": lambda: torch.randn(()) > 2.5,
    "a small normal number": lambda: torch.randn(()) < -2.5,
    "a large exponential number": lambda: torch.empty(()).exponential_() > 8,
    "opposite numbers of Python": lambda: (random.random() < 0.3) & (random.random() > 0.7),
    "opposite numbers in place": lambda: all(abs(torch.empty(()).uniform_() - i) < 0.2 for i in (0, 1)),
    "opposite numbers of one line": lambda: all(abs(torch.rand(()) - i) < 0.2 for i in (1, 0)),
}


@pytest.mark.parametrize("name", RARE)
def test_paths_that_few_draws_take_are_found(name: str) -> None:
    always = capture(Rare(lambda: True))
    trace = capture(Rare(RARE[name]))
    assert Timeline.of(trace).peak_bytes >= Timeline.of(always).peak_bytes
    assert any("depends on random values" in note for note in trace.notes)


def note_on_draws(model: nn.Module) -> str:
    return next(note for note in capture(model).notes if "random values" in note)


def test_other_paths_are_called_smaller_only_when_every_value_was_tried() -> None:
    assert "steps on other paths need less" in note_on_draws(Rare(RARE["an integer"]))
    assert "all values lead through the same ops" in note_on_draws(Rare(lambda: torch.randint(0, 8, ()) > 9))
    for untried in (
        RARE["the first of randperm"],
        lambda: torch.randint(0, 99, ()) == 0,
        lambda: random.random() < 0.5,
    ):
        note = note_on_draws(Rare(untried))
        assert "need less" not in note and "may need more" in note


def test_a_distribution_that_cannot_be_chosen_from_is_said() -> None:
    note = note_on_draws(Rare(lambda: torch._standard_gamma(torch.tensor(1.0)) > 50))
    assert "could not be chosen" in note and "may need more" in note


def test_paths_that_exclude_each_other_are_refused() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first(x) if torch.rand(()) < 0.5 else self.second(x)).square().mean()

    with pytest.raises(CaptureError, match="does not contain the others") as raised:
        capture(Either())
    assert "probability" in raised.value.advice
    assert "at test_random_paths.py" not in raised.value.source and "test_random_paths.py" in raised.value.source


def smallest(model: nn.Module) -> memfit.Plan:
    trace = capture(model)
    least = memfit.plan(trace, budget="1KiB", progress=False).minimum_budget_bytes
    assert least is not None
    baseline = Timeline.of(trace).peak_bytes
    plan = memfit.plan(trace, budget=least + (baseline - least) // 4, progress=False)
    assert plan.checkpoint
    return plan


@pytest.mark.filterwarnings("ignore:unit ")
@pytest.mark.parametrize("name", ["torch.rand", "random.random", "np.random.uniform"])
def test_thirty_steps_on_random_paths_stay_within_the_budget_and_exact(name: str) -> None:
    model = LayerDrop(SKIPS[name])
    plain = copy.deepcopy(model)
    plan = smallest(model)
    plan.apply(model)
    start = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) + X.untyped_storage().nbytes()
    for number in range(30):
        for each in (plain, model):
            torch.manual_seed(number)
            random.seed(number)
            np.random.seed(number)
            if each is plain or number % 5:
                each(X).backward()
            else:
                with measured() as truth:
                    each(X).backward()
                assert start + truth.peak_bytes <= plan.budget_bytes
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
        plain.zero_grad()
        model.zero_grad()


def test_generators_that_libraries_make_for_themselves_are_none_of_the_step(tmp_path: Path) -> None:
    module = tmp_path / "lazily_imported.py"
    module.write_text("import random\nGENERATOR = random.Random()\n")

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            next(tempfile._RandomNameSequence())  # as `tempfile` does once a process
            runpy.run_path(str(module))
            return self.linear(x)

    trace = memfit.trace(Step(Lazy(), torch.randn(4, 8), loss=lambda output, _: output.sum()), target="cpu")
    assert not any("random" in note for note in trace.notes)


class Chosen(nn.Module):
    """Trains on the rows that a part of the batch chooses."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.choose, self.linear = choose, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.choose(x))


CHOICES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "a mask of the batch": (lambda x: x[x[:, 0] > 0], True),
    "a selection": (lambda x: torch.masked_select(x, x[:, :1] > 0).view(-1, 16), True),
    "places of nonzeros": (lambda x: x[(x[:, 0] > 0).nonzero().squeeze(1)], True),
    "a number read": (lambda x: x[: int(x[0, 0].abs().ceil().item()) + 1], True),
    "a branch": (lambda x: x if bool(x.max() > 0) else x[:1], True),
    "a mask of its own": (lambda x: x[torch.arange(len(x)) > 3], False),
    "an order": (lambda x: x[x[:, 0].argsort()], False),
    "other values only": (lambda x: torch.where(x > 0, x, 0), False),
}


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", CHOICES)
def test_what_values_of_the_batch_decide_is_said(name: str, target: str) -> None:
    choose, said = CHOICES[name]
    step = Step(Chosen(choose), torch.randn(64, 16), loss=lambda output, _: output.sum())
    notes = memfit.trace(step, target=target).notes
    assert any("a batch with other values may need more memory" in note for note in notes) is said
