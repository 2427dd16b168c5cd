"""What a capture sees of a step that runs on several ranks: streams, storages that are resized, collectives.

Note [Parallel capture]: PyTorch's own code runs (`fully_shard`, DTensor, DDP and FSDP1: Note [Wrapped models]) on ranks
that are not there (`fake_ranks.py`). The model is built for the capture and belongs to it, so nothing stands in for its
tensors and nothing is put back. Three things differ from a step on one device:

1. FSDP gives an unsharded parameter its memory with `UntypedStorage.resize_`, which is no op. The storage is counted
   as made by the next op, which fills it, and freed after the last one before it was emptied. Autograd saves the
   parameter itself, and not a tensor that keeps its bytes.
2. Collectives are run on empty tensors: what they are given stays as it is, and what they return is of the same kind.
3. The stream that is current when something is allocated is kept with it, by the name that FSDP gives it.

A first step makes what later steps find, so the step is recorded when it runs for the second time, or for the third
where DDP has made its buckets anew in the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.arguments import is_wrapper, map_tensors, tensors_of
from memfit.capture.cuda_api import StreamStandIn
from memfit.capture.mesh_groups import MeshGroups
from memfit.capture.pipelines import PipelineRecorder
from memfit.capture.recorder import Recorder
from memfit.capture.replacements import patched, replaced
from memfit.capture.storages import HOST
from memfit.capture.trace_types import BEFORE_STEP, Category, CollectiveCall
from memfit.capture.wrapped_models import own_modules, used_map_of, wrappers
from memfit.torch_private.data_parallel import (
    FSDP1_STREAMS,
    LOG_TIMES,
    REBUILD_BUCKETS,
    FullyShardedDataParallel,
    finished_work,
    flat_parameters,
    low_precision_parameters,
)
from memfit.torch_private.dispatch import DisableTorchFunction, DispatchMode, disable_current_modes, schema_of
from memfit.torch_private.distributed import (
    CHECK_FOR_META,
    FSDP2_STREAMS,
    KEEP_AFTER_FORWARD,
    MAKE_STREAMS,
    PREFETCH,
    UNSHARD_BEFORE_FORWARD,
    AsyncCollectiveTensor,
    FSDPCommContext,
    FSDPParam,
    fsdp2_comm_context,
    group_size,
    group_stride,
    part_kept_after_forward,
)
from memfit.torch_private.distributed_tensors import local_tensor, with_local
from memfit.torch_private.storages import key_of, storage_key

_functional = torch.ops._c10d_functional
_COMPUTE = "compute"
_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "send": "send",
    "recv_": "send",
    "recv_any_source_": "send",
}
"""Ops that communicate, and what memfit calls what they do."""
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_all_reduce = torch.ops.c10d.allreduce_.default
_BESIDE = object()
_WITH_FUTURE = (torch.ops.c10d.allreduce_, torch.ops.c10d.allgather_)
"""Collectives whose result DDP's reducer and its hooks take from the future of their work."""
_RESULT_COUNTS = frozenset(("all_gather",))
"""Collectives whose bytes are those of the result; of the others those of what they are given."""


class ParallelCapture:
    """Follows one pass of a step on several ranks."""

    def __init__(
        self, recorder: Recorder, model: nn.Module, note: Callable[[str], None], mesh: Mapping[str, int]
    ) -> None:
        self._recorder = recorder
        self._model = model
        self.used_maps: set[int] = set()
        """Storages in which DDP notes the parameters that a backward has used, on the host (`wrapped_models.py`)."""
        self.rebuilt = False
        """Whether DDP has made its buckets anew, which it does once: the next step is the one that all are like."""
        self._groups = MeshGroups(mesh)
        self._note = note
        self._streams = _Streams(recorder.device_type)
        self._collectives: list[tuple[int, str, int, int, Any, int, tuple[str, ...]]] = []
        self._op_streams: dict[int, Any] = {}
        self._under_way: dict[int, list[torch.Tensor]] = {}
        """What collectives were given that nobody has waited for, by the storage of their result: they hold it."""
        self.pipelines = PipelineRecorder(recorder)
        recorder.parallel = self
        recorder.table.local = local_tensor
        recorder.table.current_stream = self._streams.current
        recorder.executor.keeps_empty_on_meta = True
        recorder.executor.run_collective = self.run

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Follow the step inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(torch.UntypedStorage, "resize_", self._resize))
            stack.enter_context(patched(*REBUILD_BUCKETS, self._rebuild))
            stack.enter_context(patched(*LOG_TIMES, lambda _: lambda *args: None))
            stack.enter_context(patched(torch.UntypedStorage, "data_ptr", _storage_address))
            stack.enter_context(patched(torch.Tensor, "data_ptr", _tensor_address))
            stack.enter_context(patched(*CHECK_FOR_META, lambda _: lambda group: None))
            stack.enter_context(patched(*MAKE_STREAMS, self._name_streams))
            stack.enter_context(patched(*KEEP_AFTER_FORWARD, self._note_kept_part))
            stack.enter_context(patched(*UNSHARD_BEFORE_FORWARD, self._before_call))
            prefetch = staticmethod(self._prefetched(getattr(*PREFETCH)))
            stack.enter_context(replaced(*PREFETCH, prefetch))
            stack.enter_context(self._streams.followed())
            stack.enter_context(self.pipelines.applied())
            yield

    def name_parts(self) -> None:
        """Learn the names of streams that an earlier pass has made, and whose parameters FSDP1 gathers where."""
        table = self._recorder.table
        for module in self._model.modules():
            context = fsdp2_comm_context(module)
            if context is not None:
                self._streams.name(context, FSDP2_STREAMS)
        for path, wrapper in wrappers(self._model):
            used_map = used_map_of(wrapper)
            if used_map is not None:
                self.used_maps.add(storage_key(used_map))
                if self._recorder.device_type == "cpu":
                    table.adopt(used_map, Category.BUFFER, module=path)
            if isinstance(wrapper, FullyShardedDataParallel):
                self._streams.name(wrapper, FSDP1_STREAMS)
                for tensor, gathered in flat_parameters(wrapper):
                    category = Category.GATHERED_PARAMETER if gathered else Category.COMMUNICATION
                    table.homes[storage_key(tensor)] = path, category
        for path, module in own_modules(self._model):
            for tensor in low_precision_parameters(module):
                table.homes[storage_key(tensor)] = path, Category.GATHERED_PARAMETER
                if storage_key(tensor) not in table.known:
                    table.adopt_emptied(tensor)

    def _name_streams(self, original: Callable[..., None]) -> Callable[..., None]:
        def lazy_init(context: FSDPCommContext, device: torch.device) -> None:
            original(context, device)
            self._streams.name(context, FSDP2_STREAMS)

        return lazy_init

    def _before_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let a module's call begin after FSDP2 has gathered its parameters, which is not part of what it computes."""

        def pre_forward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._recorder.calls.begin_at(len(self._recorder.ops))
            return result

        return pre_forward

    def _note_kept_part(self, original: Callable[..., None]) -> Callable[..., None]:
        def reshard(parameter: FSDPParam) -> None:
            original(parameter)
            self._set_category((part_kept_after_forward(parameter),), Category.GATHERED_PARAMETER)

        return reshard

    def _prefetched(self, original: Callable[..., Any]) -> Any:
        def prefetch(group: Any, kind: str) -> None:
            original(group, kind)
            if kind == "forward":
                self._recorder.calls.begin_at(len(self._recorder.ops))

        return prefetch

    def _resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._recorder.table.resized(storage, self._recorder.calls.current, self._recorder.calls.path)
            return result

        return resize

    def _rebuild(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def rebuild(reducer: Any) -> bool:
            with _KnownIndices():
                rebuilt = original(reducer)
            self.rebuilt = self.rebuilt or rebuilt
            return rebuilt

        return rebuild

    def is_of_used_map(self, args: Any) -> bool:
        """Return whether an op works on what DDP notes of its parameters."""
        return bool(args) and isinstance(args[0], torch.Tensor) and storage_key(args[0]) in self.used_maps

    def run_on_used_map(self, func: Any, args: Any) -> Any:
        """Run an op of DDP's on the parameters that it has noted; other ranks have used the same ones."""
        with disable_current_modes(), DisableTorchFunction():
            if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].is_meta:
                return args[0]  # the sum over all ranks
            return func(*args)

    # -- tensors that are distributed ------------------------------------------------------------------------------

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of a tensor."""
        with DisableTorchFunction():
            return local_tensor(tensor)

    def around(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return a distributed tensor like another one, of which this rank holds `local`."""
        with DisableTorchFunction(), disable_current_modes():
            return with_local(tensor, local)

    def waited(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return what a result of a collective becomes that is waited for, or is to be; None for any other op.

        It is the same tensor. Kernels on meta make another one, which a real run does not have.
        """
        if func is _functional.wait_tensor.default:
            self._under_way.pop(storage_key(args[0]), None)
            return args[0]
        return AsyncCollectiveTensor(args[0]) if func is _functional._wrap_tensor_autograd.default else None

    # -- collectives ------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a collective on empty tensors, and return what it does with these for the tensors it was given."""
        given: dict[int, torch.Tensor] = {}

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty(0, dtype=tensor.dtype)
            given[id(made)] = tensor
            return made

        with disable_current_modes(), DisableTorchFunction():
            small, small_kwargs = map_tensors(args, empty), map_tensors(kwargs, empty)
            result = func(*small, **small_kwargs)
            kept = tensors_of((*small, *small_kwargs.values()))
            result = map_tensors(result, lambda tensor: given.get(id(tensor), tensor))
            del kept  # only so that no two have one address
            if func._overloadpacket in _WITH_FUTURE:
                return *result[:-1], finished_work(tensors_of(args[:1]))
            return result

    def described(self, args: Any) -> Any:
        """Return arguments as they are recorded: a group by its size, which has no address."""
        return tuple(
            f"group of {group_size(each)}" if _is_group(each) else "reduce" if _is_script(each) else each
            for each in args
        )

    def note_op(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note an op that was just recorded, if it communicates; and what its buffers are for."""
        name = func._overloadpacket.__name__
        table = self._recorder.table
        stream = self._streams.current()
        if not self._streams.is_default(stream):
            self._op_streams[table.now - 1] = stream
        if name == "_scaled_dot_product_efficient_attention":
            for scalar in result[2:]:  # seed and offset, which are in host memory
                table.drafts[table.number_of(scalar)].bytes = 0
        if func.namespace == "fsdp":
            if name == "all_gather_copy_in":
                self._set_category(args[0], Category.COMMUNICATION)
            elif name == "chunk_cat":
                self._set_category(args[0], Category.GRADIENT)
            return
        kind = _KINDS.get(name) if func.namespace in _NAMESPACES else None
        if kind is None:
            return
        group = next((each for each in args if _is_group(each)), None)
        if group is None:
            group = next((each for each in reversed(args) if isinstance(each, str)), None)
        tensors = tensors_of(args)
        if func.namespace == "_c10d_functional":
            for each in tensors_of((result,)):
                self._under_way[storage_key(each)] = [given for given in tensors if given is not each]
        if func.namespace == "c10d" and name not in ("send", "allreduce_", "broadcast_"):
            written, read = tensors_of(args[:1]), tensors_of(args[1:2])
        else:
            written, read = tensors_of((result,)) or tensors, tensors
        counted = written if kind in _RESULT_COUNTS else read or written
        n_bytes = sum(each.numel() * each.element_size() for each in counted)
        if func is _all_reduce and _is_async(args):
            stream = self._streams.beside(stream)
        ranks, stride, dims = 0, 1, ()
        if group is not None:
            ranks, stride, dims = group_size(group), group_stride(group), self._groups.dims_of(group)
        self._collectives.append((table.now - 1, kind, ranks, n_bytes, stream, stride, dims))
        if func.namespace == "c10d" and name != "send":  # what a stage sends is its output, and the backward's
            self._set_category((*written, *read), Category.COMMUNICATION)

    def _set_category(self, values: Any, category: Category) -> None:
        for tensor in tensors_of(values):
            number = self._recorder.table.number_of(tensor)
            draft = None if number == HOST else self._recorder.table.drafts[number]
            if draft is None:
                continue
            if draft.alloc_at != BEFORE_STEP:
                draft.category = draft.category or category
            elif draft.category is Category.BUFFER and not draft.name:  # no buffer of a module: a bucket of DDP's
                draft.category = category

    # -- the result -------------------------------------------------------------------------------------------------

    def collectives(self) -> tuple[CollectiveCall, ...]:
        """Return the collectives in the order in which they are called."""
        return tuple(
            CollectiveCall(
                op=op,
                kind=kind,
                ranks=ranks,
                bytes=n_bytes,
                stream=self._streams.name_of(stream),
                stride=stride,
                dims=dims,
            )
            for op, kind, ranks, n_bytes, stream, stride, dims in self._collectives
        )

    def op_streams(self) -> dict[int, str]:
        """Return the streams of ops that do not run on the compute stream, by index."""
        named = {index: self._streams.name_of(stream) for index, stream in self._op_streams.items()}
        return {index: name for index, name in named.items() if name != _COMPUTE}

    def streams(self) -> dict[int, str]:
        """Return the streams of storages that are not allocated on the compute stream, by number."""
        named = {
            number: self._streams.name_of(draft.stream)
            for number, draft in enumerate(self._recorder.table.drafts)
            if draft.stream is not None
        }
        if self._streams.strangers:
            self._note("the step allocates on streams of its own; their blocks are counted as those of the copy stream")
        return {number: name for number, name in named.items() if name != _COMPUTE}


class _Streams:
    """Which stream is current, and what each is called. On a GPU that is not there they are stand-ins."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._default: Any = StreamStandIn() if self._cuda else torch.cpu.current_stream()
        self._current = self._default
        self._names: dict[int, str] = {id(self._default): _COMPUTE, id(_BESIDE): "reduce"}
        self._kept: list[Any] = []
        self.strangers = False

    def current(self) -> Any:
        """Return the stream that is current."""
        return self._current if self._cuda else torch.cpu.current_stream()

    def is_default(self, stream: Any) -> bool:
        """Return whether a stream is the one that is current outside all blocks."""
        return stream is self._default

    def name(self, context: Any, attributes: Mapping[str, str]) -> None:
        """Give the streams of FSDP2 or FSDP1, which are attributes of an object, their names."""
        for attribute, name in attributes.items():
            stream = getattr(context, attribute, None)
            if stream is not None and stream is not self._default and id(stream) not in self._names:
                self._names[id(stream)] = name
                self._kept.append(stream)

    def name_of(self, stream: Any) -> str:
        """Return the name of a stream; one that nobody named is the step's own."""
        found = self._names.get(id(stream))
        if found is None:
            self.strangers = True
        return found or "copy"

    def beside(self, stream: Any) -> Any:
        """Return where a collective runs that is not waited for: NCCL has a stream of its own beside the default."""
        return _BESIDE if stream is self._default else stream

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow `torch.cuda.stream` and its like, which the emulation of a GPU otherwise ignores."""
        if not self._cuda:
            yield
            return
        streams = self

        def init(context: Any, stream: Any) -> None:
            context.stream, context.before = stream, []

        def enter(context: Any) -> None:
            context.before.append(streams._current)
            if context.stream is not None:
                streams._current = context.stream

        def leave(context: Any, *_: Any) -> None:
            streams._current = context.before.pop()

        entered: list[Any] = []

        def enter_stream(stream: Any) -> Any:
            entered.append(streams._current)
            streams._current = stream
            return stream

        def leave_stream(stream: Any, *_: Any) -> None:
            streams._current = entered.pop()

        def set_stream(_: Any) -> Callable[..., None]:
            def change(stream: Any) -> None:
                streams._current = stream

            return change

        members: Mapping[str, Any] = {"__init__": init, "__enter__": enter, "__exit__": leave}
        with contextlib.ExitStack() as stack:
            for name, value in members.items():
                stack.enter_context(replaced(torch.cuda.StreamContext, name, value))
            stack.enter_context(replaced(StreamStandIn, "__enter__", enter_stream))
            stack.enter_context(replaced(StreamStandIn, "__exit__", leave_stream))
            for owner in (torch.cuda, torch.accelerator):
                stack.enter_context(patched(owner, "current_stream", lambda _: lambda *a, **k: streams._current))
                stack.enter_context(patched(owner, "set_stream", set_stream))
            yield


class _KnownIndices(DispatchMode):
    """Keeps values of the tensors in which DDP's ranks agree on the order of buckets: integers, as no gradient is.

    They are made and sent once, when the buckets are made anew, and belong to no step that is recorded.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of((*args, *kwargs.values()))
        if kwargs.get("dtype") is not torch.int32 and not any(each.dtype is torch.int32 for each in tensors):
            return func(*args, **kwargs)
        if not tensors:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with disable_current_modes(), DisableTorchFunction():
            return func(*args, **kwargs)


def _storage_address(original: Callable[..., int]) -> Callable[..., int]:
    """Give storages on meta addresses by which they can be told apart, as FSDP1 does; without bytes they have none."""

    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return original(storage)
        return key_of(storage) if storage.nbytes() else 0

    return data_ptr


def _tensor_address(original: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(tensor: torch.Tensor) -> int:
        with DisableTorchFunction():
            if is_wrapper(type(tensor)) or tensor.device.type != "meta":
                return original(tensor)
            address = tensor.untyped_storage().data_ptr()
            return address + int(tensor.storage_offset()) * tensor.element_size() if address else 0

    return data_ptr


def _is_async(args: Any) -> bool:
    """Return whether an all-reduce is not waited for by who calls it: `async_op`, which is true unless given."""
    names = [argument.name for argument in schema_of(_all_reduce).arguments]
    place = next((place for place, name in enumerate(names) if name in ("async_op", "asyncOp")), None)
    return place is not None and (place >= len(args) or bool(args[place]))


def _is_script(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject)


def _is_group(value: Any) -> bool:
    return _is_script(value) and "ProcessGroup" in str(value._type())
