"""Compares the loop that trains a planned model with the step that was planned, and says once what differs.

Note [What is looked at]: from the first forward under a plan to the first forward after an optimizer step, what the
loop holds is compared with the trace: gradients of the step before while forward runs (where `zero_grad` is called),
the model's output while backward runs and in the next forward, on CUDA also the peak where it is the highest that the
process has seen. What differs is said in one warning, at a forward, where the user's line is on the stack. After that
only the shapes that the model is called with are looked at, and whether it checkpoints by itself.
"""

from __future__ import annotations

import math
import os
import sysconfig
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.engines.attachment import Handler
from memfit.engines.optimizer_watch import OptimizerWatch
from memfit.engines.recompute import is_recomputing
from memfit.engines.step_position import Mode
from memfit.errors import PlanDrift
from memfit.plans import LoopRecord, ModelCallRecord, OutputRecord, Plan, wrappers_of
from memfit.torch_private.autograd import in_backward, top_saved_tensor_hooks
from memfit.torch_private.frames import frame_above
from memfit.torch_private.functorch import transform_active
from memfit.torch_private.pytree import tree_leaves
from memfit.torch_private.storages import key_of
from memfit.torch_private.wrappers import ddp_in_forward
from memfit.units import display_bytes

_MATERIAL = 0.005
"""Part of the planned peak below which a difference is not worth a word."""
_SHARDS = ("FullyShardedDataParallel", "fully_shard")
_LIBRARIES = tuple(
    f"{os.path.abspath(folder)}{os.sep}"
    for folder in (Path(__file__).parents[1], sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
)


class WatchedUnit(NamedTuple):
    """A unit of the plan, where it was when the plan was applied."""

    name: str
    module: weakref.ref[nn.Module]
    mode: Mode


class LoopWatch:
    """Watches every call of a planned model, and passes it to the inner handler."""

    def __init__(
        self, plan: Plan, loop: LoopRecord, model: nn.Module, units: Sequence[WatchedUnit], inner: Handler
    ) -> None:
        assert plan.predicted is not None
        self._plan, self._loop, self._units, self._inner = plan, loop, units, inner
        self._peak_bytes = plan.predicted.peak_bytes
        self._model = weakref.ref(model)
        self._calls = 0
        self._stepped = False
        self._mode = True
        self._seen = False
        self._found: list[str] = []
        self._last_output: list[tuple[StorageWeakRef, int]] = []
        self._known: set[Any] = set()
        self._told: set[str] = set()
        self._highest_bytes: int | None = None
        self._optimizers = OptimizerWatch(_weak_hook(self), model)

    def follow(self, other: LoopWatch) -> None:
        """Watch as one of several models of a step: only calls are compared, and each warning is given once."""
        self.stop()
        other.stop()
        self._told = other._told

    def stop(self) -> None:
        """Stop watching what the loop holds."""
        self._mode = False
        self._optimizers.remove()

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first = self._before_forward(args, kwargs)
        output = self._inner(module, forward, args, kwargs)
        if first:
            self._compare_output(output)
        return output

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare what is there before a forward of a training step. True for the first that is looked at."""
        if is_recomputing() or transform_active():  # torch.func: tensors of its own
            return False
        if not any(unit.mode.training for unit in self._units):
            return False
        if not self._seen:
            self._seen = True
            self._see_units()
            self._see_wrappers()
        self._compare_inputs(args, kwargs)
        if self._mode:
            self._begin()
        return self._mode and self._calls == 1

    def _see_units(self) -> None:
        """Warn of units that are no longer in the model: what replaced them has no plan."""
        model = self._model()
        here = set() if model is None else {id(each) for each in model.modules()}
        gone = [unit.name for unit in self._units if id(unit.module()) not in here]
        if gone:
            self.warn(
                "gone",
                f"{len(gone)} of {len(self._units)} units of the plan are no longer part of the model, {gone[0]!r} for "
                "one: what took their place since apply runs without the plan, and the budget of "
                f"{display_bytes(self._plan.budget_bytes)} may not be kept. Call plan.remove(model), then apply again",
            )

    def _see_wrappers(self) -> None:
        """Warn that the model has been wrapped or sharded since the plan was applied."""
        model = self._model()
        found = [] if model is None else [each for each in wrappers_of(model) if each in _SHARDS]
        if ddp_in_forward() is not None and self._plan.ddp is None:
            found.insert(0, "DistributedDataParallel")
        if found:
            self.warn(
                "wrapped",
                f"the model is in {', '.join(found)} since the plan was applied: its checkpoint policies are carried "
                "out, and its memory was predicted without what the wrapper shards, gathers or buckets",
            )

    def leave_wrappers(self) -> None:
        """Give no warning about wrappers: it has been given."""
        self._told.add("wrapped")

    # -- what the loop holds ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a forward; the first one after an optimizer step ends the comparison."""
        model = self._model()
        self._calls += 1
        if self._calls == 1:
            self._highest_bytes = _highest_cuda_bytes(model)
        if not self._stepped and self._calls <= 4 * max(1, len(self._loop.calls)):
            return
        if self._stepped and model is not None:
            self._compare_gradients(model)
            self._compare_last_output()
        self.stop()
        if self._found:
            self.warn(
                "loop",
                "this loop is not the step that was planned: "
                + "; ".join(self._found)
                + ". Plan the step as the loop runs it (docs/apply.md says which memfit.Step that is)",
            )

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is None or self._calls == 0 or self._stepped:
            return
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            return
        self._stepped = True
        before, now = self._highest_bytes, _highest_cuda_bytes(model)
        if before is not None and now is not None and now > before and now > self._peak_bytes * 1.01:
            self._found.append(
                f"the peak of the first step is {display_bytes(now)} and was planned as "
                f"{display_bytes(self._peak_bytes)}"
            )

    def _compare_gradients(self, model: nn.Module) -> None:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        if not all(_is_plain(each) for each in gradients):  # sharded, sparse: counted otherwise than planned
            return
        storages = [each.untyped_storage() for each in gradients]
        here = sum({key_of(each): each.nbytes() for each in storages}.values())
        planned = self._loop.gradients_in_forward_bytes
        if self._material(here - planned):
            self._found.append(
                "gradients of the step before are there while forward runs (zero_grad is called after it, or sets them "
                f"to zero): {display_bytes(here - planned)} more than planned. "
                "memfit.Step(zero_grad='before_backward') where it is called between forward and backward, "
                "set_to_none=False where it sets to zero"
            )
        elif self._material(planned - here):
            self._found.append(
                f"no gradients are there while forward runs: {display_bytes(planned - here)} less than planned. "
                "memfit.Step(zero_grad='after_step') makes a faster plan"
            )

    def _compare_output(self, output: Any) -> None:
        """Check, when backward reaches the output, which of its tensors are still held."""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        made = [leaf.untyped_storage() for leaf in leaves if leaf.grad_fn is not None and _is_plain(leaf)]
        self._last_output = [(StorageWeakRef(each), each.nbytes()) for each in made]
        planned = next((call for call in self._loop.calls if len(call.outputs) == len(leaves)), None)
        if planned is None:
            return
        tensors = [
            (fact, StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes())
            for leaf, fact in zip(leaves, planned.outputs, strict=True)
            if fact.held != "other" and _is_plain(leaf)
        ]
        asked = False

        def ask(_: Any) -> None:
            nonlocal asked
            if not asked:
                asked = True
                self._compare_held(tensors)

        for leaf in leaves:
            if leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(ask)

    def _compare_last_output(self) -> None:
        """Check, in the forward of the second step, whether the output of the first is still held."""
        held = sum({ref.cdata: size for ref, size in self._last_output if not ref.expired()}.values())
        self._last_output = []
        if len(self._loop.calls) > 1 or self._peak_bytes + held <= self._plan.budget_bytes:
            return  # the outputs of earlier micro-batches are planned to be there; or there is room for it
        if self._material(held):
            self._found.append(
                f"the output of the step before is there while forward runs: {display_bytes(held)} more than planned. "
                "Let it go before the next forward (del output), or run the step in a function of its own"
            )

    def _compare_held(self, tensors: list[tuple[OutputRecord, StorageWeakRef, int]]) -> None:
        more = {ref.cdata: size for fact, ref, size in tensors if fact.held == "nothing" and not ref.expired()}
        less = {ref.cdata: size for fact, ref, size in tensors if fact.held == "step" and ref.expired()}
        if self._material(sum(more.values())):
            self._found.append(
                f"the model's output is kept while backward runs: {display_bytes(sum(more.values()))} more than "
                "planned. Let it go (loss = model(...).loss), or plan with memfit.Step(keep_output=True)"
            )
        elif self._material(sum(less.values())):
            self._found.append(
                f"the model's output is gone before backward: {display_bytes(sum(less.values()))} less than planned. "
                "memfit.Step(keep_output=False) makes a faster plan"
            )

    def _material(self, difference_bytes: int) -> bool:
        return difference_bytes > _MATERIAL * self._peak_bytes

    # -- shapes, and checkpointing that was not planned -------------------------------------------------------------

    def _compare_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = tuple(leaf.shape for leaf in leaves)
        if "inputs" in self._told or shapes in self._known or not self._loop.calls:
            return
        self._known.add(shapes)
        alike = [call for call in self._loop.calls if len(call.inputs) == len(shapes)]
        larger = [_larger(shapes, call) for call in alike] or [_largest(shapes, self._loop)]
        if not all(larger):
            return
        here, planned = larger[0][0]
        ratio = math.prod(here) / max(1, math.prod(planned))
        self.warn(
            "inputs",
            f"the model is called with a tensor of shape {tuple(here)} where the plan has {tuple(planned)}, "
            f"{ratio:.2f} times as large: activations take about as many times what was planned, and the peak may be "
            f"above the budget of {display_bytes(self._plan.budget_bytes)}. Plan the step with the largest batch that "
            "comes",
        )

    def see_checkpointing(self, unit: nn.Module) -> None:
        """Say once that the model checkpoints by itself, where it did not in the plan."""
        if self._loop.recomputes or "checkpointing" in self._told or not checkpointed_by_itself():
            return
        self.warn(
            "checkpointing",
            f"a {type(unit).__name__} of the plan runs inside torch.utils.checkpoint (gradient_checkpointing_enable "
            "and its like), and did not when the step was planned: it is recomputed as that does, without its "
            "policy, and memory is not what was predicted. Switch the model's own checkpointing off, or plan the step "
            "with it",
        )

    def leave_inputs(self) -> None:
        """Give no warning about larger inputs: somebody else does."""
        self._told.add("inputs")

    def warn(self, kind: str, text: str) -> None:
        """Give a warning of this kind, once."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(text, PlanDrift, stacklevel=user_level())


def checkpointed_by_itself() -> bool:
    """Return whether a forward runs inside `torch.utils.checkpoint`: its first run or a reentrant recompute."""
    if in_backward():
        return True
    hooks = top_saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def user_level() -> int:
    """Return the stacklevel, for a warning of the caller, of the innermost frame outside libraries."""
    frame, level = frame_above(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _larger(shapes: tuple[torch.Size, ...], call: ModelCallRecord) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        (tuple(here), planned.shape)
        for here, planned in zip(shapes, call.inputs, strict=True)
        if math.prod(here) > math.prod(planned.shape)
    ]


def _largest(shapes: tuple[torch.Size, ...], loop: LoopRecord) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Compare the largest tensors of a call that has another number of them than any that was planned."""
    here = max(shapes, key=math.prod, default=torch.Size([0]))
    planned = max((each.shape for call in loop.calls for each in call.inputs), key=math.prod, default=())
    return [(tuple(here), planned)] if planned and math.prod(here) > math.prod(planned) else []


def _highest_cuda_bytes(model: nn.Module | None) -> int | None:
    first = None if model is None else next(iter(model.parameters()), None)
    if first is None or first.device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(first.device)


def _weak_hook(watch: LoopWatch) -> Callable[[torch.optim.Optimizer], None]:
    reference = weakref.ref(watch)

    def hook(optimizer: torch.optim.Optimizer) -> None:
        found = reference()
        if found is not None:
            found._optimizer_stepped(optimizer)

    return hook
