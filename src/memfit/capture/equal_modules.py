"""Whether modules are equal in all that a forward can read of them, and which of their attributes one has read."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from memfit.torch_private.autograd import post_accumulate_hooks, tensor_hooks
from memfit.torch_private.frames import frame_above
from memfit.torch_private.modules import buffer_table, module_table, parameter_table

_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
_NUMBERS = (bool, int, float, str, type(None))
_VALUES = (*_NUMBERS, complex, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type)
_DEPTH = 4
_MODULE_FILE = nn.Module.__call__.__code__.co_filename


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change and is compared by `==`."""
    return isinstance(value, _VALUES)


def differing_attributes(one: nn.Module, other: nn.Module) -> set[tuple[str, str]] | None:
    """Return the attributes, by path and name, in which two modules differ by a number or a word; None if by more.

    Parameters and buffers are compared by all that a meta tensor has, and by value where a capture knows values.
    Modules with hooks are equal to none.
    """
    found: set[tuple[str, str]] = set()
    return found if _same_module(one, other, "", found) else None


def _same_module(one: nn.Module, other: nn.Module, path: str, found: set[tuple[str, str]]) -> bool:
    if type(one) is not type(other) or one is other:
        return False
    mine, theirs = vars(one), vars(other)
    if mine.keys() != theirs.keys():
        return False
    for name, value in mine.items():
        given = theirs[name]
        if type(value) is type(given) is OrderedDict and not value and not given:
            continue
        if name in _TABLES:
            continue
        if "_hooks" in name and (value or given):
            return False
        if value is given:
            continue
        if type(value) is type(given) and isinstance(value, _NUMBERS):
            if value != given:
                found.add((path, name))
        elif not _same_value(value, given, (one, other), _DEPTH):
            return False
    for table in (parameter_table, buffer_table):
        if not _same_tensors(table(one), table(other)):
            return False
    children, others = module_table(one), module_table(other)
    if list(children) != list(others):
        return False
    for name, child in children.items():
        twin = others[name]
        if child is None or twin is None:
            if child is not twin:
                return False
        elif not _same_module(child, twin, f"{path}.{name}" if path else name, found):
            return False
    return True


def _same_tensors(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if list(mine) != list(theirs):
        return False
    for name, tensor in mine.items():
        twin = theirs[name]
        if tensor is None or twin is None:
            if tensor is not twin:
                return False
        elif tensor is twin or not _same_tensor(tensor, twin):
            return False
    return True


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not type(other) or type(one) not in (torch.Tensor, nn.Parameter):
        return False
    if tensor_hooks(one) or tensor_hooks(other) or post_accumulate_hooks(one) or post_accumulate_hooks(other):
        return False
    if (
        one.shape != other.shape
        or one.dtype != other.dtype
        or one.requires_grad != other.requires_grad
        or one.device != other.device
        or one.stride() != other.stride()
        or one.storage_offset() != other.storage_offset()
        or one.untyped_storage().nbytes() != other.untyped_storage().nbytes()
        or not _same_value(one.__dict__, other.__dict__, (None, None), 2)
    ):
        return False
    return one.is_meta or bool(torch.equal(one, other))


def _same_value(one: Any, other: Any, owners: tuple[Any, Any], depth: int) -> bool:
    """Return whether two attributes are equal; those of objects that nobody knows are compared one by one."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other) or depth == 0 or isinstance(one, (torch.Tensor, nn.Module)):
        return False
    if is_plain(one):
        return bool(one == other)
    if kind in (list, tuple):
        return len(one) == len(other) and all(
            _same_value(a, b, owners, depth - 1) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same_value(one[key], other[key], owners, depth - 1) for key in one)
    if kind in (set, frozenset):
        return all(map(is_plain, one)) and one == other
    if kind in (FunctionType, BuiltinFunctionType, type):
        return False
    owner = getattr(one, "__self__", None)
    if owner is not None and hasattr(one, "__func__"):
        return owner is owners[0] and other.__self__ is owners[1] and one.__func__ is other.__func__
    if not hasattr(one, "__dict__") or hasattr(kind, "__slots__") or kind.__module__ == "builtins":
        return False
    return _same_value(vars(one), vars(other), owners, depth - 1)


@contextlib.contextmanager
def watched_reads(modules: dict[int, str], names: set[tuple[str, str]], read: set[tuple[str, str]]) -> Iterator[None]:
    """Note in `read` which of these attributes of modules are read in the block; `modules` has paths by identity."""
    watched = {name for _, name in names}

    def read_attribute(self: nn.Module, name: str) -> Any:
        if name in watched:
            if (path := modules.get(id(self))) is not None and (path, name) in names:
                read.add((path, name))
        elif name == "__dict__" and id(self) in modules and frame_above(1).f_code.co_filename != _MODULE_FILE:
            read.add((modules[id(self)], name))
        return object.__getattribute__(self, name)

    nn.Module.__getattribute__ = read_attribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
