"""How models are made tensor parallel: the built-in decoders, and transformers models by the plan they bring along."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from memfit.errors import InputError

if TYPE_CHECKING:
    from memfit.presets.models.llama import Llama, LlamaSizes
    from memfit.presets.pipeline import LlamaStage


def check_divisible(ranks: int, counts: dict[str, int]) -> None:
    """Refuse a number of ranks that does not divide all of these counts."""
    for what, count in counts.items():
        if count % ranks:
            raise InputError(f"tp {ranks}: {count} {what} cannot be divided by {ranks}")


# -- the built-in decoders, as torchtitan does it: sequence parallel between the products, the loss over the vocabulary


def parallelize_llama(sizes: LlamaSizes, length: int, model: Llama | LlamaStage, mesh: DeviceMesh) -> None:
    """Split heads, feed-forward and vocabulary; norms and sums work on a part of the tokens (sequence parallel)."""
    counts = {"key and value heads": sizes.key_value_heads, "heads": sizes.heads, "columns": sizes.feed_forward}
    counts |= {"words of the vocabulary": sizes.vocabulary, "tokens": length}
    check_divisible(mesh.size(), counts)
    normed = SequenceParallel(sequence_dim=2, use_local_output=True)  # of a rank's own heads
    layer: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    if sizes.query_key_norm:
        layer |= {"attention.query_norm": normed, "attention.key_norm": normed}
    for each in model.layers:
        parallelize_module(each, mesh, layer)
    whole: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1)),
    }
    here = {name: style for name, style in whole.items() if getattr(model, name) is not None}  # of a stage
    if here:
        parallelize_module(model, mesh, here)
    if sizes.tied and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight
    model.loss = ParallelCrossEntropy(mesh)


class ParallelCrossEntropy(nn.Module):
    """The mean loss in float32 of logits whose vocabulary is spread over the ranks of a mesh; -100 does not count.

    What `torch.distributed.tensor.parallel.loss_parallel` computes, which wants the whole backward inside of it.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _ParallelCrossEntropy.apply(logits.flatten(0, -2).float(), labels.flatten(), self.mesh)


class _ParallelCrossEntropy(torch.autograd.Function):
    """Three all-reduces of a number for each token: the largest logit, the sum of all, and that of the label."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        largest = _reduced(logits.amax(dim=-1, keepdim=True), "max", mesh)
        shifted = logits - largest
        total = _reduced(shifted.exp().sum(dim=-1, keepdim=True), "sum", mesh)
        place = labels - mesh.get_local_rank() * logits.shape[-1]
        elsewhere = (place < 0) | (place >= logits.shape[-1])
        place = place.masked_fill(elsewhere, 0).unsqueeze(-1)
        own = shifted.gather(-1, place).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        counted = labels != _IGNORED
        losses = (total.log() - _reduced(own, "sum", mesh)).squeeze(-1)
        number = counted.sum()
        ctx.save_for_backward(shifted.sub_(total.log()), place, elsewhere, counted, number)
        return losses.masked_fill(~counted, 0.0).sum() / number

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logarithms, place, elsewhere, counted, number = ctx.saved_tensors
        found = logarithms.exp()
        hit = torch.where(elsewhere, 0.0, -1.0).unsqueeze(-1)
        found.scatter_add_(-1, place, hit)
        return found.mul_((grads[0] * counted / number).unsqueeze(-1)), None, None


_IGNORED = -100


def _reduced(tensor: torch.Tensor, how: str, mesh: DeviceMesh) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_reduce(tensor, how, (mesh, 0)))


# -- transformers models, by the plan in their configuration ---------------------------------------------------------


class Replicated(ParallelStyle):
    """Runs a module on every rank alike, on what is not spread: its parameters become DTensors, as those of others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(_spread(each, mesh) for each in inputs)

        def returned(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, None, given, returned)


def _spread(value: Any, mesh: DeviceMesh) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False) if plain else value


def _style(name: str) -> ParallelStyle:
    """Return the style of PyTorch for one of `TRANSFORMERS_STYLES`."""
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel()
    if name == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    if name == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    assert name == "replicated_with_grad_allreduce", name
    return SequenceParallel(sequence_dim=2, use_local_output=True)  # a norm of heads: (batch, tokens, heads, size)


def parallelize_transformers(plan: dict[str, str], counts: dict[str, int], model: Any, mesh: DeviceMesh) -> None:
    """Make a transformers model tensor parallel as its plan says; what the plan leaves out runs on every rank alike."""
    check_divisible(mesh.size(), counts)
    tied = _is_tied(model)
    if tied is not None:
        plan = {**plan, tied: "embedding_rowwise"}
    for path, module in list(model.named_modules()):
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        named = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)
        parallelize_module(module, mesh, Replicated() if named is None else _style(named))
    if tied is not None:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _is_tied(model: Any) -> str | None:
    """Return the path of an embedding whose weight is that of the head too."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight is not embedding.weight:
        return None
    return next(path for path, module in model.named_modules() if module is embedding)
