"""What a trace records of a step."""

from __future__ import annotations

import math
import queue

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Phase, Step, check_trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Twice(nn.Module):
    """One block used under two names, and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.alias = self.block
        self.repeated = Block()
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        for _ in range(2):
            x = self.repeated(x)
        return self.head(x).mean()


def traced(model: nn.Module, batch: object, **options: object) -> memfit.Trace:
    trace = memfit.trace(Step(model, batch, **options), target="cpu")
    check_trace(trace)
    return trace


def test_calls_tell_repeated_and_shared_modules_apart() -> None:
    trace = traced(Twice(), torch.randn(4, 8))
    forward = [(call.module, call.index) for call in trace.calls if call.kind == "Block"]
    assert forward == [("block", 0), ("repeated", 0), ("repeated", 1)]
    first, second = (call for call in trace.calls if call.module == "repeated")
    assert first.end <= second.begin
    assert second.backward_begin < first.backward_begin, "the later call is differentiated first"
    assert second.backward_end <= first.backward_begin


def test_phases_follow_one_another() -> None:
    trace = traced(Block(), torch.randn(4, 8), loss=lambda output, _: output.pow(2).mean())
    order = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER]
    seen = [order.index(op.phase) for op in trace.ops]
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2, 3}


def test_backward_ops_know_their_forward_op_and_module() -> None:
    trace = traced(Block(), torch.randn(4, 8), loss=lambda output, _: output.sum())
    derivative = next(op for op in trace.ops if op.name == "aten.tanh_backward.default")
    assert trace.ops[derivative.forward_op].name == "aten.tanh.default"
    products = [op for op in trace.ops if op.phase is Phase.BACKWARD and op.name == "aten.mm.default"]
    assert {trace.calls[op.call].module for op in products} == {"first", "second"}


def test_source_lines_are_the_users() -> None:
    trace = traced(Block(), torch.randn(4, 8), loss=lambda output, _: output.sum())
    tanh = next(i for i, op in enumerate(trace.ops) if op.name == "aten.tanh.default")
    derivative = next(i for i, op in enumerate(trace.ops) if op.name == "aten.tanh_backward.default")
    assert "test_capture.py" in trace.source_of(tanh)
    assert trace.source_of(derivative) == trace.source_of(tanh)


@pytest.mark.parametrize("name", ["<stdin>", "<python-input-0>", "<ipython-input-3-0a1b2c>"])
def test_what_was_typed_at_a_prompt_is_the_users(name: str) -> None:
    typed: dict = {"nn": nn}
    code = "class Typed(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
    exec(compile(code, name, "exec"), typed)
    found = memfit.trace(memfit.Step(typed["Typed"](4, 4), torch.zeros(2, 4), loss=lambda y, _: y.sum()), target="cpu")
    assert f"{name}:3 forward" in found.sources


def test_categories_of_a_linear_layer() -> None:
    trace = traced(nn.Linear(8, 4), torch.randn(2, 8), loss=lambda output, _: output.sum())
    total = dict.fromkeys(Category, 0)
    for storage in trace.storages:
        total[storage.category] += storage.bytes
    parameters = 4 * (8 * 4 + 4)
    assert total[Category.PARAMETER] == parameters
    assert total[Category.GRADIENT] == parameters
    assert total[Category.OPTIMIZER_STATE] == 2 * parameters + 2 * 4, "two moments and a counter for each parameter"
    assert total[Category.INPUT] == 4 * 2 * 8
    assert all(
        storage.alloc_at == BEFORE_STEP for storage in trace.storages if storage.category is Category.OPTIMIZER_STATE
    )


def test_what_autograd_saves_is_marked() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    trace = traced(model, torch.randn(2, 8), loss=lambda output, _: output.sum())
    forward = [op for op in trace.ops if op.phase is Phase.FORWARD]
    saved = {op.name: op.saved for op in forward if not op.view}
    assert saved["aten.sigmoid.default"]
    assert not saved["aten.addmm.default"], "sigmoid needs its own result, not its input"
    sigmoid = next(op for op in forward if op.name == "aten.sigmoid.default")
    holders = trace.storages[sigmoid.outputs[0].storage].saved_by
    assert {trace.ops[op].name for op in holders} == {"aten.sigmoid.default", "aten.addmm.default"}


def test_flags_of_views_in_place_and_random_ops() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            return F.dropout(y.view(2, -1).add_(1.0), 0.5).sum()

    trace = traced(Model(), torch.randn(2, 4))
    ops = {op.name: op for op in trace.ops if op.phase is Phase.FORWARD}
    assert ops["aten.view.default"].view and not ops["aten.mul.Tensor"].view
    in_place = ops["aten.add_.Tensor"]
    assert in_place.mutates == (ops["aten.view.default"].outputs[0].storage,)
    assert trace.ops[in_place.mutated_op].name == "aten.view.default"
    assert ops["aten.bernoulli_.float"].random and not ops["aten.view.default"].random


def test_flops_count_multiply_and_add() -> None:
    trace = traced(nn.Linear(8, 4), torch.randn(2, 8), loss=lambda output, _: output.sum())
    product = next(op for op in trace.ops if op.name == "aten.addmm.default")
    assert product.flops == 2 * 2 * 8 * 4
    assert product.read_bytes == 4 * (4 + 2 * 8 + 8 * 4)
    assert product.written_bytes == 4 * 2 * 4


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x)).mean()

    trace = traced(Tied(), torch.randint(0, 16, (2, 4)))
    assert [parameter.names for parameter in trace.parameters] == [("embedding.weight", "head.weight")]


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    trace = traced(model, torch.randn(2, 8), loss=lambda output, _: output.sum())
    by_name = {parameter.names[0]: parameter for parameter in trace.parameters}
    assert by_name["0.weight"].gradient == NO_INDEX and by_name["0.weight"].state == ()
    assert by_name["1.weight"].gradient != NO_INDEX and len(by_name["1.weight"].state) == 3


def test_accumulation_repeats_forward_and_backward() -> None:
    one = traced(Block(), torch.randn(4, 8), loss=lambda output, _: output.sum())
    three = traced(Block(), torch.randn(4, 8), loss=lambda output, _: output.sum(), accumulation_steps=3)
    assert sum(call.kind == "Block" for call in three.calls) == 3
    gradients = [storage for storage in three.storages if storage.category is Category.GRADIENT]
    assert len(gradients) == len([s for s in one.storages if s.category is Category.GRADIENT])


def test_clipping_is_captured() -> None:
    trace = traced(Block(), torch.randn(4, 8), loss=lambda output, _: output.sum(), clip_grad_norm=1.0)
    assert any(op.name.startswith("aten.linalg_vector_norm") for op in trace.ops if op.phase is Phase.OPTIMIZER)


def test_gradients_may_outlive_the_step() -> None:
    options = {"loss": lambda output, _: output.sum(), "optimizer": None}
    kept = traced(nn.Linear(4, 4), torch.randn(2, 4), zero_grad=False, **options)
    assert all(s.free_after == AFTER_STEP for s in kept.storages if s.category is Category.GRADIENT)
    freed = traced(nn.Linear(4, 4), torch.randn(2, 4), **options)
    assert all(s.free_after != AFTER_STEP for s in freed.storages if s.category is Category.GRADIENT)


def test_recomputation_of_a_checkpointed_block_is_in_backward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False).sum()

    trace = traced(Model(), torch.randn(4, 8))
    phases = [call.phase for call in trace.calls if call.module == "block"]
    assert phases == [Phase.FORWARD, Phase.BACKWARD]
    tanh = [op.phase for op in trace.ops if op.name == "aten.tanh.default"]
    assert tanh == [Phase.FORWARD, Phase.BACKWARD]


def test_custom_autograd_function_is_attributed() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.exp()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(x * self.weight).sum()

    trace = traced(Model(), torch.randn(2, 4))
    backward = [op for op in trace.ops if op.name == "aten.exp.default" and op.phase is Phase.BACKWARD]
    assert len(backward) == 1
    assert trace.ops[backward[0].forward_op].name == "aten.exp.default"


def test_compiled_models_are_captured_as_eager() -> None:
    plain = Block()
    eager = traced(plain, torch.randn(4, 8), loss=lambda output, _: output.sum())
    compiled = traced(torch.compile(plain, backend="eager"), torch.randn(4, 8), loss=lambda output, _: output.sum())
    assert any("compiled" in note for note in compiled.notes)
    assert [op.name for op in compiled.ops] == [op.name for op in eager.ops]


def test_factory_costs_nothing() -> None:
    terabyte = 1 << 20
    step = Step(
        lambda: nn.Linear(terabyte, terabyte, bias=False),
        memfit.spec((1, terabyte)),
        loss=lambda o, _: o.sum(),
    )
    trace = memfit.trace(step, target="h100-sxm")
    assert max(storage.bytes for storage in trace.storages) == 4 * terabyte * terabyte


def test_values_of_constants_and_real_batches_are_known() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            steps = int(torch.arange(3).sum().item())
            y = x * self.weight
            for _ in range(steps):
                y = y.tanh()
            return y.sum() if bool(mask.all()) else y.mean()

    for target in ("cpu", "h100-sxm"):
        batch = {"x": torch.randn(2, 4), "mask": torch.ones(2, dtype=torch.bool)}
        trace = memfit.trace(Step(Model(), batch), target=target)
        assert sum(op.name == "aten.tanh.default" for op in trace.ops) == 3
        assert any(op.name == "aten.sum.default" for op in trace.ops if op.phase is Phase.FORWARD)


def test_emulated_device_is_the_targets() -> None:
    seen: queue.SimpleQueue[tuple[object, ...]] = queue.SimpleQueue()  # a list would be put back as it was

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.put(
                (
                    x.device.type,
                    x.is_cuda,
                    self.weight.device.type,
                    torch.zeros(2, device=x.device).device.type,
                )
            )
            return (x * self.weight + torch.arange(4, device=x.device)).sum()

    memfit.trace(Step(Model(), torch.randn(2, 4)), target="cpu")
    memfit.trace(Step(Model(), torch.randn(2, 4)), target="h100-sxm")
    assert [seen.get() for _ in range(2)] == [("cpu", False, "cpu", "cpu"), ("cuda", True, "cuda", "cuda")]


def test_same_step_gives_the_same_fingerprint() -> None:
    def once(width: int) -> str:
        return traced(nn.Linear(8, width), torch.randn(2, 8), loss=lambda output, _: output.sum()).fingerprint

    assert once(4) == once(4)
    assert once(4) != once(5)


def test_engine_adds_gradients_in_place() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight
            return (y.sin() + y.cos() + y.exp()).sum()

    trace = traced(Fan(), torch.randn(8, 64))
    additions = [op.name for op in trace.ops if op.phase is Phase.BACKWARD and ".add" in op.name]
    assert additions == ["aten.add_.Tensor", "aten.add_.Tensor"]


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_every_allocation_has_a_size(target: str) -> None:
    trace = memfit.trace(Step(Twice(), torch.randn(4, 8)), target=target)
    check_trace(trace)
    for op in trace.ops:
        for ref in op.outputs:
            if ref.storage != NO_INDEX and ref.shape:
                itemsize = getattr(torch, ref.dtype).itemsize
                assert trace.storages[ref.storage].bytes >= itemsize * (math.prod(ref.shape) > 0)
