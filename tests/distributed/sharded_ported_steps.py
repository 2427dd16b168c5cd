"""Behaviours of PyTorch's FSDP tests about forwards, backwards and gradients; each function runs on every rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

from memfit.errors import StateError
from memfit.sharded import (
    FlatDTensor,
    Schedule,
    full_parameters,
    shard,
)
from tests.distributed.sharded_behaviour import Trained, average, check_gradients, gathers, loss_of, tokens_of, watched
from tests.distributed.sharded_models import GPT, Block, Chain
from tests.distributed.sharded_parity import check_equal, check_freed, whole_gradients, whole_parameters
from tests.distributed.sharded_ported_setup import behaviours, compared, same_training, small

BF16 = torch.bfloat16


def pair(**options: Any) -> tuple[Any, Any]:
    """A sharded and a plain model of three blocks with the same values."""
    return Trained(**options), Trained(plain=True)


def parameters_are_shards_after_a_forward_that_frees_them() -> None:
    ours = Trained()
    ours.model(tokens_of(0))
    blocks = [each for name, each in ours.model.named_parameters() if name.startswith("blocks.")]
    assert all(isinstance(each, FlatDTensor) for each in blocks)


def parameters_are_shards_after_a_forward_that_keeps_them() -> None:
    """Unlike FSDP2's: what was gathered stays in memory for the backward, and the modules show shards."""
    ours = Trained(keep=True)
    output = ours.model(tokens_of(0))
    assert all(isinstance(each, FlatDTensor) for each in ours.model.parameters())
    with watched(ours.model) as seen:
        output.sum().backward()
    assert not gathers(seen, "backward")


def parameters_are_shards_after_a_backward() -> None:
    ours = Trained()
    loss_of(ours.model, 0).backward()
    for parameter in ours.model.parameters():
        assert isinstance(parameter, FlatDTensor) and isinstance(parameter.grad, FlatDTensor)
        assert parameter.grad.shape == parameter.shape and parameter.grad.to_local().shape == parameter.to_local().shape
    check_freed(ours.model)


def parameters_have_their_names_and_shapes_inside_of_a_forward() -> None:
    seen: list[list[tuple[str, torch.Size]]] = []
    ours, plain = pair()
    for each in (ours.model, plain.model):
        block = each.blocks[1]
        handle = block.up.register_forward_pre_hook(
            lambda *_, block=block: seen.append([(name, one.shape) for name, one in block.named_parameters()])
        )
        each(tokens_of(0))
        handle.remove()
    assert seen[0] == seen[1] and seen[0]


def offloaded_shards_train_as_without() -> None:
    compared(GPT, offload=True)


def offloaded_shards_accumulate() -> None:
    ours, theirs = pair(offload=True)
    for trained in (ours, theirs):
        for number in range(3):
            loss_of(trained.model, number).backward()
        trained.update()
    check_equal("parameter", whole_parameters(ours.model), whole_parameters(theirs.model), exact=False)


def units_gathered_ahead_by_hand_train_as_without() -> None:
    ours, theirs = pair(schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    for number in range(2):
        handles = [block.unshard(async_op=True) for block in ours.model.blocks]
        for handle in handles[:1]:
            handle.wait()
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def a_unit_gathered_by_hand_is_not_gathered_again() -> None:
    ours = Trained(schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    ours.step(0)
    ours.model.blocks[1].unshard(async_op=True)
    with watched(ours.model) as seen:
        ours.model(tokens_of(0))
    assert "blocks.1" not in gathers(seen, "forward") and "blocks.0" in gathers(seen, "forward")


def units_gathered_after_a_backward_hold_the_newest_values() -> None:
    ours, theirs = pair()
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
        ours.model.blocks[0].unshard()
        assert torch.equal(ours.model.blocks[0].up.weight, theirs.model.blocks[0].up.weight)
        ours.model.blocks[0].reshard()


def a_unit_without_parameters_may_be_gathered() -> None:
    model = shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), units=["0"])
    model.unshard()
    model.reshard()
    model(torch.ones(1, 2)).sum().backward()


def units_that_are_kept_may_be_freed_by_hand() -> None:
    ours, theirs = pair(keep=True)
    for number in range(2):
        loss = loss_of(ours.model, number)
        for block in ours.model.blocks:
            block.reshard()
        loss.backward()
        ours.update()
        assert loss.item() == theirs.step(number)
    ours.check_equals(theirs)


def freeing_twice_and_gathering_twice_is_one() -> None:
    ours, theirs = pair()
    block = ours.model.blocks[0]
    for _ in range(2):
        block.unshard()
    for _ in range(2):
        block.reshard()
    same_training(ours, theirs)


def the_setting_of_one_unit_is_its_own() -> None:
    ours = Trained(schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    ours.model.blocks[1].set_reshard_after_forward(False)
    with watched(ours.model) as seen:
        ours.step(0)
    assert gathers(seen, "backward") == ["blocks.2", "blocks.0"]


def the_setting_of_the_root_alone_leaves_units_as_they_were() -> None:
    ours = Trained(schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    ours.model.set_reshard_after_forward(False, recurse=False)
    with watched(ours.model) as seen:
        ours.step(0)
    assert gathers(seen, "backward") == ["blocks.2", "blocks.1", "blocks.0"]


def forward_prefetch_lists_are_followed() -> None:
    ours = Trained(schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    ours.step(0)
    ours.model.blocks[0].set_modules_to_forward_prefetch([ours.model.blocks[1], ours.model.blocks[2]])
    with watched(ours.model) as seen:
        ours.model(tokens_of(0))
    begun = [each for each in seen if each.startswith(("gather of unit", "run blocks"))]
    assert begun[:3] == [f"gather of unit 'blocks.{number}' in forward" for number in range(3)]
    assert begun[3:] == [f"run blocks.{number}" for number in range(3)] or "run blocks.0" in begun[3:]


def backward_prefetch_lists_are_followed() -> None:
    ours, theirs = pair(schedule=Schedule(forward_prefetch=0, backward_prefetch=0))
    assert ours.step(0) == theirs.step(0)
    ours.model.blocks[2].set_modules_to_backward_prefetch([ours.model.blocks[0], ours.model.blocks[1]])
    with watched(ours.model) as seen:
        assert ours.step(1) == theirs.step(1)
    assert gathers(seen, "backward") == ["blocks.2", "blocks.0", "blocks.1"]
    ours.check_equals(theirs)


def backward_prefetch_lists_inside_of_checkpoints() -> None:
    def build() -> nn.Module:
        model = GPT()
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return model

    ours, theirs = Trained(build), Trained(build, plain=True)
    blocks = list(ours.model.blocks)
    inner = [each if hasattr(each, "unshard") else each._checkpoint_wrapped_module for each in blocks]
    for first, second in pairwise(inner):
        second.set_modules_to_backward_prefetch([first])
        first.set_modules_to_forward_prefetch([second])
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    check_equal("parameter", *(_unwrapped(whole_parameters(each.model)) for each in (ours, theirs)))


def a_unit_gathered_ahead_in_vain_is_freed() -> None:
    """A unit whose output the loss does not use is gathered ahead of its backward, which never comes."""

    class Skips(Chain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.embedding(tokens))
            self.blocks[1](x)
            return self.head(self.blocks[2](x))

    def build() -> nn.Module:
        return Skips(*(nn.Linear(16, 16) for _ in range(3)))

    ours, theirs = Trained(build, schedule=Schedule(backward_prefetch=2)), Trained(build, plain=True)
    for number in range(2):
        loss_of(ours.model, number).backward()
        check_freed(ours.model)
        ours.update()
        theirs.step(number)
    ours.check_equals(theirs)


def outputs_that_the_loss_does_not_use() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x), self.right(x)

    class Uses(Chain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x, _ = block(x)
            return self.head(x)

    ours, theirs = Trained(lambda: Uses(Two(), Two())), Trained(lambda: Uses(Two(), Two()), plain=True)
    same_training(ours, theirs)
    assert all(each.grad is None for each in ours.model.parameters())


def gradients_of_unused_parameters_are_none() -> None:
    model = shard(_Unused())
    model(torch.ones(1, 2)).sum().backward()
    assert model.unused.weight.grad is None and model.used.weight.grad is not None


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def values_changed_in_place_after_sharding_stay() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        with torch.no_grad():
            for parameter in trained.model.parameters():
                parameter.mul_(0.5)
    same_training(ours, theirs)


def values_changed_between_forward_and_step_are_used_next() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
        trained.update()
        with torch.no_grad():
            trained.model.get_parameter("head.weight").add_(0.25)
    same_training(ours, theirs)


def gradients_changed_by_hand_are_stepped_with() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
        if trained.plain:
            average(trained.model)
        for parameter in trained.model.parameters():
            parameter.grad.mul_(3).clamp_(-0.5, 0.5)
        trained.optimizer.step()
    ours.check_equals(theirs)


def gradients_put_by_hand_are_stepped_with() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        for parameter in trained.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trained.optimizer.step()
    ours.check_equals(theirs)


def a_gradient_of_another_shape_is_refused() -> None:
    model = shard(small())
    with pytest.raises((RuntimeError, StateError, TypeError)):
        model[0].weight.grad = torch.ones(2)


def data_of_another_shape_is_refused() -> None:
    model = shard(small())
    before = model[0].weight.full_tensor().clone()
    with pytest.raises((RuntimeError, StateError)):
        model[0].weight.data = torch.ones(2)
    assert torch.equal(model[0].weight.full_tensor(), before)


def groups_of_other_settings_train_as_without() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        named = list(trained.model.named_parameters())
        trained.optimizer = torch.optim.AdamW(
            [
                {"params": [each for name, each in named if "bias" in name], "weight_decay": 0.0, "lr": 3e-2},
                {"params": [each for name, each in named if "bias" not in name], "weight_decay": 0.1},
            ],
            lr=1e-2,
            eps=1e-4,
        )
    same_training(ours, theirs, 3)


def groups_of_other_settings_on_offloaded_shards() -> None:
    ours, theirs = pair(offload=True)
    for trained in (ours, theirs):
        first, *rest = trained.model.parameters()
        trained.optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.5)
    same_training(ours, theirs)


def two_optimizers_of_which_one_forgets_gradients() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        every = list(trained.model.parameters())
        first = torch.optim.AdamW(every[::2], lr=1e-2, eps=1e-4)
        second = torch.optim.SGD(every[1::2], lr=1e-2)
        for number in range(3):
            loss_of(trained.model, number).backward()
            if trained.plain:
                average(trained.model)
            first.step()
            second.step()
            first.zero_grad(set_to_none=False)
            second.zero_grad(set_to_none=True)
    ours.check_equals(theirs)


def optimizers_skip_parameters_of_which_a_rank_has_nothing() -> None:
    for kind, options in (
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ):
        results = []
        for model in (shard(small(0, 1, 1, 1)), small(0, 1, 1, 1)):
            optimizer = kind(model.parameters(), lr=0.1, **options)
            model(torch.ones(2, 1)).square().sum().backward()
            optimizer.step()
            results.append(
                [each.full_tensor() if isinstance(each, FlatDTensor) else each for each in model.parameters()]
            )
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def full_parameters_between_two_forwards_change_nothing() -> None:
    for keep in (False, True):
        ours, theirs = pair(keep=keep)
        for number in range(2):
            with torch.no_grad():
                first = ours.model(tokens_of(number))
            with full_parameters(ours.model):
                pass
            with torch.no_grad():
                assert torch.equal(ours.model(tokens_of(number)), first)
            assert ours.step(number) == theirs.step(number)


def parameters_may_be_read_between_forward_and_backward() -> None:
    for keep in (False, True):
        ours, theirs = pair(keep=keep)
        for number in range(2):
            loss = loss_of(ours.model, number)
            if not keep:
                blocks = [each for name, each in ours.model.named_parameters() if name.startswith("blocks.")]
                assert all(each.full_tensor().isfinite().all() for each in blocks)
            loss.backward()
            ours.update()
            assert theirs.step(number) == loss.item()
        ours.check_equals(theirs)


def several_forwards_then_one_backward() -> None:
    ours, theirs = pair()
    for trained in (ours, theirs):
        sum(loss_of(trained.model, number) for number in range(3)).backward()  # type: ignore[union-attr]
        if trained.plain:
            average(trained.model)
    check_gradients(ours.model, theirs.model)


def two_forwards_with_checkpoints_and_nested_units() -> None:
    def build() -> nn.Module:
        model = GPT()
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return model

    def units(path: str, module: nn.Module) -> bool:
        return isinstance(module, Block) or path.endswith("up")

    ours, theirs = Trained(build, units=units), Trained(build, plain=True)
    for trained in (ours, theirs):
        (loss_of(trained.model, 0) + loss_of(trained.model, 1)).backward()
        if trained.plain:
            average(trained.model)
    check_equal("gradient", *(_unwrapped(whole_gradients(each.model)) for each in (ours, theirs)), exact=False)


def _unwrapped(gradients: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in gradients.items()}


def a_part_of_a_unit_may_be_checkpointed() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False))

    compared(lambda: Chain(Inside(), Inside()))


def packed_sequences_go_in_and_out() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, packed: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
            return self.lstm(packed)[0]

    results = []
    for wrap in (shard, lambda model: model):
        torch.manual_seed(0)
        model = wrap(Packs())
        x = torch.randn(3, 5, 4, requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        output, lengths = nn.utils.rnn.pad_packed_sequence(model(packed), batch_first=True)
        assert lengths.tolist() == [5, 3, 2]
        output.sum().backward()
        results.append((output, x.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


CASES = behaviours(globals())
