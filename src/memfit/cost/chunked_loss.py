"""A head and its loss in chunks (`F.linear_cross_entropy` with options): products, passes over logits, small kernels.

Counted in torch/nn/modules/linear_cross_entropy.py: each chunk's logits are written by a product, reduced, shifted,
exponentiated and summed, and with gradients scaled, converted and read by two more products.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memfit.capture import Op
from memfit.cost.products import Product

CHUNKED_LOSS = "_linear_cross_entropy_batch_chunked"
_CHUNK_PLACE = {CHUNKED_LOSS: 8, f"{CHUNKED_LOSS}_no_reduction": 6}
_LOSS_PASSES, _LOSS_KERNELS = 7, 10
"""Product, maximum, subtraction in place, exponential in place, sum; and what handles rows."""
_GRADIENT_PASSES, _GRADIENT_KERNELS = 10, 23
"""Also the scaling in place and the conversion."""
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """What one call does: `products` of the same size for each chunk, and the bytes and kernels beside them."""

    product: Product
    chunks: int
    products: int
    chunk_bytes: int
    passes: int
    kernels: int

    @classmethod
    def of(cls, op: Op) -> ChunkedLoss:
        """The work of an op, from its operands and its FLOPs."""
        (rows, depth), classes = op.inputs[0].shape, op.inputs[1].shape[0]
        args, _ = msgspec.json.decode(op.arguments)
        chunk = min(rows, args[_CHUNK_PLACE[op.name.split(".")[1]]])
        products = op.flops // max(1, 2 * rows * depth * classes)
        gradients = products > 1
        return cls(
            product=Product(1, chunk, classes, depth),
            chunks=-(-rows // chunk),
            products=products,
            chunk_bytes=chunk * classes * _LOGIT_BYTES,
            passes=_GRADIENT_PASSES if gradients else _LOSS_PASSES,
            kernels=_GRADIENT_KERNELS if gradients else _LOSS_KERNELS,
        )
