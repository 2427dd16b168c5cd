"""Caches that a step fills: the steady state is captured, and nothing of the capture is left in them."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import CaptureError, Step
from memfit.memory import Timeline, measured

SIZE = 1200
"""Its square is more elements than keep their values."""
CACHE: dict[Any, Any] = {}
RESULTS: list[torch.Tensor] = []
MASK: torch.Tensor | None = None


def make(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(SIZE, SIZE, device=x.device).tril()


@functools.lru_cache(maxsize=2)
def cached_table(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, device=device).tril()


@functools.cache
def cached_pair(device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.ones(SIZE, SIZE, device=device).tril(), {"scale": torch.ones(SIZE, device=device)}


@functools.cache
def cached_without_limit(device: torch.device) -> torch.Tensor:
    return torch.ones(SIZE, SIZE, device=device).tril()


class Helper:
    """No module."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None


class Masked(nn.Module):
    shared: torch.Tensor | None = None
    by_size: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, find: Callable[[Masked, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.find = find
        self.mask: torch.Tensor | None = None
        self.helper = Helper()
        self.started = False
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8))

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def cached(self, device: torch.device) -> torch.Tensor:
        return torch.ones(SIZE, SIZE, device=device).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) @ self.find(self, x)).mean()


def attribute(self: Masked, x: torch.Tensor) -> torch.Tensor:
    if self.mask is None:
        self.mask = make(x)
    return self.mask


def buffer(self: Masked, x: torch.Tensor) -> torch.Tensor:
    if self.table is None:
        self.table = make(x)
    return self.table


def dictionary(self: Masked, x: torch.Tensor) -> torch.Tensor:
    if SIZE not in CACHE:
        CACHE[SIZE] = (make(x), "of this size")
    return CACHE[SIZE][0]


def class_dictionary(self: Masked, x: torch.Tensor) -> torch.Tensor:
    if SIZE not in Masked.by_size:
        Masked.by_size[SIZE] = make(x)
    return Masked.by_size[SIZE]


def class_attribute(self: Masked, x: torch.Tensor) -> torch.Tensor:
    if Masked.shared is None:
        Masked.shared = make(x)
    return Masked.shared


def global_name(self: Masked, x: torch.Tensor) -> torch.Tensor:
    global MASK
    if MASK is None:
        MASK = make(x)
    return MASK


def helper(self: Masked, x: torch.Tensor) -> torch.Tensor:
    if self.helper.mask is None:
        self.helper.mask = make(x)
    return self.helper.mask


def switch(self: Masked, x: torch.Tensor) -> torch.Tensor:
    mask = make(x)
    if not self.started:
        self.started = True
        mask = mask.exp().log()
    return mask


def initialized(self: Masked, x: torch.Tensor) -> torch.Tensor:
    mask = make(x)
    if not self.initialized:
        self.initialized.fill_(1)
        mask = mask.exp().log()
    return mask


CACHES: dict[str, Callable[[Masked, torch.Tensor], torch.Tensor]] = {
    "lru_cache": lambda self, x: cached_table(SIZE, x.device),
    "cache of tuples": lambda self, x: cached_pair(x.device)[0],
    "cache without a limit": lambda self, x: cached_without_limit(x.device),
    "lru_cache of a method": lambda self, x: self.cached(x.device),
    "attribute": attribute,
    "buffer": buffer,
    "dictionary": dictionary,
    "dictionary of a class": class_dictionary,
    "attribute of a class": class_attribute,
    "global name": global_name,
    "attribute of a helper": helper,
    "switch": switch,
    "switch in a buffer": initialized,
}


def forget() -> None:
    global MASK
    MASK = Masked.shared = None
    CACHE.clear()
    RESULTS.clear()
    Masked.by_size.clear()
    for each in (cached_table, cached_pair, cached_without_limit, Masked.cached):
        each.cache_clear()


def held(model: Masked) -> list[Any]:
    """What caches hold, other than nothing."""
    values = [
        MASK,
        Masked.shared,
        model.mask,
        model.table,
        model.helper.mask,
        *CACHE.values(),
        *Masked.by_size.values(),
    ]
    sizes = [each.cache_info().currsize for each in (cached_table, cached_pair, cached_without_limit, Masked.cached)]
    switches = [model.started, bool(model.initialized), len(RESULTS)]
    return [value for value in values if value is not None] + [each for each in (*sizes, *switches) if each]


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_are_full_in_the_trace_and_as_they_were_afterwards(name: str, target: str) -> None:
    forget()
    model = Masked(CACHES[name])
    step = Step(model, torch.randn(4, SIZE), optimizer=None)
    trace = memfit.trace(step, target=target)
    assert not held(model)
    step.execute(model, None, "cpu")
    timeline = Timeline.of(trace)
    if target == "cpu":
        with measured() as truth:
            step.execute(model, None, "cpu")
        assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes
        again = Timeline.of(memfit.trace(step, target=target))
        assert again.peak_bytes - again.start_bytes == truth.peak_bytes
    made = [op for op in trace.ops if op.name in ("aten.tril.default", "aten.exp.default")]
    assert len(made) == ("switch" in name)
    forget()


def test_a_list_of_the_users_gets_nothing() -> None:
    forget()
    model = nn.Linear(8, 8)

    def run() -> None:
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        RESULTS.append(loss.detach())
        model.zero_grad()

    kept = torch.ones(())
    RESULTS.append(kept)
    memfit.trace(run, target="cpu")
    assert len(RESULTS) == 1 and RESULTS[0] is kept
    forget()


def test_what_a_cache_held_before_stays_there() -> None:
    forget()
    model = Masked(CACHES["dictionary"])
    CACHE["other"] = torch.ones(3)
    Masked.by_size[3] = torch.ones(3)
    memfit.trace(Step(model, torch.randn(4, SIZE), optimizer=None), target="h100-sxm")
    assert list(CACHE) == ["other"] and list(Masked.by_size) == [3]
    forget()


def test_a_plan_of_a_model_with_a_lazy_mask_is_verified() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
            self.mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None or len(self.mask) < len(x):
                self.mask = torch.ones(len(x), 1).cumsum(0)
            return x + self.b(torch.sigmoid(self.a(x))) * self.mask

    model = nn.Sequential(*(Layer() for _ in range(4)))
    step = Step(model, torch.randn(512, 64), loss=lambda output, _: output.square().mean(), optimizer=None)
    trace = memfit.trace(step, target="cpu")
    least = memfit.plan(trace, budget="1KiB", progress=False).minimum_budget_bytes
    assert least is not None
    plan = memfit.plan(trace, budget=(least + Timeline.of(trace).peak_bytes) // 2, progress=False)
    assert plan.status == "optimal" and plan.checkpoint
    check = plan.verify(step, time_tolerance=None)
    assert check.ok, str(check)


@pytest.mark.parametrize("name", ["lru_cache", "cache without a limit"])
def test_an_lru_cache_is_cleared_without_a_note(name: str) -> None:
    forget()
    assert not memfit.trace(Step(Masked(CACHES[name]), torch.randn(4, SIZE), optimizer=None), target="cpu").notes
    forget()


@pytest.mark.parametrize("name", ["attribute", "buffer"])
def test_a_model_that_has_filled_its_cache_is_the_same_step(name: str) -> None:
    model = Masked(CACHES[name])
    step = Step(model, torch.randn(4, SIZE), optimizer=torch.optim.SGD)
    before = memfit.trace(step, target="cpu").fingerprint
    model(step.batch)
    assert memfit.trace(step, target="cpu").fingerprint == before


def test_variables_of_a_step_that_fails_are_nobodys_cache() -> None:
    def fails(output: torch.Tensor, _: object) -> torch.Tensor:
        kept = [{"output": (output,)}]
        raise ValueError(f"{len(kept)} is too few")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError, match="1 is too few"):
            memfit.trace(Step(nn.Linear(4, 4), torch.ones(2, 4), loss=fails), target="cpu")


@pytest.mark.parametrize("target", ["h100-sxm", "cpu"])
def test_a_model_made_for_a_capture_is_freed_with_it(target: str) -> None:
    made: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        made.append(weakref.ref(model))
        return model

    gc.collect()
    gc.disable()  # by reference counts alone: nothing of the capture is in a cycle
    try:
        memfit.trace(Step(build, memfit.spec((4, 8)), loss=lambda output, _: output.sum()), target=target)
        assert made[0]() is None
    finally:
        gc.enable()
