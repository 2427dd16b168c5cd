"""Training loops as people write them: the number is right, and nothing of theirs is changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import queue
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture import CaptureError, Category, Phase, Step, check_trace
from memfit.errors import InputError
from memfit.memory import Timeline, measured

GPU = "h100-sxm"


def stack(width: int = 64, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(module for _ in range(depth) for module in (nn.Linear(width, width), nn.Tanh())))


def captured(step: Any, target: str = "cpu") -> memfit.Trace:
    trace = memfit.trace(step, target=target)
    check_trace(trace)
    return trace


def total(trace: memfit.Trace, category: Category) -> int:
    return sum(storage.bytes for storage in trace.storages if storage.category is category)


def assert_exact(train: Callable[[], Any]) -> memfit.Trace:
    """The captured rise above the start equals the measured one of a steady step."""
    train()
    train()
    with measured() as truth:
        train()
    trace = captured(train)
    timeline = Timeline.of(trace)
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes
    return trace


def test_zero_grad_before_backward_keeps_gradients_through_forward() -> None:
    model, batch = stack(), torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train()
    optimizer.zero_grad()
    with measured() as truth:  # frees of what was allocated before are not seen: both steps are measured
        train()
        train()
    trace = captured(train)
    timeline = Timeline.of(trace)
    gradients = sum(s.bytes for s in trace.storages if s.category is Category.GRADIENT and s.alloc_at == -1)
    assert timeline.peak_bytes - (timeline.start_bytes - gradients) == truth.peak_bytes
    resident = [s for s in trace.storages if s.category is Category.GRADIENT and s.alloc_at == -1]
    assert len(resident) == len(list(model.parameters()))


@pytest.mark.parametrize("options", [{"set_to_none": False}, {"zero_grad": False}])
def test_gradients_that_stay_are_there_at_the_start(options: dict[str, bool]) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, torch.randn(256, 64), loss=lambda o, _: o.mean(), optimizer=optimizer, **options)
    for _ in range(2):
        step.execute(model, optimizer, "cpu")
    with measured() as truth:
        step.execute(model, optimizer, "cpu")
    timeline = Timeline.of(captured(step))
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes
    assert total(timeline.trace, Category.GRADIENT) == total(timeline.trace, Category.PARAMETER)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("keep_output", [True, False])
@pytest.mark.parametrize("zero_grad", ["after_step", "before_forward", "before_backward", "never"])
def test_what_a_loop_holds_is_captured_as_it_runs(zero_grad: Any, keep_output: bool, set_to_none: bool) -> None:
    torch.manual_seed(0)
    model, labels = nn.Sequential(stack(), nn.Linear(64, 512)), torch.zeros(256, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(
        model,
        torch.randn(256, 64),
        loss=lambda output, _: nn.functional.cross_entropy(output, labels),
        optimizer=optimizer,
        accumulation_steps=2,
        zero_grad=zero_grad,
        set_to_none=set_to_none,
        keep_output=keep_output,
    )
    step.execute(model, optimizer, "cpu")
    model.zero_grad()
    with measured() as truth:  # frees of what was allocated before are not seen: both steps are measured
        step.execute(model, optimizer, "cpu")
        step.execute(model, optimizer, "cpu")
    timeline = Timeline.of(captured(step))
    resident = sum(s.bytes for s in timeline.trace.storages if s.category is Category.GRADIENT and s.alloc_at == -1)
    assert timeline.peak_bytes - (timeline.start_bytes - resident) == truth.peak_bytes


def test_an_output_that_is_let_go_lowers_the_peak() -> None:
    def peak(**options: Any) -> int:
        model = nn.Linear(64, 4096)
        labels = torch.zeros(256, dtype=torch.int64)
        loss = lambda output, _: nn.functional.cross_entropy(output, labels)  # noqa: E731
        return Timeline.of(captured(Step(model, torch.randn(256, 64), loss=loss, **options))).peak_bytes

    assert peak() - peak(keep_output=False) == 256 * 4096 * 4


def test_batches_that_are_fetched_ahead_are_resident() -> None:
    def peak(**options: Any) -> int:
        batch = (torch.randn(256, 64), torch.zeros(256, dtype=torch.int64))
        model = type("Pair", (nn.Linear,), {"forward": lambda m, x, y: nn.Linear.forward(m, x).mean() + y.sum()})(64, 8)
        return Timeline.of(captured(Step(model, batch, **options))).peak_bytes

    assert peak(resident_batches=4) - peak() == 3 * (256 * 64 * 4 + 256 * 8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"zero_grad": "between"}, "'before_backward'"),
        ({"zero_grad": None}, "Step.zero_grad is None"),
        ({"keep_output": "no"}, "Step.keep_output is 'no'"),
        ({"set_to_none": 1}, "Step.set_to_none is 1"),
        ({"resident_batches": 0}, "Step.resident_batches is 0"),
        ({"resident_batches": True}, "Step.resident_batches is True"),
    ],
)
def test_options_of_the_loop_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Step(stack(), torch.randn(8, 64), **options)


def test_optimizers_out_of_sight_are_found() -> None:
    model, batch = stack(), torch.randn(8, 64)
    optimizers = [torch.optim.AdamW(model.parameters())]

    def train() -> None:
        model(batch).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    trace = captured(train)
    assert total(trace, Category.OPTIMIZER_STATE) > 2 * total(trace, Category.PARAMETER)
    assert optimizers[0].state == {}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_lists_of_parameters_follow_the_capture() -> None:
    model, batch = stack(), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())

    def train() -> None:
        penalty = sum(parameter.pow(2).sum() for parameter in parameters)
        (model(batch).mean() + 0.1 * penalty).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    trace = assert_exact(train)
    assert any("linalg_vector_norm" in op.name for op in trace.ops)


def test_models_behind_helper_functions_are_found() -> None:
    model, batch = stack(), torch.randn(8, 64)

    def compute_loss() -> torch.Tensor:
        return model(batch).mean()

    def train() -> None:
        compute_loss().backward()
        model.zero_grad()

    assert any(op.name == "aten.addmm.default" for op in captured(train).ops)


def test_optimizer_that_has_stepped_keeps_its_state_on_the_device() -> None:
    model, batch = stack(), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, batch, loss=lambda o, _: o.mean(), optimizer=optimizer)
    fresh = captured(step, GPU)
    step.execute(model, optimizer, "cpu")
    stepped = captured(step, GPU)
    assert total(stepped, Category.OPTIMIZER_STATE) == total(fresh, Category.OPTIMIZER_STATE) > 0
    assert Timeline.of(stepped).peak_bytes == Timeline.of(fresh).peak_bytes


def test_lbfgs_is_refused() -> None:
    step = Step(stack(), torch.randn(8, 64), loss=lambda o, _: o.mean(), optimizer=torch.optim.LBFGS)
    with pytest.raises(InputError, match="LBFGS"):
        memfit.trace(step, target="cpu")


def test_gradient_penalty_is_backward() -> None:
    model, batch = stack(), torch.randn(8, 64)

    def train() -> None:
        x = batch.clone().requires_grad_()
        output = model(x).sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        (output + gradient.pow(2).sum()).backward()
        model.zero_grad()

    trace = captured(train)
    derivative = next(op for op in trace.ops if op.name == "aten.tanh_backward.default")
    assert derivative.phase is Phase.BACKWARD
    assert trace.ops[derivative.forward_op].name == "aten.tanh.default"


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("kind", ["closure", "dataclass"])
def test_batches_count_as_input_on_the_device(kind: str) -> None:
    model, x = stack(), torch.randn(2048, 64)

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: Batch) -> torch.Tensor:
            return self.inner(batch.x).mean() + batch.y.sum()

    def train() -> None:
        model(x).mean().backward()
        model.zero_grad()

    step = train if kind == "closure" else Step(Takes(), Batch(x, torch.zeros(4)))
    trace = captured(step, GPU)
    assert total(trace, Category.INPUT) >= x.numel() * 4


def test_a_slice_of_a_data_set_counts_only_itself_on_the_device() -> None:
    data = torch.randn(100_000, 64)
    trace = captured(Step(stack(), data[:2048], loss=lambda o, _: o.mean()), GPU)
    assert total(trace, Category.INPUT) == 2048 * 64 * 4


def test_a_frozen_teacher_in_the_loss_is_resident_on_the_device() -> None:
    teacher = stack().requires_grad_(False)
    model = stack()

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        return nn.functional.mse_loss(output, wanted)

    trace = captured(Step(model, torch.randn(8, 64), loss=loss), GPU)
    assert total(trace, Category.PARAMETER) == 2 * 4 * sum(p.numel() for p in model.parameters())
    assert any("host memory" in note for note in trace.notes)


def test_there_and_back_to_the_host_is_a_copy_each_way() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            away = self.first(x).cpu()
            assert away.device.type == "cpu"
            return self.second(away.to("cuda")).mean()

    trace = captured(Step(Model(), torch.randn(8, 64)), GPU)
    back = [op for op in trace.ops if op.name == "aten._to_copy.default" and op.phase is Phase.FORWARD]
    assert [op.inputs[0].storage != -1 for op in back] == [True, False]
    assert all(ref.storage != -1 for op in trace.ops if op.name == "aten.addmm.default" for ref in op.inputs)


def test_what_a_forward_leaves_on_its_module_is_taken_back() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.average = torch.zeros(64)
            self.history: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            self.history.append(y.shape)
            self.fresh = y
            return y.mean()

    model = Remembers()
    captured(Step(model, torch.randn(8, 64)))
    assert model.history == [] and not hasattr(model, "fresh")
    assert torch.equal(model.average, torch.zeros(64))
    model(torch.randn(8, 64))


def test_schedulers_and_scalers_are_left_as_found() -> None:
    model, batch = stack(), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")

    def train() -> None:
        scaler.scale(model(batch).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = captured(train)
        assert any(op.phase is Phase.OPTIMIZER and op.mutates for op in trace.ops)
        assert scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 1.0
        train()
        train()
    assert scheduler.last_epoch == 2


def test_generators_of_python_and_numpy_are_left_as_found() -> None:
    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean() * (random.random() + np.random.rand())

    random.seed(0), np.random.seed(0)
    expected = random.random(), np.random.rand()
    random.seed(0), np.random.seed(0)
    captured(Step(Draws(64, 4), torch.randn(8, 64)))
    assert (random.random(), np.random.rand()) == expected


def test_the_surroundings_do_not_matter() -> None:
    step = Step(stack(), torch.randn(8, 64), loss=lambda o, _: o.mean())
    plain = captured(step).fingerprint
    with torch.no_grad():
        assert captured(step).fingerprint == plain
    with torch.inference_mode():
        assert captured(step).fingerprint == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert captured(step).fingerprint == plain
        assert torch.is_autocast_enabled("cpu")


def test_captures_in_threads_neither_mix_nor_leave_anything_behind() -> None:
    call, backward = nn.Module.__call__, torch.autograd.backward
    prints: list[str] = []

    def work() -> None:
        for _ in range(3):
            prints.append(captured(Step(stack(), torch.randn(8, 64), loss=lambda o, _: o.mean())).fingerprint)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prints) == 9 and len(set(prints)) == 1
    assert nn.Module.__call__ is call and torch.autograd.backward is backward


def test_logging_the_loss_is_answered_with_a_note() -> None:
    model, batch = stack(), torch.randn(8, 64)
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()  # a list would be put back as it was

    def train() -> None:
        loss = model(batch).mean()
        if not torch.isfinite(loss):
            raise RuntimeError("diverged")
        loss.backward()
        seen.put(f"{loss.item():.3f}")
        model.zero_grad()

    trace = captured(train)
    assert [seen.get() for _ in range(seen.qsize())] == ["1.000"]
    assert any("test_loops.py" in note and "1.0" in note for note in trace.notes)


def test_the_users_own_exception_stays_his() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(RuntimeError):
                super().forward(torch.ones(4, 9))
            raise ValueError("mine")

    with pytest.raises(CaptureError, match="ValueError: mine") as caught:
        memfit.trace(Step(Model(64, 4), torch.randn(8, 64)), target="cpu")
    assert caught.value.op == "" and type(caught.value.__cause__) is ValueError


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.Embedding(16, 4, sparse=True), torch.zeros(4, dtype=torch.int64), "sparse"),
        (
            nn.Sequential(
                nn.Linear(4, 4), type("Lists", (nn.Module,), {"forward": lambda s, x: x * sum(x.flatten().tolist())})()
            ),
            torch.randn(2, 4),
            "values",
        ),
    ],
    ids=["sparse gradients", "tolist"],
)
def test_what_cannot_be_captured_says_why(model: nn.Module, batch: torch.Tensor, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        memfit.trace(Step(model, batch, loss=lambda o, _: o.sum()), target="cpu")


def test_packed_sequences_say_what_to_do() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
            return self.lstm(packed)[0].data.mean()

    for target in ("cpu", GPU):
        with pytest.raises(CaptureError, match="padded sequence"):
            memfit.trace(Step(Packs(), torch.randn(2, 5, 8)), target=target)


def test_steps_that_ask_for_the_gpu_find_one() -> None:
    model, batch = stack(), torch.randn(2048, 64)
    device_seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    def train() -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        device_seen.put(device)
        model(batch.to(device)).mean().backward()
        torch.cuda.synchronize()
        model.zero_grad()

    trace = captured(train, GPU)
    assert [device_seen.get() for _ in range(device_seen.qsize())] == ["cuda"]
    assert any(op.name == "aten._to_copy.default" for op in trace.ops)
    assert not torch.cuda.is_available()


def test_matrix_functions_are_measured_on_cpu() -> None:
    torch.manual_seed(0)  # what matrix_exp allocates depends on the norm of the matrix; the capture has a note for it
    model = nn.utils.parametrizations.orthogonal(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(model, torch.randn(4, 32), loss=lambda o, _: o.mean(), optimizer=optimizer)
    step.execute(model, optimizer, "cpu")
    with measured() as truth:
        step.execute(model, optimizer, "cpu")
    timeline = Timeline.of(captured(step))
    assert timeline.peak_bytes - timeline.start_bytes == pytest.approx(truth.peak_bytes, rel=0.01)


def test_module_state_survives_a_deep_copy_comparison() -> None:
    model = stack()
    before = copy.deepcopy(vars(model[0]))
    captured(Step(model, torch.randn(8, 64), loss=lambda o, _: o.mean()))
    after = vars(model[0])
    assert before.keys() == after.keys()


def test_offload_through_hooks_lowers_the_peak_on_the_device() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    timelines = [
        Timeline.of(captured(Step(stack(depth=12), memfit.spec((4096, 64)), run=run), GPU)) for run in (plain, train)
    ]
    peaks = [each.peak_bytes - each.peak_by_category[Category.WORKSPACE] for each in timelines]
    assert peaks[1] < 0.6 * peaks[0]


def test_moves_in_hooks_are_no_copies_on_cpu() -> None:
    model, batch = stack(), torch.randn(256, 64)

    def train() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t):
            loss = model(batch).mean()
        loss.backward()
        model.zero_grad()

    assert_exact(train)


def test_a_queue_that_is_replaced_dies() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.memory = torch.zeros(4096, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.memory = torch.cat([self.memory[len(x) :], y.detach()])
            return y.mean()

    model = Queue()
    trace = captured(Step(model, torch.randn(8, 64), optimizer=None))
    queues = [storage for storage in trace.storages if storage.bytes == 4096 * 64 * 4]
    assert [storage.alloc_at for storage in queues] == [-1, queues[1].alloc_at]
    assert queues[0].free_after == queues[1].alloc_at, "the old queue dies when the new one takes its place"
    assert torch.equal(model.memory, torch.zeros(4096, 64))


MODULE_LEVEL = nn.Linear(64, 64)


def test_models_in_nested_code_are_found() -> None:
    def train() -> None:
        sum([MODULE_LEVEL(torch.ones(2, 64)).mean() for _ in range(2)]).backward()
        MODULE_LEVEL.zero_grad()

    assert sum(op.name == "aten.addmm.default" for op in captured(train).ops) == 2


def test_a_guard_against_divergence_lets_the_step_go_on() -> None:
    model, batch = stack(), torch.randn(8, 64)

    def train() -> None:
        loss = model(batch).mean()
        if not np.isfinite(loss.item()):
            raise SystemExit(1)
        loss.backward()
        model.zero_grad()

    assert any(op.phase is Phase.BACKWARD for op in captured(train).ops)


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_counters_of_fused_and_capturable_optimizers_are_on_the_device(option: str) -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, torch.randn(8, 64), loss=lambda o, _: o.mean(), optimizer=optimizer)
    step.execute(model, optimizer, "cpu")
    optimizer.param_groups[0][option] = True
    trace = captured(step, GPU)
    assert all(len(parameter.state) == 3 for parameter in trace.parameters)


def test_checkpoint_under_autocast_recomputes_in_the_same_dtype() -> None:
    from torch.utils.checkpoint import checkpoint

    model, batch = stack(), torch.randn(8, 64)

    def train() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = checkpoint(model, batch.cuda(), use_reentrant=False).float().mean()
        loss.backward()
        model.zero_grad()

    trace = captured(train, GPU)
    assert {op.inputs[1].dtype for op in trace.ops if op.name == "aten.addmm.default"} == {"bfloat16"}


def test_known_masks_select_known_positions() -> None:
    class Selects(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[torch.tensor([True, False] * 4)].mean()

    for target in ("cpu", GPU):
        trace = captured(Step(Selects(64, 8), torch.randn(8, 64)), target)
        selected = next(op for op in trace.ops if op.name == "aten.index.Tensor")
        assert selected.outputs[0].shape == (4, 8)


def test_pinned_batches_are_moved_to_the_device() -> None:
    model, batch = stack(), torch.randn(8, 64)

    def train() -> None:
        model(batch.pin_memory().to("cuda", non_blocking=True)).mean().backward()
        model.zero_grad()

    assert any(op.name == "aten._to_copy.default" for op in captured(train, GPU).ops)


def test_modules_made_in_the_step_are_refused() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.LayerNorm(64)(self.inner(x)).mean()

    with pytest.raises(CaptureError, match="before the step"):
        memfit.trace(Step(Makes(), torch.randn(8, 64)), target="cpu")
