"""Behaviours of PyTorch's FSDP tests about gradients, clipping, precision and freezing; each runs on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.sharded import (
    FlatDTensor,
    Precision,
    Reduction,
    Schedule,
    UnitOptions,
    get_runtime,
    no_sync,
    shard,
)
from tests.distributed.sharded_behaviour import Trained, average, check_gradients, loss_of, tokens_of
from tests.distributed.sharded_models import GPT, Chain
from tests.distributed.sharded_parity import check_equal, check_freed, whole_gradients, whole_parameters
from tests.distributed.sharded_ported_setup import behaviours, same_training, small
from tests.distributed.sharded_ported_steps import pair

BF16 = torch.bfloat16


def micro_batches_of_which_the_last_sends() -> None:
    """The calls of a pipeline's schedule: gradients are summed with the last of the micro-batches."""
    ours, theirs = pair()
    for micro in range(3):
        last = micro == 2
        ours.model.set_is_last_backward(last)
        ours.model.set_requires_gradient_sync(last)
        loss_of(ours.model, micro).backward()
        loss_of(theirs.model, micro).backward()
        if not last:
            assert all(each.grad is None for each in ours.model.parameters())
    average(theirs.model)
    check_gradients(ours.model, theirs.model)


def units_of_which_some_do_not_send() -> None:
    ours, theirs = pair()
    ours.model.blocks[0].set_requires_gradient_sync(False)
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
    assert all(each.grad is None for each in ours.model.blocks[0].parameters())
    assert all(each.grad is not None for each in ours.model.blocks[1].parameters())
    ours.model.blocks[0].set_requires_gradient_sync(True)
    for trained in (ours, theirs):
        loss_of(trained.model, 1).backward()
    average(theirs.model)
    check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)


def no_sync_in_between_and_interleaved() -> None:
    """Passes that are sent and passes that are not, in any order."""
    for pattern in ((True, False), (False, True, False), (True, True, False, False)):
        ours, theirs = pair()
        for number, quiet in enumerate(pattern):
            if quiet:
                with no_sync(ours.model):
                    loss_of(ours.model, number).backward()
            else:
                loss_of(ours.model, number).backward()
            loss_of(theirs.model, number).backward()
        average(theirs.model)
        check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)


def no_sync_in_mixed_precision_keeps_the_dtypes() -> None:
    model = shard(GPT(), precision=Precision(param_dtype=BF16, reduce_dtype=torch.float32))
    with no_sync(model):
        loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    assert (
        {each.grad.dtype for each in model.parameters()}
        == {torch.float32}
        == {each.dtype for each in model.parameters()}
    )


def no_sync_sends_nothing() -> None:
    ours = Trained()
    ours.step(0)
    sent: list[str] = []
    for link in get_runtime(ours.model).links:
        real = link.sum_parts
        link.__dict__["sum_parts"] = lambda *args, real=real: (sent.append(args[-1]), real(*args))[1]
    with no_sync(ours.model):
        loss_of(ours.model, 1).backward()
    assert not sent
    loss_of(ours.model, 1).backward()
    assert len(sent) == len(get_runtime(ours.model).units)


def clipping_a_part_of_the_model() -> None:
    ours, theirs = pair()
    norms = []
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
        if trained.plain:
            average(trained.model)
        norm = nn.utils.clip_grad_norm_(trained.model.blocks[1].parameters(), 0.1)
        norms.append(norm.full_tensor() if isinstance(norm, FlatDTensor) else norm)
        trained.optimizer.step()
    torch.testing.assert_close(torch.as_tensor(float(norms[0])), torch.as_tensor(float(norms[1])))
    check_equal("parameter", whole_parameters(ours.model), whole_parameters(theirs.model), exact=False)


def clipping_without_gradients_finds_zero() -> None:
    model = shard(small())
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    assert all(each.grad is None for each in model.parameters())


def clipping_gradients_of_low_precision() -> None:
    model = shard(GPT(), precision=Precision(param_dtype=BF16, reduce_dtype=BF16, keep_reduced_gradients=True))
    loss_of(model, 0).backward()
    wanted = torch.stack([each.float().norm() for each in whole_gradients(model).values()]).norm()  # type: ignore[union-attr]
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(float(found), float(wanted), rtol=2e-2, atol=1e-3)
    assert {each.grad.dtype for each in model.parameters()} == {BF16}
    after = torch.stack([each.float().norm() for each in whole_gradients(model).values()]).norm()  # type: ignore[union-attr]
    assert float(after) < 0.011


def clipping_gradients_of_two_dtypes() -> None:
    def build() -> nn.Sequential:
        model = small(0, 4, 4, 4)
        model[1].double()
        return model

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x).double())

    results = []
    for model in (shard(Casts()), Casts()):
        model(torch.ones(2, 4)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        results.append(float(norm))
        assert {each.grad.dtype for each in model.parameters()} == {torch.float32, torch.float64}
    torch.testing.assert_close(*results)


def clipping_by_value_is_elementwise() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
        if trained.plain:
            average(trained.model)
        nn.utils.clip_grad_value_(trained.model.parameters(), 1e-3)
    check_gradients(ours.model, theirs.model)


def the_total_norm_is_that_of_whole_gradients() -> None:
    for order in (1.0, 2.0, 3.0, float("inf")):
        ours, theirs = pair()
        norms = []
        for trained in (ours, theirs):
            loss_of(trained.model, 0).backward()
            if trained.plain:
                average(trained.model)
            norms.append(float(nn.utils.get_total_norm([each.grad for each in trained.model.parameters()], order)))
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)


@dataclass
class _Hidden:
    x: torch.Tensor
    count: int


class _Named(NamedTuple):
    hidden: _Hidden
    rest: tuple[torch.Tensor, ...]


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen: set[torch.dtype] = set()

    def forward(self, given: _Named, *, extra: dict[str, torch.Tensor]) -> _Named:
        self.seen |= {given.hidden.x.dtype, given.rest[0].dtype, extra["x"].dtype}
        x = self.linear(given.hidden.x + given.rest[0] + extra["x"])
        return _Named(_Hidden(x, given.hidden.count + 1), (x,))


def structured_inputs_are_cast_in_mixed_precision() -> None:
    class Model(Chain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            held = _Named(_Hidden(x, 0), (x.float(),))
            for block in self.blocks:
                held = block(held, extra={"x": held.hidden.x.float()})
            assert held.hidden.count == 2
            return self.head(held.hidden.x)

    model = shard(Model(_Structured(), _Structured()), precision=Precision(param_dtype=BF16))
    loss_of(model, 0).backward()
    assert all(block.seen == {BF16} for block in model.blocks)
    assert all(each.grad is not None for each in model.parameters())


def norms_run_in_low_precision() -> None:
    for dtype in (BF16, torch.float16):
        for norm in (nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)):
            model = shard(
                nn.Sequential(nn.Linear(8, 8), norm), precision=Precision(param_dtype=dtype, buffer_dtype=dtype)
            )
            output = model(torch.randn(4, 8))
            output.float().sum().backward()
            assert model[1].weight.grad.dtype == torch.float32


def inputs_get_gradients_in_their_own_dtype() -> None:
    model = shard(small(0, 4, 4), precision=Precision(param_dtype=BF16))
    x = torch.randn(2, 4, requires_grad=True)
    model(x).float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def mixed_precision_without_freeing_uses_the_newest_values() -> None:
    ours = Trained(precision=Precision(param_dtype=BF16), keep=True)
    plain = Trained(precision=Precision(param_dtype=BF16))
    for number in range(3):
        assert ours.step(number) == plain.step(number)
    ours.check_equals(plain)


def integer_inputs_are_never_cast() -> None:
    model = shard(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), precision=Precision(param_dtype=BF16))
    for dtype in (torch.int64, torch.int32):
        assert model(torch.ones(2, dtype=dtype)).dtype == BF16


def a_model_that_was_made_in_half_precision_trains() -> None:
    for dtype in (BF16, torch.float16):
        model = shard(GPT().to(dtype))
        loss_of(model, 0).backward()
        assert (
            {each.dtype for each in model.parameters()} == {dtype} == {each.grad.dtype for each in model.parameters()}
        )
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(each.full_tensor().isfinite().all() for each in model.parameters())


def an_average_of_weights_is_kept_beside_training() -> None:
    """An exponential average by elementwise ops on shards is that of whole parameters, and may be evaluated."""
    ours, theirs = pair()
    kept = [[each.detach().clone() for each in trained.model.parameters()] for trained in (ours, theirs)]
    for number in range(3):
        assert ours.step(number) == theirs.step(number)
        for trained, averages in zip((ours, theirs), kept, strict=True):
            torch._foreach_lerp_(averages, [each.detach() for each in trained.model.parameters()], 0.5)
    for trained, averages in zip((ours, theirs), kept, strict=True):
        with torch.no_grad():
            for parameter, average_ in zip(trained.model.parameters(), averages, strict=True):
                parameter.copy_(average_)
        trained.model.eval()
    with torch.no_grad():
        assert torch.equal(ours.model(tokens_of(9)), theirs.model(tokens_of(9)))


def reduce_hooks_get_the_group_of_shards() -> None:
    sizes: list[int] = []

    def hook(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sizes.append(dist.get_world_size(group))
        dist.all_reduce(whole, group=group)
        return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    ours, theirs = pair(reduction=Reduction(hook=hook))
    same_training(ours, theirs)
    assert set(sizes) == {dist.get_world_size()}


def a_hook_that_drops_gradients_is_obeyed() -> None:
    def hook(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.zeros_like(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    model = shard(small(), reduction=Reduction(hook=hook))
    model(torch.ones(2, 3)).sum().backward()
    assert all(not each.grad.full_tensor().any() for each in model.parameters())


def hooks_after_accumulation_run_in_frozen_models_too() -> None:
    model = small()
    model[0].requires_grad_(False)
    shard(model)
    ran: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    model(torch.ones(2, 3)).sum().backward()
    assert sorted(ran) == ["1.bias", "1.weight", "2.bias", "2.weight"]


def frozen_units_send_no_gradients() -> None:
    model = GPT()
    model.blocks[1].requires_grad_(False)
    shard(model)
    sent: list[str] = []
    link = get_runtime(model).links[0]
    real = link.sum_parts
    link.__dict__["sum_parts"] = lambda *args: (sent.append(args[-1]), real(*args))[1]
    loss_of(model, 0).backward()
    assert sent and not any("'blocks.1'" in each for each in sent)
    check_freed(model)


def units_whose_input_needs_no_gradient_are_freed() -> None:
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), units=["0", "1", "2"])
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    model(torch.ones(2, 4)).sum().backward()
    check_freed(model)
    assert model[0].weight.grad is None and model[1].weight.grad is not None


def a_frozen_model_gives_gradients_to_its_inputs() -> None:
    model, plain = small(), small()
    model.requires_grad_(False)
    shard(model)
    x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    model(x).sum().backward()
    plain(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    check_freed(model)


def tied_weights_of_odd_sizes_train_as_without() -> None:
    def build() -> nn.Module:
        model = Chain(nn.Linear(15, 15), nn.Linear(15, 15), width=15)
        model.head.weight = model.embedding.weight
        model.blocks[1].weight = model.blocks[0].weight
        return model

    ours, theirs = Trained(build), Trained(build, plain=True)
    same_training(ours, theirs)
    assert ours.model.head.weight is ours.model.embedding.weight


def evaluation_of_kept_units_frees_what_it_gathered() -> None:
    ours, theirs = pair(keep=True, schedule=Schedule(forward_prefetch=2))
    for _ in range(2):
        ours.model.eval()
        with torch.no_grad():
            assert torch.equal(ours.model(tokens_of(3)), theirs.model(tokens_of(3)))
        check_freed(ours.model)
        ours.model.train()
        assert ours.step(0) == theirs.step(0)


def a_backward_through_a_part_reaches_the_units_before_it() -> None:
    """`torch.autograd.grad` for the output of a block, then a backward from there."""
    ours, theirs = pair()
    for trained in (ours, theirs):
        held: list[torch.Tensor] = []
        handle = trained.model.blocks[0].register_forward_hook(lambda *given, held=held: held.append(given[-1]))
        loss = loss_of(trained.model, 0)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, held[0], retain_graph=True)
        held[0].backward(gradient)
        if trained.plain:
            average(trained.model)
    for name, gradient in whole_gradients(ours.model).items():
        wanted = theirs.model.get_parameter(name).grad
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted)


def a_step_without_a_backward_changes_nothing() -> None:
    ours = Trained()
    before = whole_parameters(ours.model)
    ours.optimizer.step()
    check_equal("parameter", whole_parameters(ours.model), before)


def every_pass_adds_to_the_gradients() -> None:
    ours = Trained()
    loss_of(ours.model, 0).backward()
    first = whole_gradients(ours.model)
    loss_of(ours.model, 0).backward()
    for name, gradient in whole_gradients(ours.model).items():
        assert gradient is not None and torch.equal(gradient, 2 * first[name])


def inputs_may_be_lists_dicts_and_keywords() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given: Any, *rest: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            x = given["x"] if isinstance(given, dict) else given[0]
            return self.linear(x + sum(rest) + sum(named.values()))

    model = shard(Takes())
    x = torch.ones(2, 4)
    for given in ({"x": x}, [x], (x, None)):
        model(given, x, x, other=x).sum().backward()
    assert model.linear.weight.grad is not None


def resharded_to_fewer_ranks_is_for_divisors_only() -> None:
    with pytest.raises(Exception, match="divisor of the"):
        shard(GPT(), units={"blocks.0": UnitOptions(reshard_ranks=3)})


def a_model_is_trained_again_after_an_evaluation_of_its_parts() -> None:
    ours, theirs = pair()
    x = torch.randn(2, 6, 32)
    for number in range(2):
        with torch.no_grad():
            assert torch.equal(ours.model.blocks[1](x), theirs.model.blocks[1](x))
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


CASES = behaviours(globals())
