"""The loss under a plan: `plan.loss`, and losses that a model computes itself.

Note [Loss region]: a loss is no module, so its ops are recorded while they run (Note [Tape]). A loss inside the model
is recorded from the end of the last module before it to the end of the model's call, and nobody has to do anything for
it. A loss outside the model is recorded by the function that `plan.loss` returns: each call of the model chooses the
policy of the region that follows it, and the next call of that function takes it. A backward that comes to the model's
output before the policy was taken belongs to a loss that did not go through `plan.loss`, which is told once.

A plan that computes the loss in chunks (Note [Chunked loss]) has no policy for it. Torch's cross entropy is replaced
while the model's forward runs, where the loss is inside, else while the function that `plan.loss` returned does.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.capture import chunked_losses
from memfit.engines.attachment import Handler
from memfit.engines.compiled_policy import RunPolicy
from memfit.engines.recompute import is_recomputing
from memfit.engines.step_position import Calls, Mode
from memfit.engines.tape import Tape
from memfit.errors import InputError
from memfit.paths import module_label
from memfit.plans import Plan, named_modules
from memfit.torch_private.autograd import in_backward, saved_tensor_hooks_enabled, top_saved_tensor_hooks
from memfit.torch_private.dispatch import current_dispatch_mode
from memfit.torch_private.functorch import transform_active
from memfit.torch_private.pytree import tree_leaves

if TYPE_CHECKING:
    from memfit.engines.local import Applied


_R = TypeVar("_R")
LossPolicy = tuple[RunPolicy, str | None, int]
"""The policy, the module after which the region begins (None: after the model), and after which call of it."""

_regions: weakref.WeakSet[LossRegion] = weakref.WeakSet()
"""Those of all plans that are applied."""
_functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""What `plan.loss` has returned, as long as somebody holds it."""
_numbers = itertools.count()
_LOSS_NOT_COMPILED = (
    "a loss that a memfit plan recomputes is not compiled, nor is what it calls: it would run other ops"
)


def plan_loss(plan: Plan, loss: Callable[..., _R]) -> Callable[..., _R]:
    """Return the loss function as the plan runs it, recomputed or in chunks; where it does neither, as it is."""
    if not callable(loss):
        raise InputError(f"plan.loss takes the function that computes the loss, not a {type(loss).__name__}")
    known: weakref.WeakKeyDictionary[LossRegion, bool] = weakref.WeakKeyDictionary()

    @torch.compiler.disable(reason=_LOSS_NOT_COMPILED)
    def run_recorded(*args: Any, **kwargs: Any) -> _R:
        armed = _take_policy(plan, known)
        if armed is not None and armed.policy is None:
            with _in_chunks(armed.region.plan):
                return loss(*args, **kwargs)
        if armed is None or armed.policy is None or not _may_record():
            return loss(*args, **kwargs)
        region = armed.region
        assert isinstance(region, RecomputedLossRegion)
        tape = region.new_tape(armed.policy)
        result = tape.run(loss, args, kwargs)
        region.end_tape(tape)
        return result

    @functools.wraps(loss, updated=())
    def planned_loss(*args: Any, **kwargs: Any) -> _R:
        if not _regions or not torch.is_grad_enabled() or is_recomputing() or in_backward():
            return loss(*args, **kwargs)
        return run_recorded(*args, **kwargs)

    _functions.add(planned_loss)
    return planned_loss


def has_planned_loss() -> bool:
    """Return whether there is a loss function that `plan.loss` returned, of whichever plan."""
    return len(_functions) > 0


@dataclass(slots=True)
class _Armed:
    """The policy for the next loss, None for one in chunks; `number` orders the policies of several models."""

    region: LossRegion
    policy: RunPolicy | None
    number: int = field(default_factory=lambda: next(_numbers))


def _take_policy(plan: Plan, known: weakref.WeakKeyDictionary[LossRegion, bool]) -> _Armed | None:
    """Take the policy that the last call of the plan's model chose.

    Where no model runs this plan any more, because a guard has applied another one, it is that of the last model.
    """
    regions = list(_regions)
    for region in regions:
        if region not in known:
            known[region] = region.plan is plan or region.plan == plan
    own = [region for region in regions if known[region]]
    waiting = [region.armed for region in own or regions if region.armed is not None]
    if not waiting:
        return None
    armed = max(waiting, key=lambda each: each.number)
    armed.region.armed = None
    return armed


def _may_record() -> bool:
    """Return whether a region can be recorded here: hooks of the user's own (offloading) get what autograd saves."""
    return saved_tensor_hooks_enabled() and top_saved_tensor_hooks() is None and not transform_active()


class LossRegion(abc.ABC):
    """Handles the calls of a model whose loss is recomputed or in chunks, and passes them to the inner handler."""

    def __init__(self, applied: Applied, mode: Mode, inner: Handler | None) -> None:
        self.plan = applied.plan
        self.armed: _Armed | None = None
        self._applied = applied
        self._mode = mode
        self._inner = inner
        _regions.add(self)

    def end(self) -> None:
        """Drop the policy of a loss that did not come."""
        self.armed = None

    def close(self) -> None:
        """Detach from all further losses."""
        self.end()
        _regions.discard(self)

    def __call__(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def run() -> Any:
            if self._inner is not None:
                return self._inner(model, forward, args, kwargs)
            return forward(*args, **kwargs)

        if is_recomputing() or in_backward():
            return run()
        if not self._mode.training:
            self.end()
            result = run()
            if self._mode.evaluated_unlike_planned:
                self._applied.warn_evaluated(module_label(""), result)
            return result
        return self._run_planned(model, run)

    @abc.abstractmethod
    def _run_planned(self, model: nn.Module, run: Callable[[], Any]) -> Any:
        """Run a call of the model in training."""

    def _watch_backward(self, result: Any, armed: _Armed) -> None:
        """Note when a backward reaches the model's output, and whether its loss went through `plan.loss`."""

        def begun(_: Any) -> None:
            self._applied.position.leave()
            if self.armed is armed:
                self._applied.warn_loss_missing()

        nodes = (each.grad_fn for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        node = next((each for each in nodes if each is not None), None)
        if node is not None:
            node.register_prehook(begun)


class ChunkedLossRegion(LossRegion):
    """Handles the calls of a model whose loss is computed in chunks."""

    def _run_planned(self, model: nn.Module, run: Callable[[], Any]) -> Any:
        assert self.plan.chunked_loss
        if self.plan.chunked_loss.inside:
            with _in_chunks(self.plan):
                return run()
        result = run()
        self.armed = armed = _Armed(self, None)
        self._watch_backward(result, armed)
        return result


@contextlib.contextmanager
def _in_chunks(plan: Plan) -> Iterator[None]:
    """Compute the losses of the block in the plan's chunks; whole inside `torch.func`, which checkpoints nothing."""
    if not plan.chunked_loss or transform_active():
        yield
        return
    with chunked_losses(plan.chunked_loss.setting):
        yield


class RecomputedLossRegion(LossRegion):
    """Handles the calls of a model whose loss is recomputed in backward."""

    def __init__(self, applied: Applied, mode: Mode, calls: Calls, inner: Handler | None) -> None:
        super().__init__(applied, mode, inner)
        self._calls = calls
        self._found: dict[str, weakref.ref[nn.Module]] = {}
        self._begin = torch.compiler.disable(_begin_recording)  # called in the module before, which may be compiled

    def _run_planned(self, model: nn.Module, run: Callable[[], Any]) -> Any:
        found: LossPolicy | None = self._calls.next()
        if found is None:  # a further call of the model before its loss: the policy goes on waiting
            return run()
        policy, after, call = found
        if after is not None:
            return self._record_inside(self._last(model, after), call, policy, run)
        result = run()
        self.armed = armed = _Armed(self, policy)
        self._watch_backward(result, armed)
        return result

    def new_tape(self, policy: RunPolicy) -> Tape:
        """Return a tape for one loss."""
        return Tape(policy, self._applied.device_type, self._applied.position.leave)

    def end_tape(self, tape: Tape) -> None:
        """Record nothing more, and tell of a loss that was not the planned one."""
        differs = tape.end_region()
        if differs is not None:
            self._applied.warn_loss(differs)

    def _last(self, model: nn.Module, path: str) -> nn.Module | None:
        """Find the module at whose end the region begins; None for the model itself."""
        if not path:
            return None
        known = self._found.get(path)
        module = None if known is None else known()
        if module is None:
            module = dict(named_modules(model))[path]
            self._found[path] = weakref.ref(module)
        return module

    def _record_inside(self, last: nn.Module | None, call: int, policy: RunPolicy, run: Callable[[], Any]) -> Any:
        """Record from the end of a call of `last` to the end of the model's call; all of it where `last` is None."""
        tape = self.new_tape(policy)
        with contextlib.ExitStack() as recording:
            if last is None:
                _begin_recording(tape, recording)
                result = run()
            else:
                with _after_call(last, call, lambda: self._begin(tape, recording)):
                    result = run()
        self.end_tape(tape)
        return result


def _begin_recording(tape: Tape, recording: contextlib.ExitStack) -> None:
    """Record until the block of the model's call ends.

    A mode or hooks that a block around the last module opened would be closed before ours are: nothing is recorded.
    """
    if current_dispatch_mode() is None and _may_record():
        recording.enter_context(saved_tensors_hooks(tape.pack, Tape.unpack))
        recording.enter_context(tape)


@contextlib.contextmanager
def _after_call(module: nn.Module, call: int, function: Callable[[], None]) -> Any:
    """Call the function when this call of the module inside the block, counted from 0, has ended."""
    before = module.__dict__.get("forward")
    forward = module.forward
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = forward(*args, **kwargs)
        count += 1
        if count == call + 1:
            function()
        return result

    module.__dict__["forward"] = counted
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
