"""The time of a head and its loss in chunks, beside that of the ops which it is made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memfit.cost.chunked_loss import CHUNKED_LOSS, ChunkedLoss
from memfit.cost.products import Product
from memfit.cost.roofline import kernel_ms
from memfit.hardware import load_device
from tests.capture.cuda_helpers import captured

options_of = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options", reason="since torch 2.13")
ROWS, WIDTH, CLASSES = 8192, 4096, 128_256


def head(options):
    def function(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(ROWS, dtype=torch.long, device="cuda")
        return F.linear_cross_entropy(values, weight, target, options=options)

    return captured(function, (ROWS, WIDTH), (CLASSES, WIDTH))


def test_a_chunked_head_takes_its_products_and_its_passes() -> None:
    device = load_device("h100-sxm")
    chunked, whole = head(options_of.LinearCrossEntropyOptions()), head(None)
    (op,) = [op for op in chunked.ops if CHUNKED_LOSS in op.name]
    work = ChunkedLoss.of(op)
    # ceil(8192 / ceil(128256 / 4096)) = 256 rows, halved
    assert (work.product, work.chunks, work.products) == (Product(1, 128, CLASSES, WIDTH), 64, 3)
    products_ms = sum(kernel_ms(each, device) for each in whole.ops if each.name == "aten.mm.default")
    whole_ms = sum(kernel_ms(each, device) for each in whole.ops)
    assert products_ms < kernel_ms(op, device) < 1.5 * whole_ms
