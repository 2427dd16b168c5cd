"""Values that a step keeps from one run to the next: a capture leaves every one of them as it found it."""

from __future__ import annotations

import collections
import functools
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step

SIZE = 16
NUMBERS: dict[str, Any] = {}
ORDERED: collections.OrderedDict[str, Any] = collections.OrderedDict()
COUNTED: collections.defaultdict[str, Any] = collections.defaultdict(int)
HISTORY: list[Any] = []
RECENT: collections.deque[Any] = collections.deque(maxlen=2)
NESTED: dict[str, list[Any]] = {"averages": []}
SPACE = types.SimpleNamespace()
LOCAL = threading.local()
average: Any = None


class Tracker:
    of_class: Any = None
    table: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.average: Any = None
        self.inner: dict[str, Any] = {}


class Slotted:
    __slots__ = ("average",)

    def __init__(self) -> None:
        self.average: Any = None


class Attributes(dict):
    """A dict whose items are its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__ = self


TRACKER, SLOTTED, ATTRIBUTES = Tracker(), Slotted(), Attributes()


def of_function(_: Any = None) -> None:
    """Holds a value in an attribute."""


def with_default(value: Any = None, cache: dict[str, Any] = {}) -> Any:  # noqa: B006
    if value is not None:
        cache["average"] = value
    return cache["average"]


def set_global(value: Any) -> None:
    global average
    average = value


class Net(nn.Module):
    count: int = 0

    def __init__(self, get: Callable[[Net], Any], put: Callable[[Net, Any], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.tracker = Tracker()
        self.statistics: dict[str, Any] = {}
        self.modules_own = [Tracker()]
        self.get, self.put = get, put

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.put(self, 0.9 * self.get(self) + y.detach().mean())
        return y.square().mean()


def _cell() -> tuple[Callable[[Net], Any], Callable[[Net, Any], None]]:
    kept: Any = None

    def put(_: Net, value: Any) -> None:
        nonlocal kept
        kept = value

    return lambda _: kept, put


def _item(holder: Any, key: Any) -> tuple[Callable[[Net], Any], Callable[[Net, Any], None]]:
    return lambda _: holder[key], lambda _, value: holder.__setitem__(key, value)


def _attribute(holder: Any, name: str) -> tuple[Callable[[Net], Any], Callable[[Net, Any], None]]:
    return lambda _: getattr(holder, name), lambda _, value: setattr(holder, name, value)


def _sequence(holder: Any) -> tuple[Callable[[Net], Any], Callable[[Net, Any], None]]:
    return lambda _: holder[-1], lambda _, value: holder.append(value)


HOLDERS: dict[str, tuple[Callable[[Net], Any], Callable[[Net, Any], None]]] = {
    "dict": _item(NUMBERS, "average"),
    "OrderedDict": _item(ORDERED, "average"),
    "defaultdict": _item(COUNTED, "average"),
    "list": _sequence(HISTORY),
    "list in a dict": _sequence(NESTED["averages"]),
    "deque": _sequence(RECENT),
    "global name": (lambda _: average, lambda _, value: set_global(value)),
    "variable of an enclosing function": _cell(),
    "attribute of an object": _attribute(TRACKER, "average"),
    "slot of an object": _attribute(SLOTTED, "average"),
    "attribute of a class": _attribute(Tracker, "of_class"),
    "dict of a class": _item(Tracker.table, "average"),
    "dict of attributes": _attribute(ATTRIBUTES, "average"),
    "SimpleNamespace": _attribute(SPACE, "average"),
    "threading.local": _attribute(LOCAL, "average"),
    "attribute of a function": _attribute(of_function, "average"),
    "default argument": (lambda _: with_default(), lambda _, value: with_default(value)),
    "dict of the model": (
        lambda model: model.statistics["average"],
        lambda model, value: model.statistics.update(average=value),
    ),
    "object of the model": (
        lambda model: model.tracker.average,
        lambda model, value: setattr(model.tracker, "average", value),
    ),
    "dict of an object of the model": (
        lambda model: model.tracker.inner["average"],
        lambda model, value: model.tracker.inner.update(average=value),
    ),
    "object in a list of the model": (
        lambda model: model.modules_own[0].average,
        lambda model, value: setattr(model.modules_own[0], "average", value),
    ),
}


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_running_average_is_the_same_after_a_capture(kind: str, target: str) -> None:
    get, put = HOLDERS[kind]
    model = Net(get, put)
    first = torch.full((), 3.0)
    put(model, first)
    sequences = [list(each) for each in (HISTORY, NESTED["averages"], RECENT)]
    trace = memfit.trace(Step(model, torch.randn(4, SIZE), optimizer=torch.optim.SGD), target=target)
    assert get(model) is first and float(first) == 3.0
    assert [list(map(id, each)) for each in (HISTORY, NESTED["averages"], RECENT)] == [
        list(map(id, each)) for each in sequences
    ]
    assert not any("taken out" in note for note in trace.notes)
    model(torch.randn(4, SIZE)).backward()  # a real step goes on from there
    assert not get(model).is_meta and get(model) is not first


@pytest.mark.parametrize("failing", [False, True])
def test_counters_results_and_what_was_emptied_come_back(failing: bool) -> None:
    kept = torch.ones(3)
    NUMBERS.clear()
    NUMBERS.update(calls=5, kept=kept, last=None)
    SPACE.members = {1, 2}

    class Counting(nn.Linear):
        calls = 7

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            NUMBERS["calls"] += 1
            Counting.calls += 1
            NUMBERS["last"] = y
            NUMBERS["new"] = [y]
            NUMBERS.pop("kept", None)
            SPACE.members.add(3)
            if failing:
                raise ValueError("no")
            return y.sum()

    step = Step(Counting(SIZE, SIZE), torch.randn(4, SIZE), optimizer=None)
    if failing:
        with pytest.raises(memfit.CaptureError):
            memfit.trace(step, target="cpu")
    else:
        memfit.trace(step, target="cpu")
    assert list(NUMBERS.items()) == [("calls", 5), ("kept", kept), ("last", None)]
    assert Counting.calls == 7 and SPACE.members == {1, 2}


def test_what_hooks_and_losses_keep_comes_back() -> None:
    seen: dict[str, Any] = {"output": "nothing yet"}
    norms: list[Any] = [1.0]

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(SIZE))
            self.calls = 0

        def forward(self, output: torch.Tensor, _: Any) -> torch.Tensor:
            self.calls += 1
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
            return (output - self.centre).square().mean()

    model, loss = nn.Linear(SIZE, SIZE), Centred()
    model.register_forward_hook(lambda module, args, output: seen.update(output=output))
    model.weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    centre = loss.centre
    memfit.trace(Step(model, torch.randn(4, SIZE), loss=loss, optimizer=torch.optim.SGD), target="cpu")
    assert seen == {"output": "nothing yet"} and norms == [1.0]
    assert loss.centre is centre and loss.calls == 0


def test_a_function_of_the_users_own_keeps_what_it_had() -> None:
    model = nn.Linear(SIZE, SIZE)
    best, losses = torch.full((), 9.0), [torch.zeros(())]
    first = list(losses)
    lowest = best

    def run() -> None:
        nonlocal lowest
        loss = model(torch.ones(4, SIZE)).square().mean()
        loss.backward()
        lowest = torch.minimum(lowest, loss.detach())
        losses[0] = 0.5 * losses[0] + loss.detach()
        model.zero_grad()

    memfit.trace(run, target="cpu")
    assert lowest is best and losses[0] is first[0] and len(losses) == 1


def test_what_could_not_be_looked_at_is_named() -> None:
    @functools.lru_cache(maxsize=1)
    def hidden() -> dict[str, Any]:  # nothing that can be looked at refers to the dict
        return {"average": torch.zeros(())}

    class Hiding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            hidden()["average"] = 0.9 * hidden().get("average", 0.0) + y.detach().mean()
            return y.sum()

    hidden()
    trace = memfit.trace(Step(Hiding(SIZE, SIZE), torch.randn(4, SIZE), optimizer=None), target="cpu")
    assert "average" not in hidden()
    assert any("under 'average'" in note and "taken out" in note for note in trace.notes)


def test_numbers_that_another_thread_counts_are_its_own() -> None:
    counted = {"n": 0}
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted["n"] += 1
            stop.wait(0.001)

    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun = counted["n"]
            while counted["n"] < begun + 3:
                stop.wait(0.001)
            return super().forward(x).sum()

    thread = threading.Thread(target=count)
    thread.start()
    try:
        while counted["n"] == 0:
            stop.wait(0.001)
        before = counted["n"]
        memfit.trace(Step(Reading(SIZE, SIZE), torch.randn(4, SIZE), optimizer=None), target="cpu")
        assert counted["n"] >= before + 3
    finally:
        stop.set()
        thread.join()
