"""A plan on one device: `apply` makes a model run it, `remove` makes the model what it was."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memfit.capture import implementations, is_container, set_flags, set_implementation
from memfit.engines.attachment import Handler, Outermost, attach, attached, detach
from memfit.engines.compiled_policy import RunPolicy, absent_casts, next_units
from memfit.engines.loop_watch import LoopWatch, WatchedUnit, user_level
from memfit.engines.loss import ChunkedLossRegion, LossRegion, RecomputedLossRegion
from memfit.engines.mesh_agreement import agree, check_wrapped, compare_kinds, kind_of
from memfit.engines.offload import Offloads
from memfit.engines.offload_store import open_store
from memfit.engines.optimizer_watch import OptimizerWatch
from memfit.engines.selection import check_ranks, check_replicas, resolve_engine, warn_policies_only
from memfit.engines.step_position import Calls, Mode, StepPosition, needs_step
from memfit.engines.unit import BoundaryUnit, PlannedUnit
from memfit.errors import InputError, MemfitError, MissingFeatureError, PlanDrift, StateError
from memfit.plans import (
    Checkpoint,
    Engine,
    Plan,
    PlanMismatch,
    find_model_differences,
    find_optimizer_differences,
    named_modules,
    unwrap,
    wrappers_of,
)
from memfit.torch_private.pytree import tree_leaves
from memfit.units import display_budget, display_bytes

if TYPE_CHECKING:
    from memfit.engines.fsdp2 import Fsdp2Sharding

_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()


class Applied:
    """A plan applied to a model. The planned modules own it and route their calls to it."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan = plan
        self._paths = dict(named_modules(model))
        first = next(iter(model.parameters()), None)
        self.device_type = "cpu" if first is None else first.device.type
        own = wrappers_of(model) if plan.mesh else ()
        self.fully_sharded = "DTensor" not in own or "fully_shard" in own
        """Whether DTensors among the parameters are shards, which a runtime swaps for others, and no tensor parallel
        ones that stay."""
        self.position = StepPosition(plan, self._warn_once)
        self.offloads: Offloads | None = None
        """What leaves for the host, where the plan has any of it do so."""
        self._losses: list[LossRegion] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._warned: set[str] = set()
        self._step_hooks: list[Any] = []
        self._stepped: set[int] = set()
        self._given = 0
        self._ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._optimizers: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._watch: LoopWatch | None = None
        self.sharding: Fsdp2Sharding | None = None
        """What `fully_shard` was called on for this plan; None on other engines, and where the user called it."""

    def reset(self) -> None:
        """Begin a new step, whatever the last one did."""
        self.position.reset()
        if self.offloads is not None:
            self.offloads.reset()
        for region in self._losses:
            region.end()

    def end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer has done its step."""
        self._stepped.add(id(optimizer))
        step = self.position.step
        self.position.end_step(all_stepped=len(self._stepped) >= self._given)
        if self.position.step != step:
            self._stepped.clear()
        for region in self._losses:
            region.end()

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer that was not given steps parameters of the plan's modules."""
        known = self._ours.get(optimizer)
        if known is None:
            modules = [module for reference in self._modules if (module := reference()) is not None]
            own = {id(parameter) for module in modules for parameter in module.parameters()}
            known = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
            self._ours[optimizer] = known
        return known

    def _watch_all_optimizers(self) -> None:
        """Watch the steps of optimizers that were not given: `Trainer` makes its own."""
        applied = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer) -> None:
            here = applied()
            if here is not None and here._steps(optimizer):
                here.end_step(optimizer)

        self._step_hooks.append(OptimizerWatch(stepped, self))

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, PlanDrift, stacklevel=user_level())

    def warn(self, unit: str, differs: str) -> None:
        """Say once per model that units do not run as planned, and why."""
        reason = differs
        on = torch.is_autocast_enabled(self.device_type)
        here = str(torch.get_autocast_dtype(self.device_type)).removeprefix("torch.") if on else None
        if here != self.plan.trace.autocast and "_to_copy" in differs:
            reason = f"autocast is {here or 'off'} here and {self.plan.trace.autocast or 'off'} in the plan ({differs})"
        if isinstance(self.plan.collectives, tuple):
            raise StateError(
                f"unit {unit!r} does not run as planned: {reason}. It runs collectives, which a recomputation repeats "
                "in the order of the plan, and ranks that do otherwise wait for each other for ever. Ranks that run "
                "other ops than the first (context parallel) need a plan of their own, memfit.plan(..., mesh=..., "
                "rank=...); else run the step as planned, or plan it again"
            )
        self._warn_once(
            "other ops",
            f"unit {unit!r} does not run as planned: {reason}. Such calls are recomputed whole, or, where "
            "they write to buffers or inputs, run as without a plan: exact, but slower or larger than planned; if all "
            "steps are like this one, run them as planned, or plan again",
        )

    def warn_loss(self, differs: str) -> None:
        """Say once that the loss is another than planned, or something else is computed before it."""
        self._warn_once(
            "other loss",
            f"the plan recomputes the loss, and what follows the model is not the planned loss: {differs}. From there "
            "on it runs without its policy: exact, but larger than planned. Give plan.loss a function of the model's "
            "output that computes the planned loss, metrics after it, or plan the step as it is",
        )

    def warn_loss_missing(self) -> None:
        """Say once that a loss outside the model did not go through `plan.loss`."""
        chunked = self.plan.chunked_loss
        if chunked:
            self._warn_once(
                "loss missing",
                f"this plan computes the loss in {chunked.chunks} chunks, outside the model, and the loss of this "
                "backward did not go through plan.loss: it was computed whole, larger than planned. Write "
                "loss_function = plan.loss(loss_function) before the loop, or plan with SolveOptions(loss_chunks=1)",
            )
            return
        more = max((entry.discarded_bytes for entry in self.plan.checkpoint if entry.is_loss), default=0)
        self._warn_once(
            "loss missing",
            "this plan recomputes the loss, which is computed outside the model, and the loss of this backward did not "
            f"go through plan.loss: it ran without its policy, {display_bytes(more)} larger than planned. Write "
            "loss_function = plan.loss(loss_function) before the loop, or plan with SolveOptions(forbid=('<loss>',))",
        )

    def warn_evaluated(self, unit: str, result: Any) -> None:
        """Say once, when backward comes to its result, that a unit ran without the plan because of its mode."""
        if "eval mode" in self._warned:
            return
        made = (each.grad_fn for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        node = next((each for each in made if each is not None), None)
        text = (
            f"backward runs through unit {unit!r}, which was called in eval mode and planned in train mode: it and "
            "others like it ran without the plan, and held all that they save for backward. Call model.train() before "
            "training, or plan the step with the model in eval mode"
        )
        if node is not None:
            node.register_prehook(lambda _: self._warn_once("eval mode", text))

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Attach the plan to its modules; all are detached when one of them cannot be attached."""
        try:
            if any(entry.offload for entry in self.plan.checkpoint):
                self.offloads = Offloads(open_store(self.device_type), self.reset)
            for module, handler in self._watched(self._handlers()):
                attach(module, handler)
                self._modules.append(weakref.ref(module))
            modules = [module for reference in self._modules if (module := reference()) is not None]
            trained = (each for each in modules if any(parameter.requires_grad for parameter in each.parameters()))
            watched = next(trained, None)
            if watched is not None:
                self.position.watch(watched)
            self._given = len(optimizers)
            if not optimizers:
                self._watch_all_optimizers()
            for optimizer in optimizers:
                self._step_hooks.append(optimizer.register_step_post_hook(self.end_step))
                if self.plan.optimizer is not None:
                    self._optimizers.append((optimizer, set_implementation(optimizer, self.plan.optimizer)))
        except BaseException:
            self.detach()
            raise
        finally:
            self._paths = {}  # modules are held weakly from here on

    def detach(self) -> None:
        """Detach the plan from all modules."""
        self.reset()
        for region in self._losses:
            region.close()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        for reference in self._modules:
            module = reference()
            if module is not None:
                detach(module)
        self._modules = []
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []
        for optimizer, flags in self._optimizers:
            set_flags(optimizer, flags)
        self._optimizers = []
        self.offloads = None  # graphs that are there keep its store

    def _handlers(self) -> list[tuple[nn.Module, Handler]]:
        model = self._paths[""]
        entries: dict[nn.Module, list[Checkpoint]] = defaultdict(list)  # a module may have several paths
        losses: list[Checkpoint] = []
        for entry in self.plan.checkpoint:
            losses.append(entry) if entry.is_loss else entries[self._paths[entry.module]].append(entry)
        found: list[tuple[nn.Module, Handler]] = []
        following = next_units(self.plan)
        next_modules: dict[str, weakref.ref[nn.Module]] = {}
        for module, members in entries.items():
            policies = {
                entry.call: RunPolicy.of(entry, absent_casts(self.plan, entry), following[entry.unit])
                for entry in members
            }
            for policy in policies.values():
                if policy.offload and policy.offload_next is not None:
                    next_modules[policy.offload_next] = weakref.ref(self._paths[policy.offload_next])
            calls = Calls(self.position, members, policies)
            found.append((module, PlannedUnit(self, self._mode(members[0].module), calls, next_modules)))
        for path, reference in next_modules.items():
            boundary = reference()
            if boundary is not None and all(module is not boundary for module, _ in found):
                found.append((boundary, BoundaryUnit(self, self._mode(path))))
        if losses or self.plan.chunked_loss:
            inner = next((handler for module, handler in found if module is model), None)
            found = [each for each in found if each[0] is not model]
            region: LossRegion
            if losses:
                regions = {entry.call: (RunPolicy.of(entry), entry.after, entry.after_call) for entry in losses}
                region = RecomputedLossRegion(self, self._mode(""), Calls(self.position, losses, regions), inner)
            else:
                region = ChunkedLossRegion(self, self._mode(""), inner)
            self._losses.append(region)
            found.append((model, region))
        roots = list(model.children()) if is_container(model) else [model]
        handled = {id(module): handler for module, handler in found}
        others = [each for each in found if not any(each[0] is root for root in roots)]
        outermost = [(root, Outermost(self, handled.get(id(root)))) for root in map(unwrap, roots)]
        return [*others, *outermost] if found else []

    def warn_compiled(self, unit: str | None = None) -> None:
        """Say once that a planned model is not compiled; `unit` is a part of it that is compiled by itself."""
        if unit is not None:
            return self._warn_once(
                "compiled",
                f"unit {unit!r} runs a memfit plan and is compiled by itself: it and others like it run eagerly, "
                "because compiled code would save other tensors than planned. Do not compile them, or call "
                "plan.remove(model) to compile them without the plan",
            )
        return self._warn_once(
            "compiled",
            "this model runs a memfit plan and is called through torch.compile: all of it runs eagerly, because "
            "compiled parts would save other tensors than planned. Train the model itself (compiled._orig_mod) for "
            " the same without the compiler, or call plan.remove(model) to compile it without the plan",
        )

    def leave_inputs(self) -> None:
        """Leave warnings about larger inputs to a guard, which measures what they take."""
        if self._watch is not None:
            self._watch.leave_inputs()

    def leave_wrappers(self) -> None:
        """Leave warnings about wrappers to `apply`."""
        if self._watch is not None:
            self._watch.leave_wrappers()

    def _watched(self, found: list[tuple[nn.Module, Handler]]) -> list[tuple[nn.Module, Handler]]:
        """Wrap the calls of the model, or of those in a container, in a watch that compares the loop with the plan."""
        loop = self.plan.trace.loop
        names = dict.fromkeys("" if entry.is_loss else entry.module for entry in self.plan.checkpoint)
        names.update({"": None} if self.plan.chunked_loss else {})
        if not found or loop is None or self.plan.shard is not None or self.plan.predicted is None:
            return found  # nothing is carried out, or by other means than those of one device
        units = [WatchedUnit(name, weakref.ref(self._paths[name]), self._mode(name)) for name in names]
        watched: list[tuple[nn.Module, Handler]] = []
        for module, handler in found:
            if not isinstance(handler, Outermost):
                watched.append((module, handler))
                continue
            inside = {id(each) for each in module.modules()}
            own = [unit for unit in units if id(unit.module()) in inside]
            itself = WatchedUnit("", weakref.ref(module), Mode([module]))
            watch = LoopWatch(self.plan, loop, module, own or [itself], handler)
            if self._watch is not None:
                watch.follow(self._watch)
            self._watch = watch
            watched.append((module, watch))
        return watched

    def see_checkpointing(self, unit: nn.Module) -> None:
        """Check, when a unit is called, whether the model checkpoints by itself."""
        if self._watch is not None:
            self._watch.see_checkpointing(unit)

    def _mode(self, path: str) -> Mode:
        parts = path.split(".") if path else []
        chain = [self._paths[".".join(parts[:count])] for count in range(len(parts) + 1)]
        return Mode(chain, in_eval=path in self.plan.trace.in_eval)


def apply(
    plan: Plan,
    model: nn.Module,
    optimizer: OptimizerLike = None,
    mesh: DeviceMesh | None = None,
    engine: Engine | None = None,
    *,
    alone: bool = False,
) -> tuple[nn.Module, OptimizerLike]:
    """Make a model run a plan from its next step on; a refusal comes before anything is changed.

    A model that something wraps or shards already (DDP, FSDP, `fully_shard`) runs the checkpoint policies of the plan.
    Every rank of a process group calls it (Note [Kinds of plans]), unless a rank changes the plan of a model that it
    trains `alone`.
    """
    optimizers: list[torch.optim.Optimizer] = []
    wrappers: list[str] = []
    kind, chosen = "", "local"
    refusal: MemfitError | None = None
    try:
        _check_is_module(model)
        optimizers, wrappers = resolve_optimizers(optimizer), wrappers_of(model)
        kind = kind_of(plan, wrappers)
        chosen = resolve_engine(plan, engine, wrappers)
        if plan.shard is not None and not wrappers:
            check_ranks(plan, mesh)
        elif not plan.mesh:  # plans whose ranks talk once more tell there what they refuse
            _check_local(plan, model, optimizers)
    except MemfitError as error:
        refusal = error
    if not alone:
        compare_kinds(kind, refusal, mesh)
    elif refusal is not None:
        raise refusal
    root = unwrap(model)
    shards = plan.shard is not None and not wrappers
    if shards or plan.mesh:
        try:
            _check_local(plan, model, optimizers)
            if plan.mesh:
                check_wrapped(plan, wrappers)
        except MemfitError as error:
            if not plan.mesh and not (dist.is_available() and dist.is_initialized()):
                raise
            refusal = error  # perhaps of this rank only: the others are told, and must not wait for it
    if plan.mesh:
        agree(plan, refusal)
    sharding = None
    if shards:
        # Imported here: they load DTensor, which takes longer than all of memfit, and most plans are for one device.
        if chosen == "fsdp2":
            from memfit.engines.fsdp2 import shard_with_fsdp2

            sharding = shard_with_fsdp2(plan, model, optimizers, mesh, refusal)
        else:
            from memfit.engines.sharded import shard_as_planned

            shard_as_planned(plan, model, optimizers, mesh, refusal)
    applied = Applied(plan, model)
    try:
        applied.attach(optimizers)
    except BaseException:
        if sharding is not None:
            sharding.rollback()
        raise
    if sharding is not None:
        sharding.commit()
        applied.sharding = sharding
    for module in (model, root, *(root.children() if is_container(root) else ())):
        _applied[module] = applied
    if wrappers:
        applied.leave_wrappers()
        warn_policies_only(plan, model, wrappers)
    return model, optimizer


def remove(plan: Plan, model: nn.Module) -> nn.Module:
    """Restore the model to what it was before `apply`; one that `apply` sharded with FSDP2 on every rank at once."""
    applied = plan_of_model(model)
    if applied is None:
        raise StateError("this model has no plan to be removed; give the model that apply was called with")
    if applied.plan.fingerprint != plan.fingerprint or applied.plan.checkpoint != plan.checkpoint:
        raise StateError("this model runs another plan; remove that one")
    for module in [module for module, each in _applied.items() if each is applied]:
        del _applied[module]
    applied.detach()
    if applied.sharding is not None:
        applied.sharding.restore_parameters()
        applied.sharding = None
    return model


def _division(plan: Plan) -> tuple[object, ...]:
    """Return how a plan divides the model between ranks; what its policies leave is no part of it."""
    shard = None if plan.shard is None else msgspec.structs.replace(plan.shard, peak_by_engine={})
    return shard, plan.ddp, plan.mesh


def replace_policies(plan: Plan, model: nn.Module, optimizer: OptimizerLike = None) -> None:
    """Make a model that runs a plan run the checkpoint policies of another; what is sharded stays as it is.

    It goes on with the old ones when the new ones are refused.
    """
    old = plan_of_model(model)
    if old is None:
        raise StateError("this model runs no plan whose policies could be replaced; call plan.apply(model, optimizer)")
    if _division(old.plan) != _division(plan):
        raise InputError("the other plan divides the model otherwise between ranks; only policies can be replaced")
    optimizers = resolve_optimizers(optimizer)
    modules = [module for module, each in _applied.items() if each is old]
    old.detach()
    new = Applied(plan, model)
    try:
        new.attach(optimizers)
    except BaseException:
        new = Applied(old.plan, model)
        new.attach(optimizers)
        raise
    finally:
        new.sharding, old.sharding = old.sharding, None
        for module in modules:
            _applied[module] = new
        if wrappers_of(model):
            new.leave_wrappers()


def plan_of_model(model: nn.Module) -> Applied | None:
    """Return the plan that a model runs, or the modules in it do: several may have been given in a container."""
    root = unwrap(model)
    for module in (model, root, *(root.children() if is_container(root) else ())):
        if module in _applied:
            return _applied[module]
    return None


def _check_is_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"apply takes the model, an nn.Module, not a {type(model).__name__}")


def _check_local(plan: Plan, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a plan that this model and these optimizers cannot run, whatever other ranks have."""
    _check(plan, model, optimizers)
    if plan.ddp is not None:
        check_replicas(plan.ddp, model)


def _check(plan: Plan, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(model, nn.DataParallel):
        raise InputError(
            "this model is wrapped in DataParallel, which runs copies of it in threads; use DistributedDataParallel, "
            "or apply the plan to model.module and train that"
        )
    if plan.status == "infeasible":
        least = "" if plan.minimum_budget_bytes is None else f" {display_budget(plan.minimum_budget_bytes)}"
        raise InputError(f"this plan is infeasible and cannot be applied; plan with a budget of{least} or more")
    if plan.optimizer is not None:
        if not optimizers:
            raise InputError(f"this plan changes the optimizer's step to {plan.optimizer!r}: apply(model, optimizer)")
        for optimizer in optimizers:
            if plan.optimizer not in implementations(optimizer):
                raise InputError(f"{type(optimizer).__name__} has no {plan.optimizer!r} step, which the plan needs")
    if plan_of_model(model) is not None:
        raise StateError("this model already runs a plan; call remove on that plan first")
    unit = needs_step(plan)
    if unit is not None and not optimizers:
        raise InputError(
            f"calls of {unit!r} have different policies in this plan, by where in the step they are: give the "
            "optimizer that ends the step, apply(model, optimizer), or all of them in a list; or plan with "
            "SolveOptions(micro_batches='same')"
        )
    wrappers = wrappers_of(model)
    if "OptimizedModule" in wrappers:
        raise InputError(
            "this model is compiled, and a planned model runs eagerly: apply the plan to the module inside, "
            "model._orig_mod, and train that; or compile it without a plan"
        )
    if "DTensor" in wrappers and not plan.mesh:
        raise InputError(
            "parameters of this model are DTensors that fully_shard did not make (tensor parallel), and the plan is "
            "for a model without them: plan the step as it is, memfit.plan(step, mesh=...)"
        )
    found = find_model_differences(plan, model)
    for optimizer in optimizers:
        found += find_optimizer_differences(plan, model, optimizer)
    if found:
        raise PlanMismatch(found)
    _check_units(plan, model)


def _check_units(plan: Plan, model: nn.Module) -> None:
    modules = [entry for entry in plan.checkpoint if not entry.is_loss]
    for entry, following in itertools.pairwise(sorted(modules, key=lambda each: (each.begin, -each.end))):
        if following.begin < entry.end:
            raise InputError(
                f"unit {following.unit!r} lies inside unit {entry.unit!r} in this plan, which memfit does not make: "
                "its document was changed; plan the step again"
            )
    paths = dict(named_modules(model))
    for entry in modules:
        if entry.offload and isinstance(entry.offload_next, str) and entry.offload_next not in paths:
            raise InputError(
                f"unit {entry.unit!r} offloads until {entry.offload_next!r} runs, and the model has no such module: "
                "the plan is of another model, or its document was changed; plan the step again"
            )
        if any(op.offset > entry.stop for op in entry.offload or ()) and absent_casts(plan, entry) is not None:
            raise MissingFeatureError(
                f"unit {entry.unit!r} offloads results, and its parameters are gathered in autocast's dtype: casts of "
                "the captured step do not run then, and ops cannot be told by their place. Plan without offloading, or "
                "with ShardOptions(param_dtype=None)"
            )
        if attached(paths[entry.module]) is not None:
            raise StateError(
                f"module {entry.module!r} already runs the plan of another model that it is part of; remove that first"
            )


# -- The optimizers that a user gives to `apply`, inside what libraries wrap them in ----------------------------------


OptimizerLike = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def resolve_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers themselves: one, several or none, without accelerate's, Lightning's or others' wrappers."""
    if given is None:
        return []
    if isinstance(given, (tuple, list)):
        return [optimizer for each in given for optimizer in resolve_optimizers(each)]
    optimizer, seen = given, set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"apply takes the model's optimizer, a torch.optim.Optimizer, or a list of them, not a "
            f"{type(given).__name__}"
        )
    return [optimizer]
