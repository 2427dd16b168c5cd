"""Storages and the objects behind tensors: identity, how many hold one, and swapping one for another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Generator = torch._C.Generator
"""The class of generators (torch/csrc/Generator.cpp), for `isinstance` while `torch.Generator` is emulated."""

make_subclass = torch.Tensor._make_subclass
"""A tensor of a subclass with another one's data (torch/csrc/autograd/python_variable.cpp): stand-ins of parameters."""

make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
"""A tensor of a subclass with a shape and no data (torch/csrc/autograd/python_variable.cpp): values that are shards."""

swap_tensors: Any = torch._C._swap_tensor_impl  # type: ignore[attr-defined]
"""Exchange what two tensors are (torch/csrc/autograd/python_variable.cpp):
a tensor made for real becomes a stand-in."""


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, which no other storage has while it lives.

    `UntypedStorage._cdata` (torch/csrc/Storage.cpp); `data_ptr` is 0 for all meta tensors.
    """
    return tensor.untyped_storage()._cdata


def storage_keys(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses of the storage objects of tensors, as `storage_key` does for one."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def key_of(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage object (`UntypedStorage._cdata`, torch/csrc/Storage.cpp)."""
    return storage._cdata


def storage_use_count(key: int) -> int:
    """Return how many hold a storage (`_storage_Use_Count`, torch/csrc/StorageMethods.cpp)."""
    return torch._C._storage_Use_Count(key)  # type: ignore[attr-defined]


def tensor_use_count(tensor: Tensor) -> int:
    """Return how many hold a tensor (`Tensor._use_count`, torch/csrc/autograd/python_variable.cpp)."""
    return tensor._use_count()  # type: ignore[attr-defined]


def replay_view(view: Tensor, base: Tensor) -> Tensor:
    """Return the same view of another tensor (`Tensor._view_func_unsafe`, torch/csrc/autograd/python_variable.cpp)."""
    return view._view_func_unsafe(base)  # type: ignore[attr-defined]
