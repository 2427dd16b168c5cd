"""Runs one unit under one policy for real: saved tensor hooks that drop, a second run that stops where it should.

It knows a policy's fields and the rule that goes with them, nothing of how policies are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.capture import Trace
from memfit.tradeoff import Policy, Unit


class _Stop(Exception):
    """The second run has gone as far as the policy says."""


class Execution:
    """Replaces the forward of a unit's module. `discardable` are storages of the trace.

    After a backward, `names` are the ops of the first run, `ran` the offsets of those that ran again, and `freed`
    says that everything dropped was gone by then.
    """

    def __init__(self, module: nn.Module, trace: Trace, unit: Unit, policy: Policy, discardable: set[int]) -> None:
        self.forward, self.policy = module.forward, policy
        self.made = [[ref.storage for ref in op.outputs] for op in trace.ops[unit.begin : unit.end]]
        self.dropped = {s for s in discardable if _result(trace, unit, s) in policy.dropped}
        self.names: list[str] = []
        self.ran: list[int] = []
        self.freed = False
        self.kept: dict[int, Any] = {}
        self.again: dict[int, torch.Tensor] | None = None
        module.forward = self.first_run  # type: ignore[method-assign]

    def first_run(self, *args: Any, **kwargs: Any) -> Any:
        self.inputs = (args, kwargs)
        self.generator = torch.get_rng_state()
        self.gone: list[StorageWeakRef] = []
        watch = _First(self)
        packed = 0

        def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
            nonlocal packed
            packed += 1
            storage = tensor.untyped_storage()
            if watch.numbers.get(storage._cdata) in self.dropped:
                self.gone.append(StorageWeakRef(storage))
                return packed - 1, None
            return packed - 1, _detached(tensor)

        def unpack(handle: tuple[int, torch.Tensor | None]) -> torch.Tensor:
            number, tensor = handle
            if tensor is not None:
                return tensor
            if self.again is None:
                self.again = self.second_run()
            assert number in self.again, f"tensor {number} is not packed again by op {self.policy.stop}"
            return self.again[number]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), watch:
            result = self.forward(*args, **kwargs)
        watch.alive.clear()
        return result

    def second_run(self) -> dict[int, torch.Tensor]:
        """Every tensor that is packed again, by its number."""
        self.freed = all(storage.expired() for storage in self.gone)
        found: dict[int, torch.Tensor] = {}
        seen: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> None:
            found[len(found)] = _detached(tensor)

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            return seen.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

        args, kwargs = tree_map_only(torch.Tensor, fresh, self.inputs)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle)
        with _random_state(self.generator), torch.enable_grad(), hooks:
            try:
                with _Second(self):
                    self.forward(*args, **kwargs)
            except _Stop:
                pass
        return found


def _result(trace: Trace, unit: Unit, storage: int) -> tuple[int, int]:
    """The op that makes a storage and its place among the new storages of that op."""
    op = trace.storages[storage].alloc_at
    new = dict.fromkeys(ref.storage for ref in trace.ops[op].outputs if trace.storages[ref.storage].alloc_at == op)
    return op - unit.begin, list(new).index(storage)


class _First(TorchDispatchMode):
    """Keeps what the policy saves, and knows the storages by their numbers in the trace."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()
        self.execution = execution
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        execution = self.execution
        result = func(*args, **(kwargs or {}))
        op = len(execution.names)
        execution.names.append(str(func))
        tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if op < len(execution.made):
            for tensor, number in zip(tensors, execution.made[op], strict=True):
                self.numbers.setdefault(tensor.untyped_storage()._cdata, number)
        self.alive += [tensor.untyped_storage() for tensor in tensors]
        if op in execution.policy.saved:
            execution.kept[op] = tree_map_only(torch.Tensor, _detached, result)
        return result


class _Second(TorchDispatchMode):
    """Answers for saved ops, lets the others run, and stops."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()
        self.execution = execution
        self.op = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op += 1
        if self.op > self.execution.policy.stop:
            raise _Stop
        if self.op in self.execution.policy.saved:
            return tree_map_only(torch.Tensor, _detached, self.execution.kept[self.op])
        self.execution.ran.append(self.op)
        return func(*args, **(kwargs or {}))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return tensor.detach()


@contextmanager
def _random_state(state: torch.Tensor) -> Iterator[None]:
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    yield
    torch.set_rng_state(now)
