"""Replace a model's and an optimizer's tensors by meta tensors for the time of a capture."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.arguments import dataclass_values, is_wrapper, map_wrapper
from memfit.capture.environment import RESTORED, same_attributes
from memfit.capture.execution import KNOWN_VALUE_LIMIT
from memfit.errors import InputError
from memfit.torch_private.autograd import post_accumulate_hooks, tensor_hooks
from memfit.torch_private.modules import buffer_table, modules_by_path, parameter_table
from memfit.torch_private.storages import key_of, make_subclass, storage_key

_META = torch.device("meta")


class MetaTensors:
    """Stand-ins by identity, so that tied tensors stay tied and an optimizer finds its parameters."""

    def __init__(self, *, compact: bool = False, param_dtype: torch.dtype | None = None) -> None:
        """With `compact`, tensors are as copies to the device are: without gaps and what they are slices of.

        With a `param_dtype` floating-point parameters and their optimizer state are of that (Note [Cast parameters]).
        """
        self.compact, self.param_dtype = compact, param_dtype
        self.of: dict[int, torch.Tensor] = {}
        self.stand_ins: set[int] = set()
        self.attributes: list[torch.Tensor] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: list[torch.Tensor] = []

    def parameter(self, tensor: nn.Parameter) -> nn.Parameter:
        """Return the stand-in of a parameter, with its class, attributes and hooks."""
        known = self.of.get(id(tensor))
        if known is None:
            known = make_subclass(type(tensor), self._cast_or_empty(tensor), tensor.requires_grad)
            known.__dict__.update(tensor.__dict__)
            for hook in (tensor_hooks(tensor) or {}).values():
                known.register_hook(hook)
            for hook in (post_accumulate_hooks(tensor) or {}).values():
                known.register_post_accumulate_grad_hook(hook)
            self._remember(tensor, known)
        return known  # type: ignore[return-value]

    def buffer(self, tensor: torch.Tensor, *, keep_floats: bool = False) -> torch.Tensor:
        """Return the stand-in of a buffer, a batch tensor or an optimizer's state.

        Small integers and scalars on the CPU keep their values: a step may branch on masks, lengths and counters. With
        `keep_floats` other numbers do too, unless they take gradients: in a batch they may be boxes or padded images.
        """
        known = self.of.get(id(tensor))
        if known is None and is_wrapper(type(tensor)):
            known = map_wrapper(tensor, self.buffer)
            self._remember(tensor, known)
        elif known is None:
            telling = (keep_floats and not tensor.requires_grad) or not tensor.is_floating_point() or tensor.dim() == 0
            small = tensor.device.type == "cpu" and tensor.numel() <= KNOWN_VALUE_LIMIT
            if telling and small and type(tensor) is torch.Tensor:
                known = tensor.detach().clone() if self.compact else _same_layout(tensor.detach())
            elif self.compact and storage_key(tensor) not in self._storages:
                known = torch.empty_like(tensor, device=_META, requires_grad=False)
            else:
                known = self._empty(tensor)
            if tensor.is_floating_point() or tensor.is_complex():
                known.requires_grad_(tensor.requires_grad)
            self._remember(tensor, known)
        return known

    def attribute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a tensor that is a plain attribute of a module."""
        known = self.buffer(tensor)
        self.attributes.append(known)
        return known

    def state(self, parameter: Any, entries: Any) -> Any:
        """Return the stand-in of the optimizer's state of a parameter."""
        if self.param_dtype is None or type(entries) is not dict or not isinstance(parameter, torch.Tensor):
            return self.tree(entries)
        found = {}
        for name, value in entries.items():
            alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
            cast = self._cast(value) if alike else None
            found[name] = self.tree(value) if cast is None else cast
        return found

    def settle(self) -> None:
        """Let go of all but parameters: a buffer that the step replaces is freed as the user's own would be."""
        self.of = {key: tensor for key, tensor in self.of.items() if isinstance(tensor, nn.Parameter)}
        self._storages.clear()
        self.attributes.clear()

    def batch(self, value: Any) -> Any:
        """Return the same structure with every tensor in it replaced, small ones by a copy that keeps its values."""
        return self.tree(value, keep_floats=True)

    def tree(self, value: Any, *, keep_floats: bool = False) -> Any:
        """Return the same structure with every tensor in it replaced."""
        if isinstance(value, nn.Parameter):
            return self.parameter(value)
        if isinstance(value, torch.Tensor):
            return self.buffer(value, keep_floats=keep_floats)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.tree(item, keep_floats=keep_floats) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.tree(item, keep_floats=keep_floats) for item in value)
        if isinstance(value, Mapping):
            items = {key: self.tree(item, keep_floats=keep_floats) for key, item in value.items()}
            return items if type(value) is dict else _rebuilt(value, items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied = copy.copy(value)
            for name, item in dataclass_values(value).items():
                object.__setattr__(copied, name, self.tree(item, keep_floats=keep_floats))
            return copied
        return value

    def _cast_or_empty(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = self._cast(tensor)
        return self._empty(tensor) if cast is None else cast

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.param_dtype is None or not tensor.is_floating_point():
            return None
        return torch.empty_like(tensor, dtype=self.param_dtype, device=_META, requires_grad=False)

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        twin = self._storages.get(key_of(storage))
        if twin is None and tensor.is_contiguous() and storage.nbytes() == tensor.nbytes:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
            self._storages[key_of(storage)] = made.untyped_storage()
            self._kept.append(tensor)
            return made
        if twin is None:
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
            self._storages[key_of(storage)] = twin
            self._kept.append(tensor)
        empty = torch.empty(0, dtype=tensor.dtype, device=_META)
        return empty.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _remember(self, tensor: torch.Tensor, known: torch.Tensor) -> None:
        self.of[id(tensor)] = known
        self.stand_ins.add(id(known))
        self._kept.append(tensor)


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its gaps, or with its elements that are one in memory, as `expand` makes them."""
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    if storage is None or storage.nbytes() > 2 * KNOWN_VALUE_LIMIT * tensor.element_size():
        return tensor.clone()  # a slice of a data set
    copied = torch.empty(0, dtype=tensor.dtype)
    return copied.set_(storage.clone(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _rebuilt(value: Mapping, items: dict) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


@contextlib.contextmanager
def on_meta(model: nn.Module, meta_tensors: MetaTensors) -> Iterator[None]:
    """Replace the model's parameters and buffers by meta tensors; all attributes of all modules are restored."""
    modules = [module for _, module in modules_by_path(model)]
    with same_attributes(modules), _same_tables(modules):
        for module in modules:
            for name, parameter in parameter_table(module).items():
                if parameter is not None:
                    parameter_table(module)[name] = meta_tensors.parameter(parameter)
            for name, buffer in buffer_table(module).items():
                if buffer is not None:
                    buffer_table(module)[name] = meta_tensors.buffer(buffer)
        for module in modules:
            own = [
                (name, value)
                for name, value in vars(module).items()
                if type(value) not in _TENSORLESS and name not in _MODULE_TABLES
            ]
            for name, value in own:
                if isinstance(value, torch.Tensor) and id(value) not in meta_tensors.of and not meta_tensors.compact:
                    vars(module)[name] = meta_tensors.attribute(value)
                elif _mentions(value, meta_tensors):
                    vars(module)[name] = _replaced(value, meta_tensors)
        yield


@contextlib.contextmanager
def _same_tables(modules: list[nn.Module]) -> Iterator[None]:
    """Restore parameters and buffers where the table that holds them is no attribute that `same_attributes` restores.

    It is a library's own kind of dict, or kept elsewhere.
    """
    tables: list[dict[str, Any]] = [
        table
        for module in modules
        for name, table in (("_parameters", parameter_table(module)), ("_buffers", buffer_table(module)))
        if isinstance(table, dict) and (type(table) not in RESTORED or vars(module).get(name) is not table)
    ]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, items in zip(tables, before, strict=True):
            for name in [name for name in table if name not in items]:
                del table[name]
            for name, tensor in items.items():
                if table.get(name) is not tensor:
                    table[name] = tensor


_TENSORLESS = frozenset((bool, int, float, str, type(None), OrderedDict, set))
"""Kinds of attributes in which no tensor is looked for: most of a module's."""
_MODULE_TABLES = frozenset(("_parameters", "_buffers", "_modules"))


def _mentions(value: Any, meta_tensors: MetaTensors) -> bool:
    """Return whether a plain attribute holds tensors that have a stand-in, as an RNN's list of flat weights does."""
    if isinstance(value, torch.Tensor):
        return id(value) in meta_tensors.of
    if type(value) in (list, tuple):
        return any(_mentions(item, meta_tensors) for item in value)
    if type(value) is dict:
        return any(_mentions(item, meta_tensors) for item in value.values())
    return False


def _replaced(value: Any, meta_tensors: MetaTensors) -> Any:
    if isinstance(value, torch.Tensor):
        return meta_tensors.of.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, meta_tensors) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, meta_tensors) for key, item in value.items()}
    return value


def _with_meta_tensors(value: Any, meta_tensors: MetaTensors) -> Any:
    """Copy lists, tuples and dicts with stand-ins for their tensors, also for those that are keys of a dict."""
    if isinstance(value, nn.Parameter):
        return meta_tensors.of.get(id(value), value)
    if isinstance(value, torch.Tensor):
        return meta_tensors.buffer(value)
    if type(value) in (list, tuple):
        return type(value)(_with_meta_tensors(item, meta_tensors) for item in value)
    if type(value) in (dict, defaultdict):
        copied = copy.copy(value)
        copied.clear()
        for key, item in value.items():
            key = meta_tensors.of.get(id(key), key) if isinstance(key, torch.Tensor) else key
            copied[key] = _with_meta_tensors(item, meta_tensors)
        return copied
    return value


@contextlib.contextmanager
def optimizer_on_meta(optimizer: torch.optim.Optimizer, meta_tensors: MetaTensors) -> Iterator[None]:
    """Let an optimizer of the user's own model work on the stand-ins; its groups, state and attributes are put back."""
    known = meta_tensors.of.keys() | meta_tensors.stand_ins
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise InputError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not the model's (the first has shape "
            f"{tuple(strangers[0].shape)}); make it from this model's parameters, or give its class instead"
        )
    groups = [dict(group) for group in optimizer.param_groups]
    state, attributes = optimizer.state, dict(vars(optimizer))
    try:
        for group in optimizer.param_groups:
            group["params"] = [meta_tensors.of.get(id(p), p) for p in group["params"]]
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    group[key] = meta_tensors.buffer(value)
        for name, value in list(vars(optimizer).items()):  # an optimizer may keep its state in attributes
            if name not in ("param_groups", "state", "defaults"):
                vars(optimizer)[name] = _with_meta_tensors(value, meta_tensors)
        optimizer.state = defaultdict(dict)
        for parameter, entries in state.items():
            optimizer.state[meta_tensors.of.get(id(parameter), parameter)] = meta_tensors.state(parameter, entries)
        yield
    finally:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(saved)
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state = state
