"""Dtypes, divisors, hooks on gradients, and when optimizers run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import InputError
from memfit.sharded import Precision, Reduction, Schedule, shard
from memfit.sharded.fully_shard import get_runtime
from tests.distributed.sharded_behaviour import Trained, average, check_gradients, loss_of, tokens_of
from tests.distributed.sharded_models import GPT, VOCABULARY, Chain
from tests.distributed.sharded_parity import whole_gradients

BF16 = torch.bfloat16


class Looking(nn.Module):
    """A block that notes the dtypes of what it gets and has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.linear.weight.dtype))
        return self.linear(x.to(self.linear.weight.dtype)).float()


class Floats(nn.Module):
    """Takes floats, and makes its blocks' inputs floats again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Looking(), Looking()])
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        assert number.dtype == torch.int64
        for block in self.blocks:
            x = block(x)
        return x


def inputs_are_cast(where: str) -> None:
    """Inputs are cast for every unit, for the root, or not at all; integers never are."""
    torch.manual_seed(0)
    model = shard(Floats(), precision=Precision(param_dtype=BF16, cast_inputs=where))
    model(torch.randn(2, 16), number=torch.tensor(3)).sum().backward()
    root, inside = {
        "units": (BF16, [BF16, BF16]),
        "root": (BF16, [BF16, torch.float32]),
        "none": (torch.float32, [torch.float32, torch.float32]),
    }[where]
    assert model.seen == [root]
    assert [block.seen for block in model.blocks] == [[(each, BF16)] for each in inside]


def outputs_are_cast() -> None:
    """The root's output has its dtype, also from inside a checkpoint; gradients go through the cast."""
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = shard(GPT(), precision=Precision(param_dtype=BF16, output_dtype=torch.float32))
        if reentrant is None:
            output = model(tokens_of(0))
        else:
            anchor = torch.zeros((), requires_grad=True)
            output = torch.utils.checkpoint.checkpoint(
                lambda tokens, anchor, model=model: model(tokens) + anchor,
                tokens_of(0),
                anchor,
                use_reentrant=reentrant,
            )
        assert output.dtype == torch.float32
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def full_precision_in_eval() -> None:
    """In eval mode the parameters' own dtype is used, and training goes on in the other."""
    torch.manual_seed(0)
    plain = GPT()
    torch.manual_seed(0)
    model = shard(GPT(), precision=Precision(param_dtype=BF16, full_in_eval=True))
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            output = model(tokens_of(0))
            assert output.dtype == torch.float32 and torch.equal(output, plain(tokens_of(0)))
        model.train()
        output = model(tokens_of(0))
        assert output.dtype == BF16
        model.eval()  # between forward and backward, which is that of the forward
        output.float().sum().backward()
        model.zero_grad()


def low_precision_gradients_are_kept() -> None:
    """On request gradients stay in the dtype they were summed in, and accumulate in it."""
    torch.manual_seed(0)
    precision = Precision(param_dtype=BF16, reduce_dtype=BF16, keep_reduced_gradients=True)
    model = shard(GPT(), precision=precision)
    loss_of(model, 0).backward()
    first = whole_gradients(model)
    assert {gradient.dtype for gradient in first.values() if gradient is not None} == {BF16}
    loss_of(model, 0).backward()
    for name, gradient in whole_gradients(model).items():
        assert gradient is not None and gradient.dtype == BF16
        assert torch.equal(gradient, 2 * first[name])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def divisors_are_used() -> None:
    """Gradients are divided by what was given instead of the number of ranks."""
    torch.manual_seed(0)
    plain = GPT()
    loss_of(plain, 0).backward()
    average(plain)
    for divisor in (1, 3, 8.0):
        torch.manual_seed(0)
        model = shard(GPT(), reduction=Reduction(divisor=divisor))
        loss_of(model, 0).backward()
        for name, gradient in whole_gradients(model).items():
            wanted = plain.get_parameter(name).grad
            assert gradient is not None and wanted is not None
            torch.testing.assert_close(gradient * divisor, wanted * dist.get_world_size(), rtol=1e-5, atol=1e-7)


def compressed_gradients(dtype: torch.dtype) -> None:
    """Gradients that are sent in a small dtype are near those that are not, and the shards' are in their own."""
    ours, theirs = Trained(reduction=Reduction(compress=dtype)), Trained(plain=True)
    loss_of(ours.model, 0).backward()
    loss_of(theirs.model, 0).backward()
    average(theirs.model)
    found, wanted = whole_gradients(ours.model), whole_gradients(theirs.model)
    for name, gradient in found.items():
        assert gradient is not None and gradient.dtype == torch.float32
        assert torch.equal(gradient, gradient.to(dtype).float())
        torch.testing.assert_close(gradient, wanted[name], rtol=2e-2, atol=1e-3)
    assert not all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())


def float16_does_not_overflow() -> None:
    """The mean of large gradients is found in float16, though their sum could not be."""
    torch.manual_seed(0)
    model = shard(Chain(nn.Linear(16, 16), nn.Linear(16, 16)), reduction=Reduction(compress=torch.float16))
    output = model(tokens_of(0))
    output.backward(torch.full_like(output, 25_000.0 / (output.numel() / VOCABULARY)))
    bias = whole_gradients(model)["head.bias"]
    assert bias is not None and torch.finfo(torch.float16).max < 4 * 25_000
    torch.testing.assert_close(bias, torch.full_like(bias, 25_000.0), rtol=1e-2, atol=0)


def hooks_sum_gradients() -> None:
    """A hook gets each unit's whole gradients, flat, and its sum is used."""
    seen: list[int] = []

    def doubled(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        seen.append(whole.numel())
        dist.all_reduce(whole, group=group)
        return 2 * whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    ours, theirs = Trained(reduction=Reduction(hook=doubled)), Trained(plain=True)
    loss_of(ours.model, 0).backward()
    (2 * loss_of(theirs.model, 0)).backward()
    average(theirs.model)
    check_gradients(ours.model, theirs.model)
    units = get_runtime(ours.model).units
    assert sorted(seen) == sorted(flat.layout.elements for unit in units for flat in unit.flats)


def gradients_that_are_zeroed() -> None:
    """zero_grad(set_to_none=False) leaves zeros that the next pass adds to."""
    ours, theirs = Trained(), Trained(plain=True)
    for number in range(3):
        for trained in (ours, theirs):
            loss_of(trained.model, number).backward()
            trained.update(set_to_none=False)
    assert all(parameter.grad is not None for parameter in ours.model.parameters())
    ours.check_equals(theirs)


def optimizer_in_backward() -> None:
    """Optimizers that run as gradients come, and forget them, train as one that runs afterwards does."""
    ours, theirs = Trained(schedule=Schedule(backward_prefetch=2)), Trained(plain=True)
    order: list[nn.Parameter] = []
    for parameter in ours.model.parameters():
        own = torch.optim.AdamW([parameter], lr=1e-2, eps=1e-4)

        def run(done: Any, own: torch.optim.Optimizer = own) -> None:
            order.append(done)
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(run)
    for number in range(3):
        loss_of(ours.model, number).backward()
        assert all(parameter.grad is None for parameter in ours.model.parameters())
        theirs.step(number)
    assert len(order) == 3 * len(list(ours.model.parameters()))
    ours.check_equals(theirs)


def sparse_gradients_are_refused() -> None:
    """A sparse gradient is refused with what to write instead."""
    model = GPT()
    model.embedding = nn.Embedding(VOCABULARY, 32, sparse=True)
    shard(model)
    with pytest.raises(InputError, match=r"the gradient of 'embedding\.weight' is sparse.*sparse=False"):
        loss_of(model, 0).backward()


def gradients_of_inputs() -> None:
    """Inputs get their gradients, and gradients of inputs alone leave parameters without any."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    torch.manual_seed(0)
    ours = shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    x, y = torch.ones(2, 16, requires_grad=True), torch.ones(2, 16, requires_grad=True)
    assert torch.equal(torch.autograd.grad(ours(x).sum(), x)[0], torch.autograd.grad(plain(y).sum(), y)[0])
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours(x).sum().backward()
    plain(y).sum().backward()
    average(plain)
    assert torch.equal(x.grad, y.grad)
    check_gradients(ours, plain)
