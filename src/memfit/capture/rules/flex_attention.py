"""`flex_attention` without `torch.compile`, with whole matrices of scores, and compiled for CUDA, without them.

Eager `flex_attention` hands a higher-order op to Dynamo with the "eager" backend, which then runs the dense functions
of `torch._higher_order_ops.flex_attention` and makes whole matrices of scores. The rule calls these functions itself,
so that their ops are recorded. The gradient of a `score_mod` is taken by `torch.func.vjp`, where Dynamo would trace it.

Compiled, it is one Triton kernel in the forward and one in the backward, which make results and sums of rows but no
scores (torch/_inductor/kernel/flex/flex_attention.py). `memfit.flex_attention_kernel` and its backward are these.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.kernels import real_execution
from memfit.capture.rules.base import RuleContext, bytes_of
from memfit.torch_private.compiler import called_by_compiler
from memfit.torch_private.kernels import flex_attention_backward, flex_attention_forward

_NOTE = (
    "flex_attention is captured as it runs without torch.compile: with whole matrices of scores. A compiled one, "
    "torch.compile(flex_attention), takes far less"
)
_COMPILED_NOTE = "flex_attention is captured as torch.compile's Triton kernels, which make no scores"
_MASK_NOTE = "; what its mask leaves out could not be found out, and every block is counted"
_LIKE_COMPILED = ("memfit.capture.patches", "run_as_compiled")
_SAMPLED = 4
"""Of so many samples and heads the mask is looked at."""
_MOST_BLOCKS = 1 << 22


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
    """Run the higher-order op as eager code does, or its compiled kernels."""
    if context.device_type == "cuda" and (context.compiled or called_by_compiler(_LIKE_COMPILED)):
        density = block_density(query, key, block_mask)
        context.note(_COMPILED_NOTE + (_MASK_NOTE if density is None else ""))
        return _Compiled.apply(query, key, value, block_mask, 1.0 if density is None else density)
    context.note(_NOTE)
    return _Dense.apply(query, key, value, _Call(score_mod, block_mask, scale, kernel_options))


flex_attention.emulated = True  # type: ignore[attr-defined]


# -- compiled for CUDA ---------------------------------------------------------------------------------------


_library = torch.library.Library("memfit", "FRAGMENT")
for _name, _schema in {
    "flex_attention_kernel": "(Tensor query, Tensor key, Tensor value, float density) -> (Tensor, Tensor)",
    "flex_attention_kernel_backward": "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, float density) -> (Tensor, Tensor, Tensor)",
}.items():
    if not hasattr(torch.ops.memfit, _name):
        _library.define(_name + _schema)


def _laid_out(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor whose strides are in another's order (inductor's `infer_dense_strides`)."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=like.dtype, device="meta")


def _forward(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithms of row sums in float32."""
    query, _, value = args[:3]
    rows = query.shape[:3]
    out = _laid_out((*rows, value.size(-1)), query)
    return out, torch.empty(rows, dtype=torch.float32, device="meta")


def _gradients(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Those of keys and values by their own heads: the kernel sums over a group."""
    return tuple(_laid_out(tuple(each.shape), each) for each in args[1:4])


def _forward_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """The highest score of each row is made, too, and dropped."""
    return bytes_of(result[1])


def _backward_workspace(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """`delta`, a float32 for each row; keys and values of one sample have gradients of every sample first."""
    query, key, value, logsumexp = args[1], args[2], args[3], args[5]
    copies = query.size(0) if key.size(0) != query.size(0) else 0
    return bytes_of(logsumexp) + copies * (bytes_of(key) + bytes_of(value))


class _Compiled(torch.autograd.Function):
    """Saves what the compiled backward reads: of the statistics only the logarithms of row sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: tuple[Any, ...],
        density: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, logsumexp = torch.ops.memfit.flex_attention_kernel(query, key, value, density)
        ctx.density = density
        ctx.set_materialize_grads(False)
        mask_tensors = [part for part in block_mask if isinstance(part, torch.Tensor)]
        ctx.save_for_backward(query, key, value, out, logsumexp, *mask_tensors)
        nothing = logsumexp.new_empty(0)
        ctx.mark_non_differentiable(nothing)
        return out, logsumexp, nothing

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp, *_ = ctx.saved_tensors
        grad = grads[0] if grads[0] is not None else torch.zeros_like(out)
        found = torch.ops.memfit.flex_attention_kernel_backward(grad, query, key, value, out, logsumexp, ctx.density)
        return (*found, None, None)


def block_density(query: torch.Tensor, key: torch.Tensor, block_mask: tuple[Any, ...]) -> float | None:
    """Return which part of the blocks of scores the mask leaves to compute; None where it does not say.

    Of every block the corners, edges and middle are looked at: a mask that cuts finer than half a block is not seen.
    """
    rows, columns, mask = block_mask[-3], block_mask[-2], block_mask[-1]
    lengths = query.size(2), key.size(2)
    starts = [torch.arange(0, length, min(step, length)) for length, step in zip(lengths, (rows, columns), strict=True)]
    if len(starts[0]) * len(starts[1]) > _MOST_BLOCKS:
        return None
    try:
        with real_execution(), torch.no_grad():
            return _density(mask, query.shape[:2], lengths, (rows, columns), starts)
    except Exception:  # code of the user's, on positions where it may expect numbers, or tensors without values
        return None


def _density(mask: Any, samples: Any, lengths: Any, steps: Any, starts: list[torch.Tensor]) -> float:
    found = []
    batches, heads = (range(min(_SAMPLED, size)) for size in samples)
    places = [
        [(start + int(part * (min(step, length) - 1))).clamp(max=length - 1) for part in (0, 0.5, 1)]
        for start, step, length in zip(starts, steps, lengths, strict=True)
    ]
    for batch, head in itertools.product(batches, heads):
        kept = torch.zeros(len(starts[0]), len(starts[1]), dtype=torch.bool)
        for row, column in itertools.product(*places):
            kept |= mask(torch.tensor(batch), torch.tensor(head), row[:, None], column[None, :])
        found.append(float(kept.float().mean()))
    return sum(found) / len(found)


_OPS = ("memfit.flex_attention_kernel.default", "memfit.flex_attention_kernel_backward.default")
FUNCTIONS = {"cpu": {"flex_attention": flex_attention}, "cuda": {"flex_attention": flex_attention}}
KERNELS = {"cuda": dict(zip(_OPS, (_forward, _gradients), strict=True))}
WORKSPACES = {"cuda": dict(zip(_OPS, (_forward_workspace, _backward_workspace), strict=True))}
