"""Autocast's lists against the dispatcher, and a model under autocast derived by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.capture.autocast import policies
from memfit.capture.capture import trace
from memfit.capture.step import Step, spec
from memfit.capture.trace_types import Category
from tests.capture.cuda_helpers import H100, made_bytes, names, only

REFUSED = {"binary_cross_entropy"}
"""Registered only to raise an error (ATen/autocast_mode.cpp)."""

INTERNAL = {"_cudnn_rnn", "miopen_rnn"}
"""Cast by rules of their own (ATen/native/cudnn/AutocastRNN.cpp)."""


def registered(key: str) -> set[str]:
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            found.add(name.removeprefix("aten::").split(".")[0])
    return found


@pytest.mark.parametrize(("device", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_the_lists_are_those_that_torch_has_registered(device: str, key: str) -> None:
    assert set(policies(device)) == registered(key) - (REFUSED if device == "cuda" else set()) - INTERNAL


class Small(nn.Module):
    """Linear, layer norm, linear, softmax, linear: what autocast treats in three ways."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(8, 16)
            self.norm = nn.LayerNorm(16)
            self.second = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        hidden = F.softmax(self.second(hidden), -1)
        return F.cross_entropy(self.head(hidden), target)


STEP = Step(Small(), (spec((2, 8)), spec((2,), torch.long)), optimizer=None, autocast=torch.bfloat16)

# op and the bytes it makes; C++ converts the arguments of an op from the last to the first
FORWARD = [
    ("_to_copy", [16 * 2]),  # first.bias
    ("_to_copy", [8 * 16 * 2]),  # first.weight
    ("_to_copy", [2 * 8 * 2]),  # x
    ("addmm", [2 * 16 * 2]),
    ("_to_copy", [2 * 16 * 4]),  # layer_norm is on the float32 list
    ("native_layer_norm", [2 * 16 * 4, 2 * 4, 2 * 4]),
    ("_to_copy", [16 * 2]),
    ("_to_copy", [16 * 16 * 2]),
    ("_to_copy", [2 * 16 * 2]),
    ("addmm", [2 * 16 * 2]),
    ("_to_copy", [2 * 16 * 4]),  # softmax is given dtype=float32, and only float16 fuses
    ("_softmax", [2 * 16 * 4]),
    ("_to_copy", [4 * 2]),
    ("_to_copy", [4 * 16 * 2]),
    ("_to_copy", [2 * 16 * 2]),
    ("addmm", [2 * 4 * 2]),
    ("_log_softmax", [2 * 4 * 2]),  # cross_entropy_loss gives log_softmax its dtype
    ("_to_copy", [2 * 4 * 4]),  # nll_loss is on the float32 list
    ("nll_loss_forward", [4, 4]),
]


def test_forward_under_autocast_is_what_the_lists_say() -> None:
    result = trace(STEP, target=H100)
    found = [
        (op.name.removeprefix("aten.").removesuffix(".default"), made_bytes(result, op))
        for op in result.ops
        if op.phase.value == "forward" and not op.view
    ]
    assert found == FORWARD


def test_backward_under_autocast_returns_float32_gradients() -> None:
    result = trace(STEP, target=H100)
    work = names(result, "backward")
    # the loss's float32 copy, softmax's, three inputs of linears but the batch, layer norm's, and six
    # parameters
    assert work.count("_to_copy") == 1 + 1 + 2 + 1 + 6
    assert [name for name in work if name not in ("_to_copy", "ones_like")] == [
        "nll_loss_backward",
        "_log_softmax_backward_data",
        "mm",
        "mm",
        "sum.dim_IntList",
        "_softmax_backward_data",
        "mm",
        "mm",
        "sum.dim_IntList",
        "native_layer_norm_backward",
        "mm",
        "sum.dim_IntList",
    ]
    gradients = [s.bytes for s in result.storages if s.category is Category.GRADIENT]
    assert sorted(gradients) == sorted(s.bytes for s in result.storages if s.category is Category.PARAMETER)


def test_a_weight_used_twice_is_cast_once() -> None:
    """ATen/autocast_mode.cpp, `cached_cast`: leaves that need gradients, until the outermost region ends."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight @ self.weight).sum()

    result = trace(Step(Twice(), spec((2, 8)), optimizer=None, autocast=torch.bfloat16), target=H100)
    casts = [op for op in result.ops if op.name == "aten._to_copy.default" and op.phase.value == "forward"]
    cast = [op for op in casts if op.inputs[0].shape == (8, 8)]
    assert len(cast) == 1
    copy = result.storages[cast[0].outputs[0].storage]
    assert copy.bytes == 8 * 8 * 2
    assert copy.free_after > max(i for i, op in enumerate(result.ops) if op.phase.value == "forward")
    assert only(result, "sum.default").outputs[0].dtype == "float32"
