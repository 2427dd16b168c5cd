"""The state that a step works on, kept while steps are run and put back exactly.

Note [As found]: kept are the values of every tensor that the model, its optimizers and the batch hold, the attributes
of modules, optimizers, schedulers and gradient scalers with the lists and dicts among them (hooks are such), gradients,
and the generators of torch, Python and numpy. Copies of tensors are made once, in host memory. Values that a step
keeps elsewhere, in globals, iterators or generators of its own, are not known here and go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.capture import Companions, Step, dataclass_values, same_attributes
from memfit.torch_private.autograd import preserve_version_counters
from memfit.torch_private.storages import storage_key

_DEPTH = 8


class Found:
    """A step's state as it was found."""

    def __init__(self, step: Step, model: nn.Module) -> None:
        companions = Companions.of(step, model)
        self.optimizers = companions.optimizers
        self._objects: list[Any] = [*model.modules(), *companions.all]
        tensors = [tensor for thing in self._objects for tensor in tensors_in(vars(thing))]
        tensors += tensors_in(step.batch)
        self._leaves = list({id(t): t for t in tensors if t.requires_grad and t.is_leaf}.values())
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._counted = tuple({id(t): t for t in strided if not t.is_inference()}.values())
        storages = {storage_key(tensor): tensor.untyped_storage() for tensor in strided}
        self._copies = [(storage, _copy(storage)) for storage in storages.values()]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore everything after the block; inside it gradients are None at first."""
        gradients = [(leaf, leaf.grad) for leaf in self._leaves]
        with (
            preserve_version_counters(self._counted),
            same_generators(),
            same_attributes(self._objects),
        ):
            try:
                for leaf in self._leaves:
                    leaf.grad = None
                yield
            finally:
                for storage, copy in self._copies:
                    storage.copy_(copy)
                for leaf, gradient in gradients:
                    leaf.grad = gradient


def tensors_in(value: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """Return the tensors in a nested structure; modules are not looked into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, str | bytes | nn.Module):
        return []
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = dataclass_values(value).values()
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()


# -- The generators of random numbers that a step may use: torch's on every device, Python's and numpy's --------------


def generators() -> tuple[Any, ...]:
    """Return the states of all random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def set_generators(states: tuple[Any, ...]) -> None:
    """Restore all generators to these states."""
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


@contextlib.contextmanager
def same_generators() -> Iterator[None]:
    """Restore all generators after the block."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)
