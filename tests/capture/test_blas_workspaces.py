"""Two workspaces of cuBLAS in a training process, as torch's allocator counts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.capture import BEFORE_STEP, Category, Step, Trace, trace
from memfit.cost import Roofline, Runtime
from memfit.hardware import Target, load_device
from memfit.memory import Timeline, reserved
from memfit.memory.allocator import FREE
from memfit.memory.steady_state import ProcessEvents
from memfit.solve import Problem

MIB = 1 << 20
AMPERE = 4096 * 1024 * 2 + 16 * 1024 * 8  # `:4096:2:16:8`


def captured(target: str, model: nn.Module | None = None, **options: object) -> Trace:
    model = model or nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return trace(Step(model=model, batch=torch.empty(16, 64), loss=lambda out, _: out.sum(), **options), target=target)


def workspaces(found: Trace) -> list[tuple[str, int]]:
    return [(each.name, each.bytes) for each in found.storages if each.category is Category.WORKSPACE]


@pytest.mark.parametrize(("target", "size_bytes"), [("a100-sxm-80gb", AMPERE), ("h100-sxm", 32 * MIB)])
def test_a_training_process_has_one_for_the_forward_and_one_for_the_backward(target: str, size_bytes: int) -> None:
    found = captured(target)
    names = ("cuBLAS workspace of the forward's thread", "cuBLAS workspace of autograd's thread")
    assert workspaces(found) == [(name, size_bytes) for name in names]
    assert Timeline.of(found, 512).peak_by_category[Category.WORKSPACE] == 2 * size_bytes


def test_hipblaslt_has_its_own_beside_hipblas() -> None:
    sizes = [size_bytes for _, size_bytes in workspaces(captured("mi300x"))]
    assert sizes == [128 * MIB, 76 * MIB] * 2


def test_a_step_without_products_has_none() -> None:
    assert workspaces(captured("h100-sxm", nn.Sequential(nn.LayerNorm(64), nn.GELU()))) == []


def test_a_cpu_has_none() -> None:
    assert workspaces(captured("cpu")) == []


def test_only_the_forward_has_one_where_no_gradient_is_asked_for() -> None:
    model = nn.Linear(64, 64)

    def run() -> None:
        with torch.no_grad():
            model(torch.empty(16, 64))

    found = trace(Step(run=run, model=model), target="h100-sxm")
    assert [name for name, _ in workspaces(found)] == ["cuBLAS workspace of the forward's thread"]


def test_the_first_step_makes_them_at_its_first_products() -> None:
    found = captured("h100-sxm")
    table = Timeline.of(found, 512).allocations
    process = ProcessEvents(table)
    forward, autograd = (number for number, each in enumerate(found.storages) if each.category is Category.WORKSPACE)
    first, later = list(process.steps())[:2]
    products = [number for number, op in enumerate(found.ops) if op.name in ("aten.mm.default", "aten.addmm.default")]
    backward = next(number for number in products if found.ops[number].phase.value == "backward")
    made = {key: instant for instant, key, n_bytes in first if n_bytes != FREE and key in (forward, autograd)}
    assert made == {forward: products[0], autograd: backward}
    result = found.ops[products[0]].outputs[0].storage
    keys = [key for _, key, n_bytes in first if n_bytes != FREE]
    assert keys.index(forward) == keys.index(result) + 1
    assert not {forward, autograd} & {key for _, key, _ in later}


def test_a_recomputed_unit_runs_its_products_in_autograds_thread() -> None:
    """The backward of the last block begins with its recompute, so its first product is a recomputed one."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    found = captured("h100-sxm", blocks)
    target = Target.parse("h100-sxm")
    problem = Problem.of(Runtime.of(found, Roofline.of(target)), target)
    last = next(each for each in problem.candidates if each.unit.module == "2")
    timeline = problem.replay([(last.unit, last.policies[-1])])
    table = timeline.allocations
    autograd = max(number for number, each in enumerate(found.storages) if each.category is Category.WORKSPACE)
    instant = int(table.first_made_at[autograd])
    assert table.run[instant] == 0 and found.ops[int(table.op[instant])].phase.value == "forward"


def test_they_are_inside_what_the_allocator_has_allocated() -> None:
    device = load_device("h100-sxm")
    found = captured("h100-sxm")
    held = sum(each.bytes for each in found.storages if each.category is Category.WORKSPACE)
    assert reserved(found, device).peak_allocated_bytes >= held + sum(
        each.bytes for each in found.storages if each.alloc_at == BEFORE_STEP and each.category is Category.PARAMETER
    )
