"""The process around a capture: made neutral while it runs, and put back as it was."""

from __future__ import annotations

import collections
import contextlib
import gc
import operator
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint

from memfit.capture.cuda_api import cuda_answers, cuda_objects
from memfit.capture.replacements import patched
from memfit.hardware import Device
from memfit.torch_private import deferred_imports
from memfit.torch_private.compiler import function_from_graph
from memfit.torch_private.storages import Generator

LOCK = threading.RLock()
"""Held by the one capture that may run at a time: it changes torch for the whole process."""


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the generators of torch, Python and numpy after the block."""
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Free storages by reference counts alone inside the block, at the same ops every time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def cheap_collections() -> Iterator[None]:
    """Let `gc.collect` look only at objects that were made inside the block."""
    if gc.get_freeze_count():  # frozen by the user, and unfreeze cannot tell theirs from ours
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def neutral_modes() -> Iterator[None]:
    """Turn gradients on and autocast off inside the block, wherever the capture is called from."""
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    with torch.inference_mode(False), torch.enable_grad():
        try:
            for kind in enabled:  # entering a region would count as nesting, and keep inner ones from dropping casts
                torch.set_autocast_enabled(kind, False)
            yield
        finally:
            for kind, was_enabled in enabled.items():
                torch.set_autocast_enabled(kind, was_enabled)


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Run kernels inside the block on this many threads, as the target would."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def compiled_functions_eager() -> Iterator[None]:
    """Run compiled functions eagerly: those that exist, and those that are compiled inside the block."""
    entered = deferred_imports.is_loaded()

    def eagerly(compile_function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal entered
            compiled = compile_function(*args, **kwargs)
            if not entered:
                entered = True
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return compiled

        return run

    with contextlib.ExitStack() as stack:
        if entered:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:  # the compiler is loaded only if the step compiles something
            stack.enter_context(patched(torch, "compile", eagerly))
        yield


@contextlib.contextmanager
def unoptimized_scripts() -> Iterator[None]:
    """Run the ops that are written in TorchScript functions, also where earlier calls have optimized them."""

    def as_written(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            anew = function_from_graph(function.qualified_name, function.graph.copy())
            return call(anew, *args, **kwargs)

        return run

    with torch.jit.optimized_execution(False), patched(torch.jit.ScriptFunction, "__call__", as_written):
        yield


@contextlib.contextmanager
def cuda_present(device: Device, note: Callable[[str], None]) -> Iterator[None]:
    """Let a step ask of torch.cuda and torch.accelerator what it likes, and answer as on the target's one GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cuda_generators())
        for owner, name, answer in cuda_answers(device):
            stack.enter_context(patched(owner, name, lambda _, answer=answer: lambda *a, **k: answer))
        for owner in (torch.cuda, torch.cuda.random):
            for name, several in (("get_rng_state", False), ("get_rng_state_all", True)):
                stack.enter_context(patched(owner, name, lambda _, several=several: _cuda_rng_state(several)))
        stack.enter_context(cuda_objects(note))
        stack.enter_context(patched(torch.cuda.amp.common, "amp_definitely_not_available", lambda _: lambda: False))
        kind = torch.utils.checkpoint.DefaultDeviceType
        before = kind.get_device_type()
        kind.set_device_type("cuda")
        stack.callback(kind.set_device_type, before)
        yield


class _AnyGenerator(type(torch.Generator)):
    """Lets `isinstance(value, torch.Generator)` hold for every generator while the name stands for another class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Generator)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != cls.__dict__.get("_thread"):
            return Generator(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class _CudaGenerator(torch.Generator, metaclass=_AnyGenerator):
    """A generator that says it is on the device it was made for; its numbers come from the CPU, as the capture's do."""

    _place: torch.device
    _thread: int | None = None
    """The thread of the capture; others get a generator of torch's own, as all do after it."""

    def __new__(cls, device: Any = "cpu") -> _CudaGenerator:
        made = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made.__dict__["_place"] = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self._place


@contextlib.contextmanager
def _cuda_generators() -> Iterator[None]:
    original = torch.Generator
    _CudaGenerator._thread = threading.get_ident()
    torch.Generator = _CudaGenerator  # type: ignore[misc]
    try:
        yield
    finally:
        _CudaGenerator._thread = None
        torch.Generator = original  # type: ignore[misc]


def _cuda_rng_state(several: bool) -> Callable[..., Any]:
    """Return what gives the state of a CUDA generator: seed and offset, in host memory."""

    def state(*_: Any, **__: Any) -> Any:
        made = torch.zeros(16, dtype=torch.uint8)
        return [made] if several else made

    return state


_INITIALIZERS = ("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_")
_MATRIX_INITIALIZERS = ("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_")


@contextlib.contextmanager
def without_initial_values() -> Iterator[None]:
    """Let `torch.nn.init` leave meta tensors as they are, which have no values: it takes most of a model's building."""

    def skip_meta(least_dims: int) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
        def wrap(initialize: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def initialize_unless_meta(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                if plain and tensor.is_meta and tensor.dim() >= least_dims:
                    return tensor
                return initialize(tensor, *args, **kwargs)

            return initialize_unless_meta

        return wrap

    with contextlib.ExitStack() as stack:
        for name in _INITIALIZERS:
            stack.enter_context(patched(torch.nn.init, name, skip_meta(0)))
        for name in _MATRIX_INITIALIZERS:
            stack.enter_context(patched(torch.nn.init, name, skip_meta(2)))
        yield


RESTORED = frozenset((list, dict, set, collections.OrderedDict, collections.defaultdict))
"""Kinds of containers whose items `same_attributes` restores."""
_DEPTH = 8


def _keep(value: Any, contents: list[tuple[Any, Any]], depth: int) -> None:
    """Copy a container, and those in it, to some depth."""
    if type(value) not in RESTORED or depth == 0:
        return
    if depth < _DEPTH and any(value is seen for seen, _ in contents[-_DEPTH:]):  # it holds itself
        return
    contents.append((value, value.copy()))
    for item in value.values() if isinstance(value, dict) else value:
        _keep(item, contents, depth - 1)


def _put_back(value: Any, before: Any) -> None:
    """Give a list, a dict or a set the items that it had; one that has them still is not touched."""
    if isinstance(value, list):
        if len(value) != len(before) or not all(map(operator.is_, value, before)):
            value[:] = before
    elif isinstance(value, dict):
        if not _same_items(value, before):
            value.clear()
            value.update(before)
    else:
        value.clear()
        value.update(before)


def _same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether two dicts have the very same keys and values, in the same order."""
    return (
        len(one) == len(other)
        and all(map(operator.is_, one, other))
        and all(map(operator.is_, one.values(), other.values()))
    )


@contextlib.contextmanager
def same_attributes(objects: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of objects after the block, and the items of lists, dicts and sets among these."""
    saved = [(vars(thing), dict(vars(thing))) for thing in objects]
    contents: list[tuple[Any, Any]] = []
    empty: list[Any] = []  # most are: the hooks of a module
    for _, before in saved:
        for value in before.values():
            if type(value) not in RESTORED:
                continue
            if value:
                _keep(value, contents, _DEPTH)
            else:
                empty.append(value)
    try:
        yield
    finally:
        for value in empty:
            if value:
                value.clear()
        for value, before in (*contents, *saved):
            _put_back(value, before)


_capturing = threading.local()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Make `is_capturing` true on this thread inside the block."""
    before, _capturing.on = is_capturing(), True
    try:
        yield
    finally:
        _capturing.on = before


def is_capturing() -> bool:
    """Return whether a step is being captured on this thread: what runs on real tensors has nothing to do there."""
    return getattr(_capturing, "on", False)
