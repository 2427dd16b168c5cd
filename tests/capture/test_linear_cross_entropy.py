"""`F.linear_cross_entropy` in chunks: FLOPs, and buffers to the byte beside a real CPU and beside torch's source.

torch/nn/modules/linear_cross_entropy.py of torch 2.13.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memfit.capture.capture import trace
from memfit.capture.kernels import probe_workspace
from memfit.capture.rules import RuleContext, rules_for
from memfit.capture.step import Step, spec
from tests.capture.cuda_helpers import H100, captured

pytest.importorskip("torch.nn.modules.linear_cross_entropy", reason="since torch 2.13")  # defines the ops
options_of = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options", reason="since torch 2.13")
Options = options_of.LinearCrossEntropyOptions
BF16, FP32 = torch.bfloat16, torch.float32
NAME = "torch_nn._linear_cross_entropy_batch_chunked"


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(FP32, "compact"), (FP32, "balanced"), (BF16, "accurate"), (BF16, "balanced")],
    ids=["float32-compact", "float32-balanced", "accurate", "balanced"],
)
@pytest.mark.parametrize("reduced", [True, False], ids=["mean", "none"])
def test_the_cpu_allocates_what_the_rule_says(dtype, policy, bias, reduced) -> None:
    rows, width, classes, chunk = 100, 32, 300, 16
    shift = torch.zeros(classes, dtype=dtype) if bias else None
    tensors = torch.ones(rows, width, dtype=dtype), torch.ones(classes, width, dtype=dtype), torch.zeros(rows).long()
    if reduced:
        args = (*tensors, shift, None, "mean", -100, 0.0, chunk, policy, FP32, False, True, True, bias)
    else:
        args = (*tensors, shift, None, -100, chunk, policy, FP32)
    name = NAME if reduced else f"{NAME}_no_reduction"
    func = getattr(torch.ops.torch_nn, name.split(".")[1]).default
    context = RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())
    rule = rules_for("cpu").workspaces[f"{name}.default"]
    assert rule(context, func, args, {}, None) == probe_workspace(func, args, {})


ROWS, WIDTH, CLASSES = 1024, 256, 5000


def run(reduction: str):
    def function(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(ROWS, dtype=torch.long, device="cuda")
        return F.linear_cross_entropy(values, weight, target, options=Options(), reduction=reduction)

    return function


def test_cuda_holds_a_chunk_of_logits_and_two_in_16_bits() -> None:
    """`compact` on CUDA, `aspect_ratio:2`: ceil(1024 / ceil(5000 / 256)) = 52, 64, halved to 32 rows a chunk.

    Converted logits are kept by the local `input_grad_logits` until the next chunk has its own.
    """
    (op,) = [op for op in captured(run("mean"), (ROWS, WIDTH), (CLASSES, WIDTH)).ops if op.name.startswith(NAME)]
    chunk = 32
    logits = chunk * CLASSES * 4 + 2 * chunk * CLASSES * 2
    rows = 2 * chunk * 4 + chunk * WIDTH * 4  # `tmp`, the sums, and the input in float32
    all_rows = ROWS * (1 + 8 + 4)  # mask, target without ignored rows, weights
    assert op.workspace_bytes == logits + rows + all_rows
    assert op.flops == 3 * 2 * ROWS * WIDTH * CLASSES


def test_cuda_without_a_reduction_computes_gradients_in_the_backward() -> None:
    found = captured(run("none"), (ROWS, WIDTH), (CLASSES, WIDTH))
    (forward,) = [op for op in found.ops if op.name.startswith(NAME)]
    product = 2 * ROWS * WIDTH * CLASSES
    assert forward.flops == product
    assert sum(op.flops for op in found.ops if op.phase.value == "backward") == 3 * product


def test_gradients_may_be_made_by_factories() -> None:
    """A backward in Python may return a tensor that `torch.empty` made, however small."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values * 2

        @staticmethod
        def backward(ctx, grad):
            made = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            return torch.mul(grad, 2, out=made)

    found = captured(Doubled.apply, (8, 8))
    assert [op.name for op in found.ops if op.phase.value == "backward"].count("aten.mul.out") == 1


def test_only_what_needs_gradients_is_counted() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False, dtype=BF16, device="meta")

        def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.linear_cross_entropy(values, self.head.weight, target, options=Options())

    batch = (spec((ROWS, WIDTH), BF16), spec((ROWS,), torch.int64))
    found = trace(Step(Model(), batch, loss=lambda output, _: output, optimizer=None), target=H100)
    (op,) = [op for op in found.ops if op.name.startswith(NAME)]
    assert op.flops == 2 * 2 * ROWS * WIDTH * CLASSES
