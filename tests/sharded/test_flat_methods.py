"""Methods of flat DTensors that run on the local tensors at once, on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.errors import StateError
from memfit.sharded import shard
from memfit.sharded.flat_dtensor import FlatDTensor
from memfit.sharded.flat_methods import _IN_PLACE, _OUT_OF_PLACE

_TERNARY = ("lerp", "addcmul", "addcdiv")
_UNARY = ("sqrt", "neg", "abs", "square", "sign", "zero", "__neg__")


@pytest.fixture
def model() -> Iterator[nn.Module]:
    assert not dist.is_initialized()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        try:
            yield shard(nn.Sequential(nn.Linear(3, 5)))
        finally:
            dist.destroy_process_group()


def _arguments(name: str, first: torch.Tensor) -> tuple[object, ...]:
    name = name.removesuffix("_") if not name.startswith("__") else name
    if name in _UNARY:
        return ()
    if name == "clamp":
        return (0.1, 0.2)
    return (first, 0.5 if name == "lerp" else first) if name in _TERNARY else (first,)


@pytest.mark.parametrize("name", [*_IN_PLACE, *_OUT_OF_PLACE])
@torch.no_grad()
def test_a_method_gives_what_it_gives_for_a_plain_tensor(model: nn.Module, name: str) -> None:
    parameter = model.get_parameter("0.weight")
    assert isinstance(parameter, FlatDTensor)
    value: torch.Tensor = torch.zeros_like(parameter)
    value.copy_(torch.rand(5, 3))
    other = value + 1.0
    plain, plain_other = value.full_tensor(), other.full_tensor()
    found = getattr(value, name)(*_arguments(name, other))
    expected = getattr(plain, name)(*_arguments(name, plain_other))
    assert type(found) is FlatDTensor and (found is value) == (name in _IN_PLACE)
    assert torch.equal(found.full_tensor(), expected)
    assert torch.equal(value.full_tensor(), plain)


def test_a_write_is_counted_where_autograd_has_kept_the_tensor(model: nn.Module) -> None:
    parameter = model.get_parameter("0.weight")
    loss = (parameter * parameter).sum()
    with torch.no_grad():
        parameter.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_anything_else_is_decided_by_the_rules_of_ops(model: nn.Module) -> None:
    parameter = model.get_parameter("0.weight")
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.mul_(2.0)
    with torch.no_grad():
        before = parameter.full_tensor()
        parameter.mul_(torch.full((5, 3), 2.0)).add_(torch.tensor(1.0))
        assert torch.equal(parameter.full_tensor(), before * 2 + 1)
        with pytest.raises(StateError, match="its elements here have no rows and columns"):
            parameter.mul_(torch.ones(3))
