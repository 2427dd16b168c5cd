"""`flex_attention` as it runs without `torch.compile`: torch's own dense implementation, forward and backward.

Eager `flex_attention` hands a higher-order op to Dynamo with the "eager" backend, which then runs the dense functions
of `torch._higher_order_ops.flex_attention` and makes whole matrices of scores. The rule calls these functions itself,
so that their ops are recorded. The gradient of a `score_mod` is taken by `torch.func.vjp`, where Dynamo would trace it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.rules.base import RuleContext
from memfit.torch_private.kernels import flex_attention_backward, flex_attention_forward

_NOTE = (
    "flex_attention is captured as it runs without torch.compile: with whole matrices of scores. A compiled "
    "flex_attention takes far less; plan for F.scaled_dot_product_attention if yours is compiled"
)


class _Dense(torch.autograd.Function):
    """Runs the dense implementation and saves what torch's own autograd function saves."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sdpa_dense = flex_attention_forward()

        out, logsumexp, max_scores = sdpa_dense(
            query, key, value, call.score_mod, call.block_mask, call.scale, call.kernel_options
        )
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_scores)
        mask_tensors = [part for part in call.block_mask if isinstance(part, torch.Tensor)]
        ctx.save_for_backward(query, key, value, out, logsumexp, max_scores, *mask_tensors)
        return out, logsumexp, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        sdpa_dense_backward = flex_attention_backward()

        query, key, value, out, logsumexp, *_ = ctx.saved_tensors
        call: Any = ctx.call
        found = sdpa_dense_backward(
            *(query, key, value, out, logsumexp, grads[0], grads[1], call.score_mod, call.joint),
            block_mask=call.block_mask,
            scale=call.scale,
            kernel_options=call.kernel_options,
            score_mod_other_buffers=(),
            mask_mod_other_buffers=(),
        )
        return (*found[:3], None)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of the op is given beside its tensors."""

    score_mod: Callable[..., torch.Tensor]
    block_mask: tuple[Any, ...]
    scale: float
    kernel_options: dict[str, Any]

    def joint(self, score: torch.Tensor, *given: torch.Tensor) -> list[Any]:
        """Return the gradient of one score; `given` is its place in four numbers and the gradient of its result."""
        *place, grad = given
        pull = torch.func.vjp(lambda each: self.score_mod(each, *place), score)[1]
        return [*pull(grad), None, None, None, None]


def flex_attention(
    context: RuleContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *_: Any,
    **__: Any,
) -> Any:
    """Run the higher-order op as eager code does."""
    context.note(_NOTE)
    return _Dense.apply(query, key, value, _Call(score_mod, block_mask, scale, kernel_options))


flex_attention.emulated = True  # type: ignore[attr-defined]
FUNCTIONS = {"cpu": {"flex_attention": flex_attention}, "cuda": {"flex_attention": flex_attention}}
