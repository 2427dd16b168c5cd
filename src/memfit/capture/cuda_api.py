"""`torch.cuda` and `torch.accelerator` as a step on the target's one GPU would find them.

A step may ask for streams, events, properties of the device and figures of its memory. The answers are those of the
target, whether or not this machine has a GPU and whatever torch was compiled for.

Note [Streams]: all that a step does is recorded in the order in which it is called, as on one stream. What the caching
allocator keeps apart for a stream of the step's own is not modelled; the trace has a note of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.capture.replacements import replaced
from memfit.hardware import Device

_STREAM_NOTE = (
    "the step uses CUDA streams of its own; it was captured as if on one stream, so blocks that the allocator keeps "
    "for each stream are not counted twice"
)


class _StandIn:
    """Passes for an instance of the class that it stands for."""

    kind: type = object

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self.kind


class StreamStandIn(_StandIn):
    """A CUDA stream on which nothing runs; entering it changes nothing."""

    kind = torch.cuda.Stream
    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1
    priority = 0
    device = torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> Any:
        return EventStandIn() if event is None else event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    wait_event = wait_stream = synchronize = _nothing

    def __enter__(self) -> StreamStandIn:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class EventStandIn(_StandIn):
    """A CUDA event that has always happened."""

    kind = torch.cuda.Event
    cuda_event = 0
    event_id = 0
    device = torch.device("cuda", 0)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = synchronize = _nothing


class _Nothing:
    """Stands for `torch.cuda.device(...)`, `torch.cuda.stream(...)` and their like: there is only one of each."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = self.prev_idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


class _Instead(type):
    """Makes classes that pass for `torch.Stream` and `torch.Event`, which cannot be changed themselves.

    After the capture they are as good as the originals, for a module that was imported meanwhile and kept one.
    """

    original: type
    make: Callable[..., Any] | None
    stand_in: type

    thread: int

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        make = cls.__dict__["make"]  # not bound
        if make is None or threading.get_ident() != cls.thread:
            return cls.original(*args, **kwargs)
        return make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original) or type(instance) is cls.stand_in

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original) or subclass is cls.stand_in


class _Markers:
    """Stands for the library behind `torch.cuda.nvtx` on one thread."""

    def __init__(self, original: Any, thread: int) -> None:
        self._original = original
        self._thread = thread

    def __getattr__(self, name: str) -> Callable[..., int]:
        if threading.get_ident() != self._thread:
            return getattr(self._original, name)
        return lambda *args, **kwargs: 0


@contextlib.contextmanager
def cuda_objects(note: Callable[[str], None]) -> Iterator[None]:
    """Let streams, events and the context managers of `torch.cuda` be made, also by code that imported the classes."""

    def new_stream(*_: Any, **__: Any) -> StreamStandIn:
        note(_STREAM_NOTE)
        return StreamStandIn()

    def new_event(*_: Any, **__: Any) -> EventStandIn:
        return EventStandIn()

    cuda = torch.cuda
    thread = {"thread": threading.get_ident()}
    stream_names = {"original": torch.Stream, "make": new_stream, "stand_in": StreamStandIn, **thread}
    event_names = {"original": torch.Event, "make": new_event, "stand_in": EventStandIn, **thread}
    index_names = {"original": torch.accelerator.device_index, "make": _Nothing, "stand_in": _Nothing, **thread}
    stream_type, event_type = _Instead("Stream", (), stream_names), _Instead("Event", (), event_names)
    index_type = _Instead("device_index", (), index_names)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, stream_type, "make", None)
        stack.callback(setattr, event_type, "make", None)
        stack.callback(setattr, index_type, "make", None)
        for owner, name, value in (
            (cuda.Stream, "__new__", staticmethod(new_stream)),
            (cuda.Event, "__new__", staticmethod(new_event)),
            (torch, "Stream", stream_type),
            (torch, "Event", event_type),
            *(
                (owner, name, vars(_Nothing)[name])
                for owner in (cuda.device, cuda.StreamContext)
                for name in ("__init__", "__enter__", "__exit__")
            ),
            (torch.accelerator, "device_index", index_type),
            (torch.Tensor, "record_stream", StreamStandIn._nothing),
            (cuda.nvtx, "_nvtx", _Markers(cuda.nvtx._nvtx, threading.get_ident())),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def cuda_answers(device: Device) -> list[tuple[Any, str, Any]]:
    """List what functions of `torch.cuda` and `torch.accelerator` return on the device: owner, name, answer."""
    capability = device.compute_capability or (8, 0)
    total_bytes = device.memory_total_bytes
    properties = types.SimpleNamespace(
        name=device.title,
        total_memory=total_bytes,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=device.multiprocessors or 0,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
    )
    stream = StreamStandIn()
    memory = {"memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0}
    nothing = dict.fromkeys(
        (
            *("synchronize", "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
            *("set_device", "set_stream", "init", "ipc_collect", "_lazy_init", "set_sync_debug_mode"),
            *("reset_max_memory_allocated", "reset_max_memory_cached", "set_per_process_memory_fraction"),
            *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
        )
    )
    cuda = {
        **nothing,
        **memory,
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "is_bf16_supported": True,
        "is_tf32_supported": capability >= (8, 0),
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": device.title,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
        "can_device_access_peer": False,
        "current_stream": stream,
        "default_stream": stream,
        "mem_get_info": (total_bytes, total_bytes),
        "memory_cached": 0,
        "max_memory_cached": 0,
        "memory_stats": {},
        "memory_summary": "",
        "initial_seed": 0,
    }
    accelerator = {
        **memory,
        "is_available": True,
        "device_count": 1,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "current_device_idx": 0,
        "set_device_index": None,
        "set_device_idx": None,
        "current_stream": stream,
        "set_stream": None,
        "synchronize": None,
        "empty_cache": None,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "reset_accumulated_memory_stats": None,
        "get_memory_info": (total_bytes, total_bytes),
    }
    found = [
        (owner, name, answer)
        for owner, answers in (
            (torch.cuda, cuda),
            (torch.cuda.memory, cuda),
            (torch.cuda.random, cuda),
            (torch.accelerator, accelerator),
            (sys.modules["torch.accelerator.memory"], accelerator),
            (torch.cuda.graphs, {"is_current_stream_capturing": False}),
        )
        for name, answer in answers.items()
    ]
    found.append((torch.backends.cuda, "is_built", True))
    return [(owner, name, answer) for owner, name, answer in found if hasattr(owner, name)]
