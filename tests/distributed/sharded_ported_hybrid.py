"""Behaviours of PyTorch's FSDP tests about replicas that shard within: each function runs on four ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.sharded import FlatDTensor, Precision, Reduction, full_state_dict, shard
from tests.distributed.sharded_behaviour import Trained, average, loss_of
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_parity import check_equal, whole_gradients, whole_parameters
from tests.distributed.sharded_ported_setup import behaviours

_meshes: dict[str, DeviceMesh] = {}


def _mesh() -> DeviceMesh:
    if "square" not in _meshes:
        _meshes["square"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _meshes["square"]


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def replicas_have_the_same_parts() -> None:
    model = shard(GPT(), mesh=_mesh())
    parts = _gathered([each.to_local().tolist() for each in model.parameters()])
    assert parts[0] == parts[2] and parts[1] == parts[3] and parts[0] != parts[1]


def replicas_that_began_apart_start_from_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mesh=_mesh(), from_rank_0=True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    check_equal("parameter", whole_parameters(model), whole_parameters(plain))


def replicas_on_meta_get_rank_0s_values_and_buffers() -> None:
    torch.manual_seed(0)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if dist.get_rank() == 0:
        model[1].running_mean.fill_(3.0)  # type: ignore[operator, union-attr]
    shard(model, mesh=_mesh(), from_rank_0=True)
    assert torch.equal(model[1].running_mean, torch.full((4,), 3.0))  # type: ignore[arg-type]
    weights = _gathered(model[0].weight.full_tensor().tolist())
    assert all(each == weights[0] for each in weights)


def gradients_are_the_mean_of_all_replicas() -> None:
    ours, theirs = Trained(mesh=_mesh()), Trained(plain=True)
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
    average(theirs.model)
    check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)
    parts = _gathered([each.grad.to_local().tolist() for each in ours.model.parameters()])
    assert parts[0] == parts[2] and parts[1] == parts[3]


def the_norm_counts_every_replica_once() -> None:
    ours, theirs = Trained(mesh=_mesh()), Trained(plain=True)
    norms = []
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
        if trained.plain:
            average(trained.model)
        norms.append(float(nn.utils.clip_grad_norm_(trained.model.parameters(), 0.1)))
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)


def what_overflows_on_one_replica_skips_the_step_on_all() -> None:
    ours = Trained(mesh=_mesh())
    before = whole_parameters(ours.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = loss_of(ours.model, 0) * (float("inf") if dist.get_rank() == 3 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(ours.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    check_equal("parameter", whole_parameters(ours.model), before)


def a_hook_sums_within_a_replica_and_replicas_are_summed_after_it() -> None:
    sizes: list[int] = []

    def hook(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sizes.append(dist.get_world_size(group))
        dist.all_reduce(whole, group=group)
        return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    ours, theirs = Trained(mesh=_mesh(), reduction=Reduction(hook=hook)), Trained(mesh=_mesh())
    for trained in (ours, theirs):
        loss_of(trained.model, 0).backward()
    check_equal("gradient", whole_gradients(ours.model), whole_gradients(theirs.model), exact=False)
    assert set(sizes) == {2}


def gradients_of_replicas_in_low_precision_are_those_of_the_shards() -> None:
    model = shard(GPT(), mesh=_mesh(), precision=Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    loss_of(model, 0).backward()
    assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
    parts = _gathered([each.grad.to_local().tolist() for each in model.parameters()])
    assert parts[0] == parts[2] and parts[1] == parts[3]


def state_of_replicas_loads_without_replicas_and_back() -> None:
    first, second, third = Trained(mesh=_mesh()), Trained(), Trained(mesh=_mesh())
    first.step(0)
    second.step(7)
    for source, target in ((first, second), (second, third)):
        state, of_optimizer = get_state_dict(source.model, source.optimizer)
        set_state_dict(target.model, target.optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    ours, theirs = (full_state_dict(each.model, each.optimizer) for each in (first, third))
    check_equal("parameter", ours["model"], theirs["model"])
    for name, values in ours["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(value, theirs["optimizer"]["state"][name][key]), (name, key)


def state_of_replicas_has_the_mesh_of_the_parameters() -> None:
    ours = Trained(mesh=_mesh())
    ours.step(0)
    for name, value in ours.model.state_dict().items():
        assert isinstance(value, FlatDTensor) and value.device_mesh == _mesh(), name
        assert torch.equal(value.full_tensor(), ours.model.get_parameter(name).full_tensor())


def parts_of_four_ranks_are_the_whole() -> None:
    model, plain = shard(GPT()), GPT()
    plain.load_state_dict(full_state_dict(model)["model"])
    for name, parameter in model.named_parameters():
        parts = _gathered(parameter.to_local().tolist())
        assert [each for part in parts for each in part] == plain.get_parameter(name).flatten().tolist()


def kept_replicas_train_as_freed_ones() -> None:
    ours, theirs = Trained(mesh=_mesh(), keep=True), Trained(mesh=_mesh())
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    check_equal("parameter", whole_parameters(ours.model), whole_parameters(theirs.model))


def offloaded_replicas_train_as_others() -> None:
    ours, theirs = Trained(mesh=_mesh(), offload=True), Trained(mesh=_mesh())
    for number in range(2):
        assert ours.step(number) == theirs.step(number)
    check_equal("parameter", whole_parameters(ours.model), whole_parameters(theirs.model))


CASES = behaviours(globals())
