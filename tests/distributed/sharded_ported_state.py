"""Behaviours of PyTorch's FSDP tests about state dicts and full parameters; each function runs on every rank."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from memfit.errors import InputError, StateError
from memfit.sharded import (
    FlatDTensor,
    Precision,
    full_parameters,
    full_state_dict,
    load_state_dict,
    no_sync,
    plain_optimizer_state,
    shard,
)
from tests.distributed.sharded_behaviour import Trained, loss_of, tokens_of
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_ported_setup import behaviours, small

FULL = StateDictOptions(full_state_dict=True)


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fail unless both have the same names and values, sharded or not."""
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        whole = value.full_tensor() if isinstance(value, FlatDTensor) else value
        assert torch.equal(whole, theirs[name]), name


def state_has_the_names_of_the_plain_model() -> None:
    assert list(shard(GPT(tied=True)).state_dict()) == list(GPT(tied=True).state_dict())


def state_of_a_part_has_its_prefix() -> None:
    torch.manual_seed(0)
    model = shard(GPT())
    torch.manual_seed(0)
    plain = GPT()
    _equal(model.blocks[1].state_dict(prefix="block."), plain.blocks[1].state_dict(prefix="block."))


def state_of_a_part_loads_into_another_part() -> None:
    model = shard(GPT())
    model.blocks[0].load_state_dict(model.blocks[2].state_dict())
    for one, other in zip(model.blocks[0].parameters(), model.blocks[2].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def state_of_a_plain_model_is_loaded() -> None:
    torch.manual_seed(5)
    plain = GPT()
    model = shard(GPT())
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    _equal(model.state_dict(), plain.state_dict())


def state_that_was_kept_shows_later_values() -> None:
    ours = Trained()
    state = ours.model.state_dict()
    ours.step(0)
    _equal(state, full_state_dict(ours.model)["model"])


def missing_and_unexpected_names_are_told_without_prefixes() -> None:
    model = shard(GPT())
    state = model.state_dict()
    del state["head.weight"]
    state["other"] = torch.ones(1)
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"head\.weight".*Unexpected key|Unexpected key.*Missing key'
    ):
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["head.weight"] and found.unexpected_keys == ["other"]


def state_of_another_shape_is_refused() -> None:
    model = shard(GPT())
    before = full_state_dict(model)["model"]
    state = dict(GPT().state_dict())
    state["head.weight"] = torch.ones(3, 3)
    with pytest.raises((RuntimeError, StateError, InputError)):
        model.load_state_dict(state)
    assert torch.equal(model.head.weight.full_tensor(), before["head.weight"])


def state_goes_through_torch_save() -> None:
    ours = Trained()
    ours.step(0)
    full = full_state_dict(ours.model, ours.optimizer)
    content = io.BytesIO()
    torch.save(full, content)
    content.seek(0)
    again = torch.load(content)
    other = Trained()
    load_state_dict(other.model, again, other.optimizer)
    assert ours.step(1) == other.step(1)
    ours.check_equals(other)


def only_rank_0_has_the_whole_state_on_request() -> None:
    full = full_state_dict(shard(GPT()), rank_0_only=True)
    assert bool(full.get("model")) == (dist.get_rank() == 0)
    found = get_model_state_dict(shard(GPT()), options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(found) == (dist.get_rank() == 0)


def the_whole_state_is_a_copy() -> None:
    ours = Trained()
    full = full_state_dict(ours.model)["model"]
    kept = {name: each.clone() for name, each in full.items()}
    ours.step(0)
    assert all(torch.equal(each, full[name]) for name, each in kept.items())


def state_in_mixed_precision_is_in_its_own_dtype() -> None:
    ours = Trained(precision=Precision(param_dtype=torch.bfloat16))
    ours.step(0)
    for state in (ours.model.state_dict(), full_state_dict(ours.model)["model"], get_model_state_dict(ours.model)):
        assert {each.dtype for each in state.values()} == {torch.float32}


def state_of_a_half_precision_model_is_loaded() -> None:
    model, other = shard(GPT().half()), shard(GPT().half())
    other.load_state_dict(model.state_dict())
    _equal(other.state_dict(), full_state_dict(model)["model"])


def buffers_are_in_the_state_and_loaded() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    model, other = shard(build()), shard(build())
    model(torch.randn(4, 3))
    other.load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer)
    _equal(get_model_state_dict(other, options=FULL), full_state_dict(other)["model"])


def buffers_of_another_dtype_are_saved_in_it() -> None:
    model = shard(nn.BatchNorm1d(3), precision=Precision(buffer_dtype=torch.bfloat16))
    assert model.state_dict()["running_mean"].dtype == torch.bfloat16
    assert model.state_dict()["num_batches_tracked"].dtype == torch.int64


def state_after_a_forward_without_a_backward() -> None:
    for keep in (False, True):
        ours = Trained(keep=keep)
        before = full_state_dict(ours.model)["model"]
        output = ours.model(tokens_of(0))
        _equal(ours.model.state_dict(), before)
        output.sum().backward()


def state_in_eval_mode_is_the_same() -> None:
    ours = Trained()
    before = full_state_dict(ours.model)["model"]
    ours.model.eval()
    with torch.no_grad():
        ours.model(tokens_of(0))
    _equal(ours.model.state_dict(), before)


def state_between_passes_that_are_not_sent() -> None:
    ours = Trained()
    before = full_state_dict(ours.model)["model"]
    with no_sync(ours.model):
        loss_of(ours.model, 0).backward()
        _equal(ours.model.state_dict(), before)
    loss_of(ours.model, 1).backward()


def state_inside_of_full_parameters_is_whole() -> None:
    model = shard(GPT())
    wanted = full_state_dict(model)["model"]
    with full_parameters(model):
        for name, value in model.state_dict().items():
            assert not isinstance(value, FlatDTensor) and torch.equal(value, wanted[name])


def training_goes_on_after_state_was_taken_and_loaded() -> None:
    ours, theirs = Trained(), Trained(plain=True)
    for number in range(2):
        state = deepcopy(full_state_dict(ours.model, ours.optimizer))
        load_state_dict(ours.model, state, ours.optimizer)
        assert ours.step(number) == theirs.step(number)
    ours.check_equals(theirs)


def offloaded_state_is_on_the_host_and_loads() -> None:
    ours, other = Trained(offload=True), Trained(offload=True)
    ours.step(0)
    assert all(each.device.type == "cpu" for each in ours.model.state_dict().values())
    state, of_optimizer = get_state_dict(ours.model, ours.optimizer)
    set_state_dict(other.model, other.optimizer, model_state_dict=state, optim_state_dict=deepcopy(of_optimizer))
    assert ours.step(1) == other.step(1)
    ours.check_equals(other)


def ignored_parameters_are_in_the_state() -> None:
    model = shard(GPT(), ignored=["head.weight"])
    plain = GPT()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(model.state_dict()["head.weight"]) is torch.Tensor
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.head.weight, plain.head.weight)


def shared_modules_and_parameters_are_under_all_their_names() -> None:
    def build() -> nn.Module:
        model = GPT(tied=True, layers=2)
        model.blocks.append(model.blocks[0])
        return model

    model, plain = shard(build(), units=["blocks.0", "blocks.1"]), build()
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    full = full_state_dict(model)["model"]
    assert torch.equal(full["blocks.2.up.weight"], full["blocks.0.up.weight"])
    assert torch.equal(full["head.weight"], full["embedding.weight"])


def state_of_a_mesh_of_one_rank() -> None:
    alone, _ = dist.new_subgroups(1)
    model = shard(small(), mesh=DeviceMesh.from_group(alone, "cpu"))
    _equal(model.state_dict(), small().state_dict())
    _equal(get_model_state_dict(model, options=FULL), small().state_dict())


def frozen_parameters_may_be_left_out_of_the_state() -> None:
    model = small()
    model[0].requires_grad_(False)
    shard(model)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert sorted(state) == ["1.bias", "1.weight", "2.bias", "2.weight"]


def state_of_rank_0_goes_to_all() -> None:
    torch.manual_seed(9)
    plain = GPT()
    model = shard(GPT())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else {}, options=options)
    _equal(model.state_dict(), plain.state_dict())


def only_names_that_match_are_loaded_on_request() -> None:
    model = shard(small())
    kept = model[1].weight.full_tensor().clone()
    state = {"0.weight": torch.zeros(5, 3)}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    assert not model[0].weight.full_tensor().any() and torch.equal(model[1].weight.full_tensor(), kept)


# -- Optimizer state --------------------------------------------------------------------------------------------------


def optimizer_state_has_the_names_of_the_models_state() -> None:
    ours = Trained()
    ours.step(0)
    full = full_state_dict(ours.model, ours.optimizer)
    assert set(full["optimizer"]["state"]) == {name for name, _ in ours.model.named_parameters()}
    assert set(get_optimizer_state_dict(ours.model, ours.optimizer)["state"]) == set(full["optimizer"]["state"])


def optimizer_state_is_sharded_as_the_parameters_are() -> None:
    ours = Trained()
    ours.step(0)
    for parameter in ours.model.parameters():
        for value in ours.optimizer.state[parameter].values():
            if value.dim():
                assert isinstance(value, FlatDTensor) and value.to_local().shape == parameter.to_local().shape


def optimizer_state_before_the_first_step() -> None:
    ours, other = Trained(), Trained()
    full = full_state_dict(ours.model, ours.optimizer)
    load_state_dict(other.model, full, other.optimizer)
    assert ours.step(0) == other.step(0)
    ours.check_equals(other)


def optimizer_state_loads_over_state_that_is_there() -> None:
    ours, other = Trained(), Trained()
    ours.step(0)
    other.step(5)
    load_state_dict(other.model, full_state_dict(ours.model, ours.optimizer), other.optimizer)
    assert ours.step(1) == other.step(1)
    ours.check_equals(other)


def optimizer_state_of_frozen_parameters_is_absent() -> None:
    def build() -> nn.Module:
        model = GPT()
        model.embedding.requires_grad_(False)
        return model

    ours, other = Trained(build), Trained(build)
    ours.step(0)
    full = full_state_dict(ours.model, ours.optimizer)
    assert "embedding.weight" not in full["optimizer"]["state"]
    load_state_dict(other.model, full, other.optimizer)
    assert ours.step(1) == other.step(1)


def optimizer_state_without_that_of_the_first_parameter() -> None:
    """The first parameter gets no gradient in the first step, so that it alone has no state."""
    model, other = shard(small()), shard(small())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    model(torch.ones(2, 3)).sum().backward()
    model[0].weight.grad = None
    optimizers[0].step()
    full = full_state_dict(model, optimizers[0])
    assert "0.weight" not in full["optimizer"]["state"] and "0.bias" in full["optimizer"]["state"]
    load_state_dict(other, full, optimizers[1])
    assert not optimizers[1].state.get(other[0].weight)
    for one, its in zip((model, other), optimizers, strict=True):
        one.zero_grad()
        one(torch.ones(2, 3)).sum().backward()
        its.step()
    _equal(model.state_dict(), full_state_dict(other)["model"])


def optimizers_without_state_are_saved_and_loaded() -> None:
    model, other = shard(small()), shard(small())
    optimizers = [torch.optim.SGD(each.parameters(), lr=rate) for each, rate in ((model, 0.3), (other, 0.1))]
    load_state_dict(other, full_state_dict(model, optimizers[0]), optimizers[1])
    assert optimizers[1].param_groups[0]["lr"] == 0.3


def optimizer_state_without_groups_is_refused() -> None:
    ours, other = Trained(), Trained()
    ours.step(0)
    full = full_state_dict(ours.model, ours.optimizer)
    before = full_state_dict(other.model)["model"]
    del full["optimizer"]["param_groups"]
    with pytest.raises(InputError, match="has 'state' and 'param_groups'"):
        load_state_dict(other.model, full, other.optimizer)
    _equal(other.model.state_dict(), before)


def optimizer_state_that_is_none_comes_back() -> None:
    """SGD without momentum has `momentum_buffer` None after a step."""
    model, other = shard(small()), shard(small())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    for each, its in zip((model, other), optimizers, strict=True):
        each(torch.ones(2, 3)).sum().backward()
        its.step()
    load_state_dict(other, full_state_dict(model, optimizers[0]), optimizers[1])
    state, of_optimizer = get_state_dict(model, optimizers[0])
    set_state_dict(other, optimizers[1], model_state_dict=state, optim_state_dict=of_optimizer)
    _equal(model.state_dict(), full_state_dict(other)["model"])


def optimizer_state_goes_to_a_plain_optimizer() -> None:
    ours, theirs = Trained(), Trained(plain=True)
    ours.step(0)
    full = full_state_dict(ours.model, ours.optimizer)
    theirs.model.load_state_dict(full["model"])
    theirs.optimizer.load_state_dict(plain_optimizer_state(full["optimizer"]))
    assert ours.step(1) == theirs.step(1)
    ours.check_equals(theirs)


def optimizer_state_of_a_plain_optimizer_is_loaded() -> None:
    ours, theirs = Trained(), Trained(plain=True)
    theirs.step(0)
    names = [name for name, _ in theirs.model.named_parameters()]
    given = theirs.optimizer.state_dict()
    named = {
        "state": {names[number]: each for number, each in given["state"].items()},
        "param_groups": [
            {**group, "params": [names[each] for each in group["params"]]} for group in given["param_groups"]
        ],
    }
    load_state_dict(ours.model, {"model": theirs.model.state_dict(), "optimizer": named}, ours.optimizer)
    assert ours.step(1) == theirs.step(1)
    ours.check_equals(theirs)


def flattened_optimizer_state_of_torch_comes_back() -> None:
    ours, other = Trained(), Trained()
    ours.step(0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(ours.model, ours.optimizer, options=options)
    assert all(name.startswith(("state.", "param_groups.")) for name in state)
    other.model.load_state_dict(ours.model.state_dict())
    # a copy: torch makes some of the tensors that it is given the optimizer's own
    set_optimizer_state_dict(other.model, other.optimizer, deepcopy(state), options=options)
    assert ours.step(1) == other.step(1)
    ours.check_equals(other)


def state_of_several_optimizers_comes_back() -> None:
    def build() -> tuple[Any, list[torch.optim.Optimizer]]:
        model = shard(GPT())
        every = list(model.parameters())
        return model, [torch.optim.AdamW(every[::2], lr=0.01), torch.optim.SGD(every[1::2], lr=0.1, momentum=0.5)]

    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
        loss_of(model, number).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    torch.manual_seed(0)
    model, optimizers = build()
    step(model, optimizers, 0)
    state, of_optimizers = get_state_dict(model, optimizers)
    other, others = build()
    set_state_dict(other, others, model_state_dict=state, optim_state_dict=deepcopy(of_optimizers))
    for each, its in ((model, optimizers), (other, others)):
        step(each, its, 1)
    _equal(model.state_dict(), full_state_dict(other)["model"])


def optimizer_state_of_ignored_parameters_is_whole() -> None:
    ours = Trained(ignored=["head.weight"])
    ours.step(0)
    full = full_state_dict(ours.model, ours.optimizer)
    assert torch.equal(
        full["optimizer"]["state"]["head.weight"]["exp_avg"], ours.optimizer.state[ours.model.head.weight]["exp_avg"]
    )


# -- Full parameters --------------------------------------------------------------------------------------------------


def apply_changes_values_in_place() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5)

    model, plain = shard(GPT()), GPT()
    plain.load_state_dict(full_state_dict(model)["model"])
    for each in (model, plain):
        each.apply(fill)
    _equal(model.state_dict(), plain.state_dict())


def apply_on_tied_weights_changes_both() -> None:
    model = shard(GPT(tied=True))
    model.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Embedding) else None)
    assert torch.equal(model.head.weight.full_tensor(), torch.ones(model.head.weight.shape))


def apply_inside_of_full_parameters_is_written_back() -> None:
    model = shard(GPT())
    with full_parameters(model, write_back=True):
        model.apply(lambda module: nn.init.eye_(module.weight) if isinstance(module, nn.Linear) else None)
    weight = model.blocks[0].up.weight
    assert torch.equal(weight.full_tensor(), torch.eye(*weight.shape))


def changes_are_dropped_without_write_back() -> None:
    model = shard(small())
    before = full_state_dict(model)["model"]
    with full_parameters(model), torch.no_grad():
        model[0].weight.zero_()
    _equal(model.state_dict(), before)


def one_element_may_be_written_back() -> None:
    """A parameter of one element, of which some ranks have nothing but padding."""
    model = shard(nn.Linear(1, 1, bias=False))
    with full_parameters(model, write_back=True), torch.no_grad():
        model.weight.fill_(7.0)
    assert model.weight.full_tensor().item() == 7.0


def full_parameters_have_the_names_and_values_of_the_plain_model() -> None:
    model, plain = shard(GPT()), GPT()
    plain.load_state_dict(full_state_dict(model)["model"])
    with full_parameters(model):
        found = dict(model.named_parameters())
        assert list(found) == [name for name, _ in plain.named_parameters()]
        assert all(torch.equal(found[name], each) for name, each in plain.named_parameters())
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


def full_parameters_of_replicas() -> None:
    """Nothing is sharded on a mesh of replicas, and changes are kept all the same."""
    model = shard(small(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1)))
    with full_parameters(model, write_back=True), torch.no_grad():
        assert torch.equal(model[0].weight, small()[0].weight)
        model[0].weight.fill_(2.0)
    assert torch.equal(model[0].weight.full_tensor(), torch.full((5, 3), 2.0))


def full_parameters_leave_the_gathered_parts_as_they_were() -> None:
    ours, theirs = Trained(keep=True), Trained(plain=True)
    for number in range(2):
        with full_parameters(ours.model, units=["blocks.1"]):
            assert type(ours.model.blocks[1].up.weight) is nn.Parameter
            assert isinstance(ours.model.blocks[0].up.weight, FlatDTensor)
        assert ours.step(number) == theirs.step(number)


def gradients_may_be_gathered_one_by_one() -> None:
    ours, theirs = Trained(), Trained(plain=True)
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        dist.all_reduce(other.grad)
        assert torch.equal(one.grad.full_tensor(), other.grad / dist.get_world_size())


def gradients_that_are_none_stay_none() -> None:
    model = shard(small())
    with full_parameters(model):
        assert all(each.grad is None for each in model.parameters())
    assert all(each.grad is None for each in model.parameters())


CASES = behaviours(globals())
