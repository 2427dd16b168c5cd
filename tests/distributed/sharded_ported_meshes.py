"""Behaviours of PyTorch's FSDP tests about meshes of several dimensions: each function runs on four ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from memfit.errors import InputError
from memfit.sharded import shard
from memfit.sharded.model_parallel import check_distributed
from memfit.torch_private.dtensor import make_dtensor, make_spec
from tests.distributed.sharded_behaviour import Trained
from tests.distributed.sharded_meshes import at_once, by_fsdp2, by_memfit, mesh_of, parallel, train, whole
from tests.distributed.sharded_ported_setup import behaviours, same_training
from tests.distributed.sharded_recipes import adamw, assert_same


def parameters_on_the_mesh_that_shards_them_are_refused() -> None:
    """DTensors on the mesh of all dimensions, for which FSDP2 has `dp_mesh_dims`."""
    mesh = mesh_of(2, 2)
    for given in (mesh, mesh["dp"]):
        model = distribute_module(nn.Sequential(nn.Linear(4, 4)), mesh)
        before = list(model.parameters())
        with pytest.raises(InputError, match="which overlap with those given"):
            shard(model, mesh=given)
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def meshes_that_cannot_be_joined_are_refused() -> None:
    """Those without names, and of ranks in another order; meshes of the same ranks may have been made apart."""
    names = ("dp", "tp")
    mesh = mesh_of(2, 2)
    turned = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=names)
    for given in (DeviceMesh.from_group(mesh["dp"].get_group(), "cpu"), turned["dp"]):
        model = parallel(mesh)
        before = list(model.parameters())
        with pytest.raises(InputError, match="cannot be joined"):
            shard(model, mesh=given)
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    results = []
    for given in (mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=names)):
        model = at_once(parallel(mesh), given["dp"])
        train(model, adamw(model.parameters()), range(1), mesh["dp"].get_local_rank())
        results.append(whole(model))
    assert_same(*results)


def a_mesh_of_another_device_is_refused() -> None:
    """Asked of the check itself: there is one device in these tests."""
    ranks = [0, 1] if dist.get_rank() < 2 else [2, 3]
    elsewhere = DeviceMesh("cuda", ranks, mesh_dim_names=("tp",), _init_backend=False)
    parameter = make_dtensor(torch.ones(2, 4), make_spec(elsewhere, (Shard(0),), (4, 4), torch.float32))
    with pytest.raises(InputError, match="on a mesh of 'cuda', and the one given is of 'cpu'"):
        check_distributed("weight", parameter, mesh_of(2, 2)["dp"])


def a_mesh_of_groups_of_the_users_own_is_used() -> None:
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    within, _ = dist.new_subgroups_by_enumeration(rows)
    across, _ = dist.new_subgroups_by_enumeration(columns)
    names = ("replicate", "shard")
    given = DeviceMesh.from_group([across, within], "cpu", mesh=torch.tensor(rows), mesh_dim_names=names)
    ours, theirs = Trained(mesh=given), Trained(mesh=mesh_of(2, 2, names=names))
    same_training(ours, theirs)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())  # type: ignore[operator]
        assert torch.equal(one.device_mesh.mesh, other.device_mesh.mesh)  # type: ignore[union-attr]


def state_of_replicas_beside_tensor_parallel() -> None:
    """State goes out and into a model on another mesh, and both train on alike; at 2 x 1 x 2 ranks and 1 x 2 x 2."""
    names = ("replicate", "shard", "tp")
    for sizes, others in (((2, 1, 2), (1, 2, 2)), ((1, 2, 2), (2, 1, 2))):
        models, optimizers = [], []
        for seed, each in enumerate((sizes, others)):
            mesh = mesh_of(*each, names=names)
            models.append(at_once(parallel(mesh, seed=seed), mesh["replicate", "shard"]))
            optimizers.append(adamw(models[-1].parameters()))
        train(models[0], optimizers[0], range(2), dist.get_rank() // 2)
        state, of_optimizer = get_state_dict(models[0], optimizers[0])
        for name, value in state.items():
            assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), whole(models[0])[name])
        full = {name: value.full_tensor() for name, value in state.items()}
        models[1].load_state_dict(full)
        assert_same(whole(models[0]), whole(models[1]))
        mesh = mesh_of(*sizes, names=names)
        same = at_once(parallel(mesh, seed=7), mesh["replicate", "shard"])
        its = adamw(same.parameters())
        set_state_dict(same, its, model_state_dict=deepcopy(state), optim_state_dict=deepcopy(of_optimizer))
        for model, optimizer in ((models[0], optimizers[0]), (same, its)):
            train(model, optimizer, range(2, 3), dist.get_rank() // 2)
        assert_same(whole(models[0]), whole(same))


def other_dimensions_than_those_of_tensor_parallel() -> None:
    """`shard_placement_fn` that asks for the dimension which tensor parallel leaves, to FSDP2's bits."""
    mesh = mesh_of(2, 2)

    def other(parameter: Any) -> Shard:
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        return Shard(1) if Shard(0) in placements and parameter.dim() > 1 else Shard(0)

    results = []
    for wrap in (at_once, by_memfit, by_fsdp2):
        model = wrap(parallel(mesh), mesh["dp"], shard_placement_fn=other)
        results.append((train(model, adamw(model.parameters()), range(2), mesh["dp"].get_local_rank()), whole(model)))
    for norms, parameters in results[:2]:
        assert norms == results[2][0]
        assert_same(parameters, results[2][1])


class _Replicated(nn.Module):
    """A parameter and a buffer that ranks of `tp` have alike."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        value, other = (DTensor.from_local(torch.randn(4, 4), mesh, [Replicate()], run_check=False) for _ in range(2))
        self.parameter = nn.Parameter(value)
        self.register_buffer("buffer", other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.parameter + self.buffer).to_local()


def buffers_that_are_dtensors_stay_so_and_get_rank_0s_values() -> None:
    mesh = mesh_of(2, 2)
    for from_rank_0 in (False, True):
        torch.manual_seed(mesh["dp"].get_local_rank() if from_rank_0 else 0)
        model = shard(_Replicated(mesh["tp"]), mesh=mesh["dp"], from_rank_0=from_rank_0)
        torch.manual_seed(0)
        first = _Replicated(mesh["tp"])
        assert isinstance(model.buffer, DTensor) and model.buffer.placements == (Replicate(),)
        assert torch.equal(model.buffer.to_local(), first.buffer.to_local())  # type: ignore[operator]
        assert torch.equal(model.parameter.full_tensor(), first.parameter.full_tensor())  # type: ignore[operator]
        assert torch.equal(model(torch.ones(4)), first(torch.ones(4)))
        model(torch.ones(4)).sum().backward()
        assert model.parameter.grad is not None


CASES = behaviours(globals())
