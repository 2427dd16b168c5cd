"""Equal blocks of a model, of which a capture runs five and passes the step through the others.

Note [Repeated blocks]: a model of 126 equal layers runs the same ops 126 times. Of a row of equal blocks the capture
runs the first three and the last two; those between return their input as if it were their output, and the ops,
storages and calls that they would have made are written down afterwards (capture/replication.py). All else runs: the
code around the blocks, the loss, the backward through what has run, and the optimizer with all parameters.

A block may be passed by because its forward depends on nothing but

1. what it reads of itself: blocks of a row have the same classes, attributes, parameters and buffers and no hooks
   (equal_modules.py). Numbers and words may differ (`layer_idx`), if a block that runs is seen not to read them;
2. what it is called with: every call of a row is given, in each place, what the block before it has returned there, or
   what the call before it was given. Grad mode, autocast, hooks for saved tensors and attention's backends are equal;
3. values that random numbers gave: a step that reads some is captured in full.

Calls follow one another with no op, no storage and no other call between them, in order, each once. What they return is
either new and given to the next one, or what they were given. The ops of the five that run tell whether the rest holds:
those of the second, third and fourth must be the same up to numbers, in the forward and in the backward, and nothing
else in the step may use what they made. A step for which any of it does not hold is captured in full.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.equal_modules import differing_attributes, is_plain, watched_reads
from memfit.capture.recorder import Recorder
from memfit.capture.storages import HOST
from memfit.capture.trace_types import Phase
from memfit.torch_private.autograd import top_saved_tensor_hooks
from memfit.torch_private.dispatch import DisableTorchFunction, function_modes
from memfit.torch_private.kernels import ATTENTION_SWITCHES
from memfit.torch_private.modules import buffer_table, module_table, parameter_table

FIRST, LAST = 3, 2
"""How many blocks run at either end of a row."""
_LEAST = 8
"""Rows of fewer blocks run as they are."""
_TENSOR = "a tensor"


class NotRepeated(Exception):
    """The blocks of a row do not do the same, or something depends on one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal blocks by their paths, in order, and the attributes in which they differ."""

    paths: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    differing: frozenset[tuple[str, str]]


def may_have_row(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of a model's modules is long enough for a row of equal ones; a look that takes no time."""
    return any(map(_is_long, modules))


def _is_long(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module_table(module)) >= _LEAST


def find_row(modules: Mapping[str, nn.Module]) -> Row | None:
    """Return the longest row of equal blocks in a `ModuleList` or `Sequential`, None where there is none worth it.

    `modules` are those of a model under all of their paths.
    """
    counts = Counter(map(id, modules.values()))
    best: Row | None = None
    for path, module in modules.items():
        children = module_table(module)
        least = max(_LEAST, 0 if best is None else len(best.paths) + 1)
        if not _is_long(module) or len(children) < least:
            continue
        found = _longest_row(path, list(children.items()), counts)
        if found is not None and len(found.paths) >= least:
            best = found
    return best


def _longest_row(path: str, children: list[tuple[str, nn.Module | None]], counts: dict[int, int]) -> Row | None:
    best: Row | None = None
    begin = 0
    while begin < len(children):
        names, blocks, differing = [], [], set[tuple[str, str]]()
        for name, block in children[begin:]:
            if block is None or counts[id(block)] > 1:
                break
            if blocks:
                differs = differing_attributes(blocks[0], block)
                if differs is None:
                    break
                differing |= differs
            names.append(f"{path}.{name}" if path else name)
            blocks.append(block)
        if blocks and (best is None or len(blocks) > len(best.blocks)):
            best = Row(paths=tuple(names), blocks=tuple(blocks), parameters=(), differing=frozenset(differing))
        begin += max(1, len(blocks))
    if best is None or len(best.blocks) < _LEAST:
        return None
    parameters = tuple(tuple(_tensors(block, parameter_table)) for block in best.blocks)
    if any(counts[id(inner)] > 1 for block in best.blocks for inner in _modules(block)):
        return None
    tensors = [id(each) for block in parameters for each in block]
    tensors += [id(each) for block in best.blocks for each in _tensors(block, buffer_table)]
    return replace(best, parameters=parameters) if len(set(tensors)) == len(tensors) else None


def _modules(block: nn.Module) -> list[nn.Module]:
    found = [block]
    for child in module_table(block).values():
        found += [] if child is None else _modules(child)
    return found


def _tensors(block: nn.Module, table: Callable[[nn.Module], dict[str, Any]]) -> list[Any]:
    found = [tensor for tensor in table(block).values() if tensor is not None]
    for child in module_table(block).values():
        found += [] if child is None else _tensors(child, table)
    return found


@dataclass(slots=True)
class _Call:
    """One call of a block: leaves of its arguments and of its result, and what surrounded it.

    Tensors are referred to weakly, so that they are freed as in a step that nobody looks at.
    """

    leaves: list[Any]
    shape: Any
    around: tuple[Any, ...]
    outputs: list[Any] = field(default_factory=list)
    result_shape: Any = None
    sources: list[Any] = field(default_factory=list)


class RowCapture:
    """Runs the calls of a row in one pass of a capture, and keeps what the others will be made of."""

    def __init__(self, row: Row, recorder: Recorder) -> None:
        self.row, self.recorder = row, recorder
        self.problem = ""
        """Why the step must be captured in full; empty while it need not."""
        self.passes = 0
        self.passed = False
        """Whether a block was passed by."""
        self.stand_ins: dict[int, tuple[int, int]] = {}
        """Storages of gradients that were put where blocks did not run: the block, and the one it stands for."""
        count = len(row.blocks)
        self._index = {id(block): i for i, block in enumerate(row.blocks)}
        self._passed_by = frozenset(range(FIRST, count - LAST))
        self._next = 0
        self._before: _Call | None = None
        self._template: _Call | None = None
        self._roles: list[Any] = []
        self._sizes = (0, 0, 0)
        self._read: set[tuple[str, str]] = set()
        self._paths = {id(module): path for path, module in row.blocks[FIRST - 1].named_modules()}
        self._attributes = self._attributes_now()

    def call(self, module: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a call of any module, or pass it by."""
        index = self._index.get(id(module))
        if index is None or self.recorder.table.paused:
            return run()
        if self.problem or self.recorder.phase is Phase.BACKWARD:
            if index in self._passed_by and not self.problem:
                self.problem = "the backward runs a block that the forward did not"
            return run()
        try:
            with DisableTorchFunction():
                call = self._enter(index, args, kwargs)
        except NotRepeated as error:
            self.problem = str(error)
            return run()
        if index in self._passed_by:
            self.passed = True
            result = self._result_of(call, args, kwargs)
        else:
            with self._watched(index):
                result = run()
            try:
                with DisableTorchFunction():
                    self._leave(index, call, result)
            except NotRepeated as error:
                self.problem = str(error)
                return result
        self._before, self._next = call, index + 1
        self._sizes = self._sizes_now()
        if self._next == len(self.row.blocks):
            self._before, self._template, self._next = None, None, 0
            self.passes += 1
        return result

    def finish(self) -> None:
        """Check what is known when the step is over."""
        if self.problem:
            raise NotRepeated(self.problem)
        if self._next or not self.passes:
            raise NotRepeated("not all blocks of a row are called")
        if self._read:
            names = sorted({name for _, name in self._read})
            raise NotRepeated(f"blocks read what they differ in: {', '.join(names)}")

    def end_pass(self) -> None:
        """Check what is known of the blocks when the step has run and they are still on meta."""
        if self._attributes != self._attributes_now():
            self.problem = self.problem or "a block changes its attributes"

    def put_gradients(self) -> None:
        """Give the parameters of blocks that did not run gradients like those of the one that stands for them."""
        if self.problem:
            return
        table, recorder = self.recorder.table, self.recorder
        template = [
            (recorder.producers(like), like.grad, (None, None) if like.grad is None else recorder.producers(like.grad))
            for like in self.row.parameters[FIRST - 1]
        ]
        for index in sorted(self._passed_by):
            for parameter, like in zip(self.row.parameters[index], template, strict=True):
                producers, wanted, producers_of_wanted = like
                recorder.set_producers(parameter, producers)
                gradient = parameter.grad
                if wanted is None or gradient is not None:
                    if (wanted is None) != (gradient is None):
                        self.problem = "a block that did not run has a gradient"
                    elif gradient is not None and wanted is not None:
                        number = table.number_of(wanted)
                        own, its = table.drafts[table.number_of(gradient)], table.drafts[number]
                        known = self.stand_ins.get(table.number_of(gradient), (index, HOST))
                        if known != (index, number) and (own.alloc_at, its.alloc_at) != (-1, -1):
                            self.problem = "gradients are replaced by others"
                    continue
                if not wanted.is_meta or type(wanted) is not torch.Tensor or table.number_of(wanted) == HOST:
                    self.problem = "gradients are not plain meta tensors"
                    return
                made = torch.empty_strided(wanted.size(), wanted.stride(), dtype=wanted.dtype, device="meta")
                parameter.grad = made
                number = recorder.adopt(made)
                recorder.set_producers(made, producers_of_wanted)
                self.stand_ins[number] = (index, table.number_of(wanted))

    # -- one call ---------------------------------------------------------------------------------------------------

    def _enter(self, index: int, args: Any, kwargs: Any) -> _Call:
        if index != self._next:
            raise NotRepeated("blocks are not called in order, each once")
        leaves: list[Any] = []
        shape = _flatten((args, kwargs), leaves)
        call = _Call(list(map(_weak, leaves)), shape, self._around())
        before = self._before
        if index == 0 or before is None:
            return call
        if self._sizes != self._sizes_now():
            raise NotRepeated("something happens between the calls of blocks")
        if call.shape != before.shape or call.around != before.around:
            raise NotRepeated("blocks are not called alike")
        if index == 1:
            self._roles = [self._role(leaf, i, before) for i, leaf in enumerate(leaves)]
            return call
        for i, (leaf, role) in enumerate(zip(leaves, self._roles, strict=True)):
            if isinstance(role, int) and not _is(before.outputs[role], leaf):
                raise NotRepeated("a block is not given what the one before it made")
            if role is _TENSOR and not _is(before.leaves[i], leaf):
                raise NotRepeated("blocks are given different tensors")
            if role is None:
                self._role(leaf, i, before)
        return call

    def _role(self, leaf: Any, place: int, before: _Call) -> Any:
        """Return how an argument follows from the call before: as its argument in this place, or from its result."""
        given = before.leaves[place]
        if isinstance(leaf, torch.Tensor):
            if _is(given, leaf):
                return _TENSOR
            for i, output in enumerate(before.outputs):
                if _is(output, leaf):
                    return i
            raise NotRepeated("a block is given a tensor that no block before it was given or made")
        if not is_plain(leaf):
            raise NotRepeated(f"a block is given a {type(leaf).__name__}")
        if type(leaf) is not type(given) or leaf != given:
            raise NotRepeated("blocks are not called alike")
        return None

    def _leave(self, index: int, call: _Call, result: Any) -> None:
        outputs: list[Any] = []
        call.result_shape = _flatten(result, outputs)
        call.outputs = list(map(_weak, outputs))
        call.sources = [_source(output, call.leaves) for output in outputs]
        before = self._before
        if before is not None and (before.result_shape != call.result_shape or before.sources != call.sources):
            raise NotRepeated("blocks do not return alike")
        if index == FIRST - 1:
            for i, output in enumerate(outputs):
                if isinstance(output, torch.Tensor) and not isinstance(call.sources[i], int) and i not in self._roles:
                    raise NotRepeated("a block makes a tensor that is not for the next one")
            self._template = call

    def _result_of(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """Return what a block that is passed by would: its arguments in the places of its results."""
        template = self._template
        assert template is not None
        leaves: list[Any] = []
        _flatten((args, kwargs), leaves)
        places = {role: place for place, role in enumerate(self._roles) if isinstance(role, int)}
        outputs = []
        for i, source in enumerate(template.sources):
            if isinstance(source, int):
                outputs.append(leaves[source])
            else:
                outputs.append(leaves[places[i]] if i in places else template.outputs[i])
        call.outputs, call.result_shape, call.sources = (
            list(map(_weak, outputs)),
            template.result_shape,
            template.sources,
        )
        return _unflatten(template.result_shape, iter(outputs))

    # -- what surrounds it ------------------------------------------------------------------------------------------

    def _around(self) -> tuple[Any, ...]:
        kind = self.recorder.device_type
        hooks = top_saved_tensor_hooks()
        return (
            self.recorder.phase,
            self.recorder.calls.current,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
            None if hooks is None else [getattr(hook, "__code__", type(hook)) for hook in hooks],
            [read() for read, _ in ATTENTION_SWITCHES],
            [type(mode) for mode in function_modes()],
        )

    def _sizes_now(self) -> tuple[int, int, int]:
        recorder = self.recorder
        return len(recorder.ops), len(recorder.table.drafts), len(recorder.calls.calls)

    @contextlib.contextmanager
    def _watched(self, index: int) -> Iterator[None]:
        if index != FIRST - 1 or not self.row.differing:
            yield
            return
        with watched_reads(self._paths, set(self.row.differing), self._read):
            yield

    def _attributes_now(self) -> list[Any]:
        found: list[Any] = []
        for module in self.row.blocks[FIRST - 1].modules():
            tables = (vars(module), parameter_table(module), buffer_table(module), module_table(module))
            found += [[(name, id(value)) for name, value in table.items()] for table in tables]
        return found


def _weak(leaf: Any) -> Any:
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _is(known: Any, tensor: torch.Tensor) -> bool:
    return isinstance(known, weakref.ref) and known() is tensor


def _source(output: Any, leaves: list[Any]) -> Any:
    """Return where a leaf of a result comes from: the place of an argument, a value, or the block."""
    if not isinstance(output, torch.Tensor):
        if not is_plain(output):
            raise NotRepeated(f"a block returns a {type(output).__name__}")
        return (type(output), output)
    place = next((i for i, leaf in enumerate(leaves) if _is(leaf, output)), None)
    geometry = (output.shape, output.stride(), output.storage_offset(), output.dtype, output.requires_grad)
    return geometry if place is None else place


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Return the shape of nested tuples, lists and dicts, and add what is in them to the leaves."""
    kind = type(value)
    if kind in (tuple, list):
        return (kind, [_flatten(item, leaves) for item in value])
    if kind is dict:
        return (kind, [(key, _flatten(item, leaves)) for key, item in value.items()])
    leaves.append(value)
    return None


def _unflatten(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    kind, items = shape
    if kind is dict:
        return {key: _unflatten(item, leaves) for key, item in items}
    return kind([_unflatten(item, leaves) for item in items])
