"""Compile a policy: one run watches every op of a unit and notes how later runs do the same without a mode.

Everything is held until the run has ended: only then is it certain that the unit runs as planned, and what may be
dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.engines.compiled_policy import (
    CallNode,
    CallTreeBuilder,
    CompiledPolicy,
    FromPack,
    Gap,
    OpKey,
    OpKind,
    RunPolicy,
    TrackedCalls,
    casts_parameter,
    not_counted,
    op_kind,
    same_op,
)
from memfit.engines.recompute import RecomputedCall, SavedTensor, unpack
from memfit.engines.tape import EMPTY
from memfit.engines.tensors import (
    StridedView,
    detached,
    gathered_parameters,
    is_outer,
    is_strided,
    local_key,
    plain,
    strided_view_of,
    written,
)
from memfit.torch_private.dispatch import DisableTorchDispatch, DispatchMode
from memfit.torch_private.distributed_tensors import local_tensor
from memfit.torch_private.pytree import tree_flatten, tree_map_only

Maker = tuple[int, int]


class PolicyCompiler(DispatchMode):
    """Runs a unit and compiles its policy. `followed` says whether the ops are those that the plan knows.

    `writes_older` says whether the unit writes to anything that was there before it, and so cannot be recomputed whole.
    """

    def __init__(self, policy: RunPolicy, unit: nn.Module, run: RecomputedCall, *, tried_before: bool = False) -> None:
        super().__init__()
        self.policy = policy
        self.followed = True
        self.differs = ""
        self.writes_older = False
        self._inputs: set[int] = set()
        self._buffers: dict[int, int] = {}
        self._reads: set[int] = set()
        self._overwrites_inputs = False
        self._run = run
        self._unit = unit
        self._tracker = CallTreeBuilder(unit)
        self._ops = 0
        self._maker: dict[int, Maker] = {}
        self._tried_before = tried_before  # a unit that goes on running otherwise must not be held again and again
        self._made_with_grad: set[int] = set()
        self._packs: list[tuple[Maker | None, SavedTensor]] = []
        self._unwritten: set[int] = set()  # ops whose results have no value yet
        self._known: list[StorageWeakRef] = []  # so that no storage gets the address of one that is gone
        self._results: list[tuple[CallNode, int, OpKey, Any, list[tuple[Maker, Any] | None]]] = []
        self._counts: dict[tuple[int, int, OpKind], int] = {}
        self._instead: dict[tuple[int, int, OpKey], tuple[OpKey, Any]] = {}

    def run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, CompiledPolicy | None]:
        """Run the forward; the compiled policy is None when the plan knows other ops than ran."""
        self._run.remember_context(args, kwargs)
        self._buffers = {local_key(each): number for number, each in self._run.buffers() if is_strided(each)}
        self._inputs = {local_key(each) for each in tree_flatten((args, kwargs))[0] if is_strided(each)}
        with saved_tensors_hooks(self._pack, unpack), self:
            result = self._tracker.run(self._run._forward, args, kwargs)
        self._pass_absent()
        if self._ops <= max(self.policy.names, default=-1):
            self._differ(f"it ran {self._ops} ops and has {self.policy.ops} in the plan")
        compiled = self._compile() if self.followed else None
        if compiled is not None and (compiled.offloaded or compiled.offloaded_kept):
            self._run.offload(compiled, [saved for _, saved in self._packs if saved.index in compiled.offloaded])
        if compiled is None and self._tried_before and not self.writes_older:
            for maker, saved in self._packs:  # as `RecomputedCall.run_forward_dropping_all` does
                if maker is not None and saved.index in self._made_with_grad and saved.tensor is not None:
                    if maker[1] == 0 and maker[0] not in self._unwritten:
                        self._run.note(saved.index, saved.tensor)
                    self._run.drop(saved, saved.tensor.shape)
        self._run.settle(compiled)
        self._results.clear()  # autograd keeps the hook, and the hook this object
        self._known.clear()
        self._packs.clear()
        return result, compiled

    @property
    def ran(self) -> bool:
        """Whether there was any op."""
        return self._ops > 0

    def _pass_absent(self) -> None:
        """Count the ops of the plan that come next and do not run here."""
        while self._ops in (self.policy.absent or ()):
            self._ops += 1

    def _differ(self, what: str) -> None:
        if self.followed:
            self.followed, self.differs = False, what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_outer(types):
            return NotImplemented  # Note [Distributed tensors]
        kwargs = kwargs or {}
        self._pass_absent()
        planned = self.policy.names.get(self._ops)
        # A parameter gathered in bfloat16 is cast back for ops that autocast runs in float32.
        cast_back = self.policy.absent is not None and casts_parameter(func, args) and str(func) != planned
        if cast_back or not_counted(func, planned):
            return func(*args, **kwargs)
        offset = self._ops
        self._ops += 1
        name = str(func)
        expected = self.policy.names.get(offset, name)
        in_place = name != expected and same_op(name, expected)
        if name != expected and not in_place:
            self._differ(f"its op {offset} is {name} and {expected} in the plan")
        before = {local_key(each) for each in tree_flatten((args, kwargs))[0] if is_strided(each)}
        if offset <= self.policy.stop and offset not in self.policy.saved:
            self._reads.update(self._buffers[key] for key in before if key in self._buffers)
        result = func(*args, **kwargs)
        outputs = tree_flatten(result)[0]
        self._note_writes(func, args, kwargs, offset)
        place = 0
        for output in outputs:
            if is_strided(output) and (key := local_key(output)) not in before:
                before.add(key)
                self._known.append(StorageWeakRef(output.untyped_storage()))
                self._maker[key] = (offset, place)
                place += 1
                if in_place and is_strided(args[0]) and local_key(args[0]) in self._maker:
                    self._maker[key] = self._maker[local_key(args[0])]
        if func in EMPTY:
            self._unwritten.add(offset)
        node, gap = self._tracker.place
        kind = op_kind(func, args)
        counted = (id(node), gap, kind)
        number = self._counts.get(counted, 0)
        self._counts[counted] = number + 1
        if offset in self.policy.saved:
            self._keep(node, gap, (kind, number), result, outputs, overwrites=in_place)
        return result

    def _keep(self, node: CallNode, gap: int, key: OpKey, result: Any, outputs: list[Any], *, overwrites: bool) -> None:
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        tensors: list[tuple[Maker, Any] | None] = []
        for output in outputs:
            if output is None:
                tensors.append(None)
            elif plain(output) and local_key(output) in self._maker:
                tensors.append((self._maker[local_key(output)], strided_view_of(output)))
            else:
                tensors.append(((-1, -1), None))
        if overwrites:
            self._stands_for_earlier(node, gap, key, tensors)
        self._results.append((node, gap, key, kept, tensors))

    def _stands_for_earlier(
        self, node: CallNode, gap: int, key: OpKey, tensors: list[tuple[Maker, Any] | None]
    ) -> None:
        """Keep the storage of this result for the results that it overwrites too."""
        made = [None if each is None else each[0] for each in tensors]
        for place, earlier in enumerate(self._results):
            same = [None if each is None else each[0] for each in earlier[4]] == made
            if len(made) == 1 and same and earlier[0] is node and earlier[1] == gap and earlier[4][0] is not None:
                self._instead[id(node), gap, earlier[2]] = (key, earlier[4][0][1])
                self._results[place] = (*earlier[:3], None, earlier[4])

    def _pack(self, tensor: torch.Tensor) -> SavedTensor:
        guard = DisableTorchDispatch()
        try:
            index = len(self._packs)
            maker = self._maker.get(local_key(tensor)) if is_strided(tensor) else None
            saved = SavedTensor(self._run, index, detached(tensor) if tensor.grad_fn is not None else tensor)
            self._packs.append((maker, saved))
            if tensor.grad_fn is not None:
                self._made_with_grad.add(index)
            # an op's further results may be scratch memory of its kernel, of which parts are never written
            if maker in self.policy.dropped and maker[1] == 0 and maker[0] not in self._unwritten:
                self._run.note(index, tensor)
            return saved
        finally:
            del guard

    def _note_writes(self, func: Any, args: Any, kwargs: Any, offset: int) -> None:
        for target in written(func, args, kwargs):
            key = local_key(target)
            if key in self._maker or key in gathered_parameters(self._unit):
                continue
            self.writes_older = True
            self._overwrites_inputs = self._overwrites_inputs or key in self._inputs
            if offset <= self.policy.stop and offset not in self.policy.saved:
                self._differ(f"its op {offset}, {func}, writes to what was there before, and the plan runs it again")

    def _compile(self) -> CompiledPolicy:
        holders: dict[Maker, int] = {}
        offload = self.policy.offload
        offloaded_kept: set[tuple[int, OpKey]] = set()
        drops: list[torch.Size | None] = []
        for index, (maker, saved) in enumerate(self._packs):
            assert saved.tensor is not None
            dropped = maker is not None and maker in self.policy.dropped
            drops.append(saved.tensor.shape if dropped else None)
            if maker is not None and not dropped:
                holders.setdefault(maker, index)
        needed: dict[int, StridedView] = {}
        storage_bytes: dict[int, int] = {}
        views: list[StridedView] = []
        view_packs: list[int] = []
        fresh, answers = 0, bool(self._results)
        for node, gap, key, kept, tensors in self._results:
            found = node.gaps[gap]
            if found is None:
                found = node.gaps[gap] = Gap()
            if not isinstance(kept, (tuple, list)):
                found.single.add(key)
            if tensors and all(each is None or each[0] in holders for each in tensors):
                sources: list[FromPack | None] = []
                for each in tensors:
                    sources.append(None if each is None else FromPack(holders[each[0]], len(views)))
                    views += [] if each is None else [each[1]]
                found.sources[key] = tuple(sources)
                for source in sources:
                    if source is not None:
                        held = self._packs[source.pack][1].tensor
                        assert held is not None
                        self._run.held[source.pack] = held
                        needed[source.pack] = strided_view_of(held)
                        storage_bytes[source.pack] = local_tensor(held).untyped_storage().nbytes()
                        view_packs.append(source.pack)
            elif (id(node), gap, key) in self._instead:
                found.instead[key] = self._instead[id(node), gap, key]
            else:
                found.fresh.add(key)
                fresh += 1
                self._run.kept[id(found), key] = kept
                if any(each is not None and each[0][0] in offload for each in tensors):
                    offloaded_kept.add((id(found), key))
        for index, shape in enumerate(drops):
            if shape is not None:
                self._run.drop(self._packs[index][1], shape)
        root = self._tracker.root
        return CompiledPolicy(
            drops=drops,
            needed=needed,
            storage_bytes=storage_bytes,
            views=views,
            view_packs=view_packs,
            compared=frozenset(self._run.samples),
            root=root,
            last=max((index for index, shape in enumerate(drops) if shape is not None), default=-1),
            overwrites_inputs=self._overwrites_inputs,
            fresh=fresh,
            keeping=TrackedCalls.through(root, lambda gap: bool(gap.fresh)),
            answering=TrackedCalls.through(root, lambda gap: True) if answers else None,
            reads=frozenset(self._reads),
            offloaded=frozenset(
                index
                for index, (maker, _) in enumerate(self._packs)
                if drops[index] is None and maker is not None and maker[0] in offload
            ),
            offloaded_kept=frozenset(offloaded_kept),
        )
