"""The methods that `fully_shard` gives a module, under the same names, for the units of a sharded model.

They are attributes of the module itself: its class stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError
from memfit.sharded.custom_comm import AllReduceHook, check_comm
from memfit.sharded.runtime import ShardedRuntime
from memfit.sharded.unit import ShardedUnit, State, check_transition


class UnshardHandle:
    """A gather under way, which `unshard(async_op=True)` gives."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit: ShardedUnit | None = unit

    def wait(self) -> None:
        """Wait for the gather, and set the gathered parameters on the module."""
        if self._unit is not None:
            self._unit.wait()
            if self._unit.gathered:
                self._unit.to_unsharded()
            self._unit = None


class UnitMethods:
    """What can be asked of one unit; `recurse` includes the units inside of it."""

    def __init__(self, runtime: ShardedRuntime, unit: ShardedUnit) -> None:
        self._runtime = runtime
        self._unit = unit

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters, in the dtype of compute; every rank must call it, in the same order."""
        self._runtime.settle()
        if self._unit.state is State.SUMMONED:
            check_transition(self._unit.title, self._unit.state, State.FORWARD)
        self._unit.unshard("forward")
        handle = UnshardHandle(self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters, and set the shards on the module."""
        if self._unit.state is State.IDLE:
            self._unit.to_sharded()
            self._unit.free()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backwards sum gradients over ranks; without, whole gradients stay until one does."""
        for unit in self._units(recurse):
            unit.communicates = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backwards sum gradients over replicas; without, only over the ranks that shard until one does."""
        for unit in self._units(recurse):
            for gradients in unit.gradients:
                gradients.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept what FSDP2 wants to know: here every backward waits for its own sums, and adds to the gradients."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are freed after the forward, and gathered again in the backward."""
        for unit in self._units(recurse):
            unit.options = replace(unit.options, keep=not reshard_after_forward, reshard_ranks=None)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether the backward gathers the parameters; that of an embedding does not read them."""
        self._unit.options = replace(self._unit.options, backward_gather=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units when the forward of this one begins, instead of those that came next before."""
        self._unit.forward_prefetch = self._found(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units when the backward of this one begins, instead of those that ran before it."""
        self._unit.backward_prefetch = self._found(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by this instead of the number of ranks."""
        if not factor > 0:
            raise InputError(f"factor is {factor!r}; give a positive number")
        for gradients in self._unit.gradients:
            gradients.set_divisor(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather the parameters of this unit by a collective of the user's, an `AllGather` of FSDP2's."""
        check_comm(comm, "set_custom_all_gather")
        for flat in self._unit.flats:
            flat.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Sum the gradients of this unit by a collective of the user's, a `ReduceScatter` of FSDP2's.

        It is given sums to make (`op`): what is divided, is divided before and after.
        """
        check_comm(comm, "set_custom_reduce_scatter")
        if any(gradients.has_hook for gradients in self._unit.gradients):
            raise InputError(
                f"{self._unit.title} sums its gradients by the hook of its Reduction, and would never call this "
                "collective; leave one of them out"
            )
        for gradients in self._unit.gradients:
            gradients.custom_reduce_scatter = comm

    def set_all_reduce_hook(self, hook: AllReduceHook, *, stream: torch.cuda.Stream | None = None) -> None:
        """Call a function with this rank's part of the summed gradients, after the sum over replicas if there are any.

        It may change them in place, say by an all-reduce over yet another group; `stream` is where it runs.
        """
        for gradients in self._unit.gradients:
            gradients.all_reduce_hook, gradients.all_reduce_stream = hook, stream

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept what FSDP2 wants to know: gradients are always summed here, and divided apart from it."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse memory of a process group: that of gathered parameters comes and goes under them."""
        if enable:
            raise InputError(
                "gathered parameters are views of memory that comes and goes, which a process group cannot allocate; "
                "leave set_allocate_memory_from_process_group_for_comm out, or use set_custom_all_gather"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse symmetric memory, for the same reason."""
        raise InputError(
            "gathered parameters are views of memory that comes and goes, which cannot be symmetric memory of "
            f"{backend}; leave set_symm_mem_for_comm out, or use set_custom_all_gather"
        )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refuse a second group: gathers and sums of a unit are on one."""
        if enable:
            raise InputError(
                "gathers and sums of a unit share one process group here; leave set_separate_reduce_scatter_group out, "
                "or use set_custom_reduce_scatter with a group of your own"
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether parameters are freed after the backward, or left for the next forward, as between micro-batches.

        The next forward gathers them again where they were changed meanwhile, as the optimizer does.
        """
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept what FSDP2 wants to know: ranks that use different parameters sum what each of them has, always."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accept what bounds FSDP2's buffers of gradients: here gradients are written into what is sent."""
        if max_input_buffers < 1:
            raise InputError(f"max_input_buffers is {max_input_buffers}; give at least 1")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Accept an event that gathers may wait for: here they wait for the stream of the optimizer, which has it."""

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended; the next forward would do so by itself."""
        self._runtime.settle()

    def _units(self, recurse: bool) -> Iterable[ShardedUnit]:
        if not recurse:
            return [self._unit]
        inside = {module for own in self._unit.modules for module in own.modules()}
        return [unit for unit in self._runtime.units if unit.module in inside]

    def _found(self, modules: Sequence[nn.Module]) -> tuple[ShardedUnit, ...]:
        units = {module: unit for unit in self._runtime.units for module in unit.modules}
        for module in modules:
            if module not in units:
                raise InputError(f"a {type(module).__name__} to prefetch is no unit of this model; give its units")
        return tuple(dict.fromkeys(units[module] for module in modules))


METHODS = tuple(name for name in vars(UnitMethods) if not name.startswith("_"))


def attach_methods(runtime: ShardedRuntime) -> None:
    """Give the modules of all units their methods."""
    for unit in runtime.units:
        methods = UnitMethods(runtime, unit)
        for module in unit.modules:
            module.__dict__.update({name: getattr(methods, name) for name in METHODS})
