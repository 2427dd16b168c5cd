"""`MemTracker` beside PyTorch's own, on the same step under FakeTensorMode, and its public use.

Where the two differ, and which is right:
- Workspaces. Ours counts what kernels allocate inside themselves (layer norm's backward keeps a row for each
  thread, division by a number makes a scalar); a dispatch mode cannot see it. CPU's allocator does
  (test_timeline.py).
- Post-Backward. The prototype looks when the gradient of the module's input arrives, inside the engine; the
  loss and its gradient are still held then. Ours looks after the last op of the module's backward, the same
  but for those.
- Kinds. The prototype calls all that forward makes Activation, and all that the optimizer makes Optstate;
  ours calls Temp what nothing keeps for backward, and the optimizer's temporaries. A gradient is Temp there
  until a hook has seen it, and Gradient from birth here. Totals are not affected.
- Saved numbers. `x / 8.0` keeps 8.0 for its backward in a tensor of eight bytes, made where no mode looks.
- Rounding. Both round to 512 bytes on CUDA and not at all on CPU.
- Calls. The prototype keeps one `input_mem` and `output_mem`, of the last call; ours gives the largest.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker as Prototype
from torch.distributed._tools.mem_tracker import _MemRefType, _ModState

from memfit import Step
from memfit.capture import Category
from memfit.compat import MemTracker, ModState
from memfit.errors import InputError, StateError
from memfit.memory import Timeline
from tests.memory.synthetic import make, op, storage

ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
LOSS_AND_ITS_GRADIENT = 8


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block(64)
        self.second = Block(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


class Attention(nn.Module):
    """A block of attention, normalised, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mix = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return x + self.out(weights @ value) * self.scale


MODELS = {"blocks": (Blocks, (32, 64)), "attention": (Attention, (4, 16, 64))}


def run(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(params=MODELS, scope="module")
def pair(request: pytest.FixtureRequest) -> Any:
    return tracked(*MODELS[request.param])


def tracked(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Any:
    """The prototype's tracker, ours, and what the former's weak references need alive."""
    with FakeTensorMode():
        model = build()
        optimizer = ADAMW(model.parameters())
        x = torch.randn(shape)
        run(model, optimizer, x)
        theirs = Prototype()
        theirs.track_external(model, optimizer, x)
        with theirs:
            run(model, optimizer, x)
    ours = MemTracker(Step(build(), torch.randn(shape), run=run, optimizer=ADAMW))
    with ours:
        pass
    return theirs, ours, (model, optimizer, x)


def kinds(snapshot: dict[Any, dict[Any, int]]) -> dict[str, int]:
    (inner,) = snapshot.values()
    return {getattr(key, "value", key): n_bytes for key, n_bytes in inner.items()}


def by_name(tracker: Any) -> dict[str, Any]:
    return {stats.mod_fqn: stats for stats in tracker.memory_tracking.values()}


def test_modules_own_take_and_give_the_same_bytes(pair: Any) -> None:
    theirs, ours = by_name(pair[0]), by_name(pair[1])
    assert theirs.keys() == ours.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert (got.parameter_mem, got.buffer_mem) == (expected.parameter_mem, expected.buffer_mem), name
        assert (got.input_mem, got.output_mem) == (expected.input_mem, expected.output_mem), name


@pytest.mark.parametrize("state", [ModState.PRE_FW, ModState.POST_FW, ModState.PRE_BW])
def test_totals_between_ops_are_the_same(pair: Any, state: ModState) -> None:
    for name, expected in by_name(pair[0]).items():
        want = [kinds(each) for each in expected.snapshots[_ModState[state.name]]]
        got = [kinds(each) for each in by_name(pair[1])[name].snapshots[state]]
        for key in ("Total", "Parameter", "Buffer", "Gradient", "Other"):
            assert [each[key] for each in got] == [each[key] for each in want], (name, key)


def test_totals_after_backward_differ_by_the_loss_at_most(pair: Any) -> None:
    for name, expected in by_name(pair[0]).items():
        want = [kinds(each)["Total"] for each in expected.snapshots[_ModState.POST_BW]]
        got = [kinds(each)["Total"] for each in by_name(pair[1])[name].snapshots[ModState.POST_BW]]
        assert all(b - a in (0, LOSS_AND_ITS_GRADIENT) for a, b in zip(got, want, strict=True)), name


@pytest.mark.parametrize("state", [ModState.PEAK_FW, ModState.PEAK_BW])
def test_peaks_of_modules_differ_by_workspaces_only(pair: Any, state: ModState) -> None:
    ours = pair[1]
    workspace_bytes = max(each.workspace_bytes for each in ours._captured().trace.ops)
    for name, expected in by_name(pair[0]).items():
        want = [kinds(each)["Total"] for each in expected.snapshots[_ModState[state.name]]]
        got = [kinds(each)["Total"] for each in by_name(ours)[name].snapshots[state]]
        assert len(got) == len(want)
        assert all(0 <= a - b <= workspace_bytes for a, b in zip(got, want, strict=True)), name


def test_peak_of_the_step_is_the_same_but_for_workspace_and_kinds(pair: Any) -> None:
    theirs, ours = (kinds(each.get_tracker_snapshot("peak")) for each in pair[:2])
    timeline = pair[1]._captured()
    workspace_bytes = timeline.trace.ops[timeline.peak_op].workspace_bytes
    assert ours["Total"] - workspace_bytes == theirs["Total"]
    for key in ("Parameter", "Buffer", "Gradient", "Other"):
        assert ours[key] == theirs[key]
    # What the optimizer makes for a moment is no state.
    assert ours["Optstate"] + ours["Temp"] - workspace_bytes == theirs["Optstate"]


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 8.0


def test_number_saved_for_backward_is_seen_by_ours_only() -> None:
    theirs, ours, _alive = tracked(lambda: Scaled(16, 16), (8, 16))
    (want,) = by_name(theirs)["Scaled"].snapshots[_ModState.POST_FW]
    (got,) = by_name(ours)["Scaled"].snapshots[ModState.POST_FW]
    assert kinds(got)["Total"] == kinds(want)["Total"] + 8


def test_keys_are_those_of_the_prototype() -> None:
    tracker = MemTracker.of(make(ops=(op(),), storages=(storage(5, category=Category.PARAMETER),)))
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    assert list(snapshot) == [*(each.value for each in _MemRefType), "Total"]
    assert {state.name: state.value for state in ModState} == {state.name: state.value for state in _ModState}


def test_current_is_the_end_of_the_step() -> None:
    tracker = MemTracker.of(
        make(ops=(op(),), storages=(storage(5, category=Category.PARAMETER), storage(7, alloc_at=0, free_after=0)))
    )
    assert kinds(tracker.get_tracker_snapshot("peak"))["Total"] == 12
    assert kinds(tracker.get_tracker_snapshot())["Total"] == 5
    with pytest.raises(InputError, match="'current' or 'peak'"):
        tracker.get_tracker_snapshot("lowest")


def test_rounding_follows_the_device() -> None:
    step = make(ops=(op(),), storages=(storage(5),), device="h100-sxm", device_type="cuda")
    assert MemTracker.of(step).get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"] == 512
    assert MemTracker.of(step, rounding_bytes=1).get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"] == 5


def test_tracking_a_function_is_tracking_its_step() -> None:
    model, x = Blocks(), torch.randn(8, 64)
    optimizer = ADAMW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with MemTracker(Step(Blocks(), torch.randn(8, 64), run=run, optimizer=ADAMW)) as tracker:
        expected = kinds(tracker.get_tracker_snapshot("peak"))

    with_arguments = MemTracker()
    with_arguments.track_external(model, optimizer, x, None)
    assert kinds(with_arguments.run(run).get_tracker_snapshot("peak")) == expected

    def step() -> None:
        run(model, optimizer, x)

    without = kinds(MemTracker().run(step).get_tracker_snapshot("peak"))
    assert without["Total"] == expected["Total"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_statistics_of_modules_can_be_forgotten() -> None:
    with MemTracker(Step(Blocks(), torch.randn(8, 64), run=run, optimizer=ADAMW)) as tracker:
        assert tracker.memory_tracking["first.up"].parameter_mem == (64 * 256 + 256) * 4
        tracker.reset_mod_stats()
        assert not tracker.memory_tracking


def test_misuse_says_what_to_do() -> None:
    tracker = MemTracker()
    with pytest.raises(StateError, match=r"MemTracker\(\).run"), tracker:
        pass
    with pytest.raises(StateError, match="captured nothing"):
        tracker.get_tracker_snapshot()
    with pytest.raises(InputError, match="one model"):
        tracker.run(run)
    with pytest.raises(InputError, match="a str"):
        tracker.track_external("model")  # type: ignore[arg-type]


@pytest.mark.parametrize("tabulate", [False, True])
def test_snapshots_are_displayed_in_the_units_asked_for(tabulate: bool) -> None:
    tracker = MemTracker(Step(Blocks(), torch.randn(8, 64), run=run, optimizer=ADAMW))
    with tracker:
        output = io.StringIO()
        console = Console(file=output, width=200)
        tracker.display_snapshot("peak", units="KiB", tabulate=tabulate, console=console)
        tracker.display_modulewise_snapshots(depth=2, units="KiB", tabulate=tabulate, console=console)
    text = output.getvalue()
    total = Timeline.of(tracker._captured().trace).peak_bytes
    assert f"{round(total / 1024, 2)} KiB" in text
    assert "Module:  Blocks.first\n" in text
    assert "Blocks.first.norm" not in text
    assert "Peak-Backward # 1" in text
    with pytest.raises(InputError, match="'MB'"):
        tracker.display_snapshot(units="MB", console=console)
