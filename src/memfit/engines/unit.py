"""A module of a model that has a plan: which call of it runs under which policy."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from memfit.engines.compiled_policy import CompiledPolicy, RunPolicy
from memfit.engines.forward_context import Bindings
from memfit.engines.loop_watch import checkpointed_by_itself
from memfit.engines.offload import OffloadedCall, run_watched
from memfit.engines.policy_compiler import PolicyCompiler
from memfit.engines.recompute import RecomputedCall, is_recomputing
from memfit.engines.shapes import Changing, InputFamily, Sizes, kind_of_call, structure_of_call
from memfit.engines.step_position import Calls, Mode
from memfit.engines.tape import Tape
from memfit.torch_private.autograd import in_backward
from memfit.torch_private.compiler import called_by_compiler
from memfit.torch_private.functorch import transform_active

if TYPE_CHECKING:
    from memfit.engines.local import Applied


class _Unplanned(enum.Enum):
    """What is done with a kind of input on which the unit does not run as planned."""

    WHOLE = "everything is dropped and recomputed"
    AS_IT_IS = "nothing is dropped, because the unit writes to what was there before it"


_MOST_MISSES = 4
"""Calls in a row that run otherwise than compiled before the policy is compiled anew: LayerDrop skips single ones."""
_LONGEST_WAIT = 64


@dataclass(slots=True)
class _Tries:
    """How the calls of one kind went: as compiled, and whether their policy could be compiled."""

    hit: bool = False
    misses: int = 0
    failures: int = 0
    wait: int = 0

    def note(self, *, same: bool) -> None:
        """Count a run under a compiled policy."""
        self.hit, self.misses = self.hit or same, 0 if same else self.misses + 1

    def fail(self) -> None:
        """Count a call that did not run as planned, after which more and more are not looked at."""
        self.misses = 0
        self.failures += 1
        self.wait = min(2**self.failures - 2, _LONGEST_WAIT)

    def compiles_anew(self, compiled: CompiledPolicy | _Unplanned | None) -> bool:
        """Return whether the next call is compiled again although a policy is known."""
        if isinstance(compiled, CompiledPolicy):
            return self.misses >= (_MOST_MISSES if self.hit else 1)
        self.wait -= 1
        return self.wait < 0


_MOST_KINDS = 64
"""Kinds of inputs whose compiled policies are kept; a unit that sees more begins anew."""


class PlannedUnit:
    """Runs the calls of one module as the plan says; calls that the plan does not name run as they are."""

    def __init__(
        self,
        applied: Applied,
        mode: Mode,
        calls: Calls,
        next_modules: Mapping[str, weakref.ref[nn.Module]] | None = None,
    ) -> None:
        self._applied = applied
        self._mode = mode
        self._calls = calls
        self._compiled: dict[tuple[int, Hashable], CompiledPolicy | _Unplanned] = {}
        self._tries: dict[tuple[int, Hashable], _Tries] = {}
        self._families: dict[Hashable, InputFamily] = {}
        self._bindings: Bindings | None = None
        self._looked = False
        self._runs = 0
        self._next_modules = next_modules or {}
        """By path, those that units wait for with what they offload."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_recomputing() or transform_active():  # torch.func knows no hooks for saved tensors
            return forward(*args, **kwargs)
        if not self._mode.training:
            result = forward(*args, **kwargs)
            if self._mode.evaluated_unlike_planned:
                self._applied.warn_evaluated(self._calls.name, result)
            return result
        if not self._looked:
            self._looked = True
            if called_by_compiler():
                self._applied.warn_compiled(self._calls.name)
        self._applied.see_checkpointing(module)
        if in_backward():
            return forward(*args, **kwargs)
        position = self._applied.position
        policy = self._calls.next()
        offloads = self._applied.offloads
        if offloads is None:
            return self._run_policy(policy, position.leave, module, forward, args, kwargs)[0]
        with offloads.call() as call:

            def begin_backward() -> None:
                position.leave()
                call.begin_backward()

            if policy is None:
                result, offloaded = position.leave_after(run_watched(call, forward, args, kwargs)), None
            else:
                result, offloaded = self._run_policy(policy, begin_backward, module, forward, args, kwargs)
        following = None if policy is None else self._next_module(policy)
        offloads.end_call(call, module, offloaded, following)
        return result

    def _next_module(self, policy: RunPolicy) -> weakref.ref[nn.Module] | None:
        """Return the module whose next call what the policy offloads waits for."""
        return self._next_modules.get(policy.offload_next) if policy.offload_next is not None else None

    def _run_policy(
        self,
        policy: RunPolicy | None,
        begin_backward: Callable[[], None],
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, OffloadedCall | None]:
        """Run a call under its policy, and return what it offloads too."""
        position = self._applied.position
        if policy is None or checkpointed_by_itself():  # which counts what is saved in both of its runs
            return position.leave_after(forward(*args, **kwargs)), None
        device_type = self._applied.device_type
        try:
            kind = (policy.call, kind_of_call(args, kwargs, device_type))
        except Changing:
            tape = Tape(policy, device_type, begin_backward)
            result = tape.run(forward, args, kwargs)
            if tape.differs is not None:
                self._applied.warn(policy.unit, tape.differs)
            return result, tape.offloaded
        compiled = self._compiled.get(kind)
        if compiled is None:
            compiled = self._predict(kind, args, kwargs)
        if compiled is not None and self._tries[kind].compiles_anew(compiled):
            compiled = None
        if compiled is _Unplanned.AS_IT_IS:
            return position.leave_after(forward(*args, **kwargs)), None
        if self._bindings is None:
            self._bindings = Bindings(module, fully_sharded=self._applied.fully_sharded)
        run = RecomputedCall(policy.unit, module, self._bindings, forward, device_type, begin_backward)
        self._runs += 1
        run.watched = self._runs & (self._runs - 1) == 0  # see Note [Samples]
        if compiled is None:
            return self._compile_policy(policy, module, kind, run, args, kwargs), run.offloaded
        if compiled is _Unplanned.WHOLE:
            return run.run_forward_dropping_all(args, kwargs), None
        assert isinstance(compiled, CompiledPolicy)
        result, same = run.run_forward(compiled, args, kwargs)
        tries = self._tries.setdefault(kind, _Tries())
        tries.note(same=same)
        if not same and not tries.hit:
            family, _ = self._family(kind, args, kwargs)
            if family is not None:
                family.miss()
        return result, run.offloaded

    def _family(
        self, kind: tuple[int, Hashable], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InputFamily | None, Sizes]:
        """Find the family of a call (Note [Shapes]), and the sizes of its inputs."""
        found = structure_of_call(args, kwargs)
        if found is None:
            return None, ()
        structure, sizes = found
        autocast = kind[1][0] if isinstance(kind[1], tuple) else None
        if len(self._families) >= _MOST_KINDS:
            self._families.clear()
        return self._families.setdefault((kind[0], autocast, structure), InputFamily()), sizes

    def _predict(
        self, kind: tuple[int, Hashable], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CompiledPolicy | None:
        """Return the compiled policy of a kind that has none yet, where others tell it."""
        family, sizes = self._family(kind, args, kwargs)
        compiled = None if family is None else family.predict(sizes)
        if compiled is not None:
            self._remember(kind, compiled)
        return compiled

    def _remember(self, kind: tuple[int, Hashable], compiled: CompiledPolicy | _Unplanned) -> None:
        if len(self._compiled) >= _MOST_KINDS:
            self._compiled.clear()
            self._tries.clear()
        self._compiled[kind] = compiled
        self._tries.setdefault(kind, _Tries())

    def _compile_policy(
        self,
        policy: RunPolicy,
        module: nn.Module,
        kind: tuple[int, Hashable],
        run: RecomputedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        compiler = PolicyCompiler(policy, module, run, tried_before=kind in self._tries)
        result, compiled = compiler.run_forward(args, kwargs)
        if compiled is None:
            if not isinstance(self._compiled.get(kind), CompiledPolicy):  # one that has been right may be so again
                self._remember(kind, _Unplanned.AS_IT_IS if compiler.writes_older else _Unplanned.WHOLE)
            tries = self._tries[kind]
            tries.fail()
            if compiler.ran or tries.failures > 2:  # a call that runs nothing is skipped by LayerDrop
                self._applied.warn(policy.unit, compiler.differs)
            return result
        self._remember(kind, compiled)
        self._tries[kind] = _Tries()
        if not compiler.writes_older:
            family, sizes = self._family(kind, args, kwargs)
            if family is not None:
                family.add(sizes, compiled)
        return result


class BoundaryUnit:
    """A module without a policy that units before it wait for with what they offload (offload.py, Note [Offload])."""

    def __init__(self, applied: Applied, mode: Mode) -> None:
        self._applied = applied
        self._mode = mode

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        offloads = self._applied.offloads
        if offloads is None or is_recomputing() or transform_active() or in_backward() or not self._mode.training:
            return forward(*args, **kwargs)
        with offloads.call() as call:
            result = run_watched(call, forward, args, kwargs)
        offloads.end_call(call, module)
        return result
