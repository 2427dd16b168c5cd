"""Runs the ops of a capture: on meta tensors, or for real where the values are known.

Note [Values]: tensors of the capture are meta tensors, except small ones whose values are known (constants, a batch
of real tensors and what is computed from these alone). Those stay real until they meet a meta tensor, so that a model
may branch on them as it would in a real run. A real tensor that existed before the capture is never written to.

Note [Shapes]: what a meta kernel returns depends only on the geometry of its inputs and on its other arguments. Results
of ops that neither write to nor alias their inputs are therefore rebuilt from the first call's geometry, which
costs a tenth of the kernel; models consist of equal layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.errors import MADE_IN_STEP, UnsupportedError
from memfit.capture.kernels import MEASURED_LIMIT_BYTES, ResultGeometry, certified_ops, measure_call, operand_kind
from memfit.capture.rules import Rule, RuleContext, Rules
from memfit.capture.rules.flops import FLOPS
from memfit.capture.rules.measured_kernels import DEPENDS_ON_VALUES, is_slow_decomposition
from memfit.capture.storages import StorageTable
from memfit.capture.trace_types import Phase
from memfit.torch_private.autograd import current_autograd_node
from memfit.torch_private.dispatch import DisableTorchFunction, disable_current_modes, schema_of
from memfit.torch_private.functorch import differentiates, unwrap
from memfit.torch_private.storages import key_of, storage_key

_WRITTEN = object()
"""Stands for the result of an op that returns the tensor it wrote to."""

KNOWN_VALUE_LIMIT = 1 << 20
"""Tensors of more elements than this lose their values."""

_META = torch.device("meta")
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_RESIZING = (_aten.set_, _aten.resize_, _aten.resize_as_)
INDEXING = (
    "aten.index.Tensor",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._unsafe_index.Tensor",
    "aten._unsafe_index_put.default",
    "aten._index_put_impl_.default",
)
_OF_TORCH = frozenset(
    (
        *("aten", "prim", "prims", "rngprims", "profiler", "streams", "inductor", "torch_attn", "torch_nn", "memfit"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "symm_mem", "_dtensor"),
        *("mkldnn", "mkldnn_prepacked", "onednn", "quantized", "quantized_decomposed"),
    )
)
"""Namespaces of ops that come with torch, and the one of ops that stand for its compiled kernels.

Any other op is custom: only who wrote it knows its cost.
"""
_UNKNOWN_COST = (
    "{}: a custom op without a known cost. Its time is that of reading and writing its tensors; tell its FLOPs with "
    "torch.utils.flop_counter.register_flop_formula. What it allocates inside itself is not counted"
)
_UNKNOWN_BYTES = "{}: a custom op; what it allocates inside itself is not counted"
_SAVES_NUMBER = (_aten.mul.Tensor, _aten.div.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of an op before it is called."""

    name: str
    random: bool
    writes: tuple[int | str, ...]
    aliases: bool
    factory: bool
    in_place: bool
    returns_written: bool
    ignored: bool
    saves_number: bool
    flops: Callable[..., int] | None
    kernel: Rule | None
    workspace: Rule | None
    certified: frozenset[str] | None


@dataclass(slots=True)
class OpResult:
    """A call's result, its FLOPs and the bytes of its workspace."""

    result: Any
    flops: int = 0
    workspace_bytes: int = 0


class Executor:
    """Runs ops and remembers what they returned for which geometry."""

    def __init__(self, context: RuleContext, rules: Rules, table: StorageTable) -> None:
        self.context = context
        self.rules = rules
        self.table = table
        self.keeps_empty_on_meta = False
        """Whether a tensor without values is on meta also when it is small: it may become a parameter."""
        self.run_collective: Callable[..., Any] | None = None
        self._infos: dict[int, OpInfo] = {}
        self._remembered: dict[Any, tuple[Any, int, int]] = {}

    def describe(self, func: Any) -> OpInfo:
        """Return the op's schema, as far as the capture needs it."""
        info = self._infos.get(id(func))  # an op's own hash is computed in Python; ops live as long as torch does
        if info is None:
            info = self._infos[id(func)] = self._describe(func)
        return info

    def _describe(self, func: Any) -> OpInfo:
        schema = schema_of(func)
        writes = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        if func.namespace == "c10d":  # their schemas do not say so, but all write to the tensors that come first
            writes = () if func._overloadpacket is torch.ops.c10d.send else (0,)
        if torch.Tag.inplace_view in func.tags and func._overloadpacket not in _RESIZING:
            writes = ()  # `transpose_` and its like: the same elements, seen differently
        aliases = not writes and any(returned.alias_info is not None for returned in schema.returns)
        flops = FLOPS.get(str(func._overloadpacket)) or flop_registry.get(func._overloadpacket)
        if func.namespace not in _OF_TORCH and not aliases:
            self.context.note((_UNKNOWN_COST if flops is None else _UNKNOWN_BYTES).format(func))
        return OpInfo(
            name=str(func),
            random=torch.Tag.nondeterministic_seeded in func.tags,
            writes=writes,
            aliases=aliases or func._overloadpacket in (_aten._unsafe_view, _aten._reshape_alias),
            factory=any(argument.name == "device" for argument in schema.arguments),
            in_place=bool(writes)
            and all(returned.alias_info is not None for returned in schema.returns)
            and func._overloadpacket not in _RESIZING,
            returns_written=any(returned.alias_info is not None for returned in schema.returns),
            ignored=func.namespace == "profiler",
            saves_number=func in _SAVES_NUMBER,
            flops=flops,
            kernel=self.rules.kernels.get(str(func)),
            workspace=self.rules.workspaces.get(str(func)) or self.rules.unlisted(str(func)),
            certified=self._certified(func),
        )

    def _certified(self, func: Any) -> frozenset[str] | None:
        """Return the kinds of operands on which the op is known to the byte; None when no call of it is measured.

        An op with a rule that the sweep never met is taken as its rule says.
        """
        name = str(func)
        if self.context.device_type != "cpu" or func.namespace != "aten":
            return None
        known = certified_ops().get(name)
        if known is not None:
            return known
        ruled = name in self.rules.workspaces or name in self.rules.kernels or self.rules.unlisted(name) is not None
        return None if ruled else frozenset()

    def run(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        geometry: Any,
    ) -> OpResult:
        """Run an op; raises what its kernel raises. `geometry` is all that its results depend on."""
        if not tensors and info.factory:
            return self._priced(func, info, args, kwargs, self._make(func, info, args, kwargs))
        if not tensors:
            return self._priced(func, info, args, kwargs, self._call(func, info, args, kwargs))
        if not all(tensor.is_meta for tensor in tensors):
            result = self._run_mixed(func, info, args, kwargs, tensors)
            if info.aliases:
                return OpResult(result)
            return self._measured(func, info, args, kwargs, tensors, result)
        if info.factory and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        if info.aliases:
            return OpResult(self._call(func, info, args, kwargs))
        remembered = self._remembered.get(geometry)
        if remembered is not None:
            made, flops, workspace_bytes = remembered
            result = written_by(info, args, kwargs)[0] if made is _WRITTEN else _rebuild(made)
            return OpResult(result, flops, workspace_bytes)
        outcome = self._measured(func, info, args, kwargs, tensors, self._call(func, info, args, kwargs))
        self._remember(geometry, info, args, kwargs, tensors, outcome)
        return outcome

    def lift(self, tensor: torch.Tensor, module: str) -> torch.Tensor:
        """Return the meta tensor that stands for a real one from now on; its values are no longer known."""
        if tensor.is_meta or unwrap(tensor) is not tensor:
            return tensor
        with DisableTorchFunction(), disable_current_modes():
            self.table.classify(tensor, module)
            return self._twin(tensor, aliasing=True)

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's values are known."""
        if unwrap(tensor) is not tensor:
            return False  # inside torch.func's transforms it stands for several tensors, or for one that is followed
        return (
            not tensor.is_meta
            and tensor.device.type == "cpu"
            and tensor.numel() <= KNOWN_VALUE_LIMIT
            and storage_key(tensor) not in self.table.valueless
        )

    # -- Note [Shapes] ----------------------------------------------------------------------------------------------

    def _remember(
        self, key: Any, info: OpInfo, args: Any, kwargs: Any, tensors: list[torch.Tensor], outcome: OpResult
    ) -> None:
        price = outcome.flops, outcome.workspace_bytes
        if info.writes:
            written = written_by(info, args, kwargs)
            if info.in_place:
                if outcome.result is None:
                    self._remembered[key] = (None, *price)
                elif len(written) == 1 and outcome.result is written[0]:
                    self._remembered[key] = (_WRITTEN, *price)
            return
        if info.name.startswith("aten._foreach_"):
            return  # all of an optimizer's tensors, once in a step
        outputs = tensors_of((outcome.result,))
        storages = [storage_key(tensor) for tensor in (*tensors, *outputs)]
        if outputs and len({*storages}) == len({*storages[: len(tensors)]}) + len(outputs):
            self._remembered[key] = (map_tensors(outcome.result, ResultGeometry.of), *price)

    def _priced(self, func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any], result: Any) -> OpResult:
        return OpResult(
            result,
            info.flops(*args, **kwargs, out_val=result) if info.flops is not None else 0,
            info.workspace(self.context, func, args, kwargs, result) if info.workspace is not None else 0,
        )

    def _measured(
        self, func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> OpResult:
        """Return the call's price, found out by making the call for real where it is not known (Note [Certified])."""
        if info.certified is None or operand_kind(tensors) in info.certified:
            return self._priced(func, info, args, kwargs, result)
        if info.workspace is self.rules.decomposition and is_slow_decomposition(func, args):
            return self._priced(func, info, args, kwargs, result)  # the rule measures a smaller call, or has a note
        total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, *tensors_of((result,))))
        if total_bytes > MEASURED_LIMIT_BYTES:
            self.context.note(
                f"{info.name}: too large to run once here ({total_bytes / 1e6:,.0f} MB); what it allocates inside "
                "itself, if anything, is not counted"
            )
            return self._priced(func, info, args, kwargs, result)
        measured = measure_call(func, args, kwargs)
        if isinstance(measured, str):
            self.context.note(
                f"{info.name}: could not be run once here ({measured}); what it allocates inside itself, if anything, "
                "is not counted"
            )
            return self._priced(func, info, args, kwargs, result)
        # a rule for the workspace may run the kernel itself, so it is only asked when the kernel was not run here
        if info.workspace is self.rules.decomposition:
            self.context.note(DEPENDS_ON_VALUES.format(info.name))
        flops = info.flops(*args, **kwargs, out_val=result) if info.flops is not None else 0
        return OpResult(result if info.writes else measured.lay_out(result), flops, measured.workspace_bytes)

    def _call(self, func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.run_collective is not None and func.namespace == "c10d":
            return self.run_collective(func, args, kwargs)
        if info.kernel is not None:
            return info.kernel(self.context, func, args, kwargs)
        return func(*args, **kwargs)

    # -- Note [Values] ----------------------------------------------------------------------------------------------

    def _make(self, func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
        result = self._call(func, info, args, {**kwargs, "device": _META})
        if not isinstance(result, torch.Tensor) or result.numel() > KNOWN_VALUE_LIMIT or kwargs.get("requires_grad"):
            return result
        if self.table.phase is Phase.BACKWARD and not torch.is_grad_enabled() and _may_be_gradient(result):
            return result  # no branch is taken by it, and a gradient must be on the device of its tensor
        if self.keeps_empty_on_meta and info.name.startswith("aten.empty"):
            return result
        if differentiates():  # derivatives of a real tensor would have to be real too
            return result
        return func(*args, **{**kwargs, "device": _CPU, "pin_memory": False})

    def _run_mixed(
        self, func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        if func is _aten._local_scalar_dense.default and self.has_value(tensors[0]):
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad and t.is_leaf and not t.is_meta for t in tensors):
            raise UnsupportedError("a tensor made in the step takes gradients", MADE_IN_STEP)
        written = written_by(info, args, kwargs)
        keeps_values = all(map(self.has_value, tensors)) and not any(
            storage_key(tensor) in self.table.foreign for tensor in written
        )
        real_kwargs = {**kwargs, "device": _CPU} if "device" in kwargs else kwargs
        if keeps_values and (written or info.name == "aten.lift_fresh.default"):
            return func(*args, **real_kwargs)
        if info.name in INDEXING:
            args = (args[0], self._known_masks(args[1]), *args[2:])
        elif info.name == "aten.masked_select.default" and not keeps_values and self.has_value(args[1]):
            return self._selected(args[0], args[1])
        aliasing = bool(written) or info.aliases
        meta_args = map_tensors(args, lambda tensor: self._twin(tensor, aliasing))
        meta_kwargs = map_tensors(kwargs, lambda tensor: self._twin(tensor, aliasing))
        if "device" in kwargs:
            meta_kwargs["device"] = _META
        if info.kernel is not None and getattr(info.kernel, "reads_values", False):
            return info.kernel(self.context, func, args, kwargs)
        if keeps_values and _is_small(func, meta_args, meta_kwargs):
            try:
                return func(*args, **real_kwargs)
            except NotImplementedError:  # the CPU may have no kernel for a dtype that the target has one for
                if self.context.device_type == "cpu":
                    raise
        result = self._call(func, info, meta_args, meta_kwargs)
        self.table.valueless.update(storage_key(tensor) for tensor in written if not tensor.is_meta)
        return result

    def _known_masks(self, indices: Any) -> list[Any]:
        """Replace boolean masks of known values by the positions that they select."""
        positions: list[Any] = []
        for index in indices:
            mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and self.has_value(index)
            positions += index.nonzero(as_tuple=True) if mask else [index]
        return positions

    def _selected(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what `masked_select` returns for a mask of known values."""
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        return torch.empty(int(mask.expand(shape).sum()), dtype=tensor.dtype, device=_META)

    def _twin(self, tensor: torch.Tensor, aliasing: bool) -> torch.Tensor:
        """Return a meta tensor of the same geometry; with `aliasing` one whose storage stands for the tensor's own."""
        if tensor.is_meta:
            return tensor
        # positions of a mask are made below the dispatcher: no op of the step has seen them
        if not aliasing or storage_key(tensor) not in self.table.known:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        storage = tensor.untyped_storage()
        twin = self.table.twins.get(key_of(storage))
        if twin is None:
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
            self.table.stand_in(storage, twin)
        empty = torch.empty(0, dtype=tensor.dtype, device=_META)
        return empty.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())


def _may_be_gradient(made: torch.Tensor) -> bool:
    """Return whether a tensor made in the backward can be a gradient, or a buffer for one.

    All can in torch's own gradient formulas; in the backward of a function of the user's, those that are no numbers of
    its control flow.
    """
    node = current_autograd_node()
    if node is None:
        return False
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return made.dim() > 0 and made.is_floating_point()
    return True


def written_by(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors an op writes to."""
    values = []
    for where in info.writes:
        if isinstance(where, int):
            if where < len(args):
                values.append(args[where])
        elif where in kwargs:
            values.append(kwargs[where])
    return tensors_of(values)


def _is_small(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    try:
        outputs = tensors_of((func(*args, **kwargs),))
    except (NotImplementedError, RuntimeError):
        return True
    return all(output.numel() <= KNOWN_VALUE_LIMIT for output in outputs)


def _rebuild(made: Any) -> Any:
    if isinstance(made, ResultGeometry):
        return made.empty()
    if isinstance(made, (list, tuple)):
        return type(made)(_rebuild(item) for item in made)
    return made


def takes_random_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an op that may take random numbers does; attention without dropout takes none."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return value != 0
    return True
