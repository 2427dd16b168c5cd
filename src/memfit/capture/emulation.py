"""The function mode that makes the capture run what the target would run.

It answers `tensor.device` with the target's device, sends tensors made or moved there to the capture, applies
autocast, and hands the functions whose composition differs between devices to the rules.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.autocast import Autocast
from memfit.capture.errors import DATA_DEPENDENT, UnsupportedError
from memfit.capture.kernels import inexact, note_on
from memfit.capture.recorder import Recorder
from memfit.capture.rules import Rule, RuleContext
from memfit.torch_private.autograd import base_of
from memfit.torch_private.dispatch import (
    DeviceContext,
    DisableTorchDispatch,
    DisableTorchFunction,
    TensorBase,
    current_dispatch_mode,
    device_constructors,
    disable_current_modes,
    function_modes,
    global_device_context,
)
from memfit.torch_private.functorch import unwrap
from memfit.torch_private.storages import replay_view, storage_key, storage_use_count, swap_tensors

_FINITE_TESTS = {"isfinite": True, "isnan": False, "isinf": False}
"""What these say of the tensors of a steady step."""

_INDEXING = frozenset(("__getitem__", "__setitem__"))
_READS = frozenset(("tolist", "numpy", "__array__"))
_MOVES = frozenset(("to", "cuda", "cpu"))
_LEGACY_DTYPES = {
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
"""What `torch.cuda.FloatTensor` and its like, given to `Tensor.type`, ask for."""
_CONVERSIONS = (torch.as_tensor, torch.asarray)
_SILENCED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Emulation(TorchFunctionMode):
    """Sees every torch function the step calls from Python."""

    def __init__(self, recorder: Recorder, context: RuleContext, rules: dict[str, Rule]) -> None:
        super().__init__()
        self.recorder = recorder
        self.autocast = Autocast(context.device_type)
        self._device_type = context.device_type
        self.device = torch.device("cpu") if context.device_type == "cpu" else torch.device("cuda", 0)
        self._context = context
        self._rules = rules
        self._inexact = inexact() if context.device_type == "cpu" else {}
        self._factories = device_constructors()
        self.stand_ins: dict[int, torch.Tensor] = {}

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device the tensor would be on in the real run."""
        return self.device if self.recorder.table.on_device(unwrap(tensor)) else torch.device("cpu")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stand_ins:
            args, kwargs = map_tensors(args, self._stand_in), map_tensors(kwargs, self._stand_in)
        getter = _GETTERS.get(func)
        if getter is not None:
            return getter(self, args[0])
        name = func.__name__
        if name == "__get__":
            return func(*args, **kwargs)
        if name == "item" and self.recorder.is_host_number(args[0]):
            if current_dispatch_mode() is not self.recorder:
                return func(*args, **kwargs)  # a mode of the user's sees it too
            with DisableTorchDispatch():
                return func(*args, **kwargs)
        if self._inexact and (note := note_on(self._inexact, name, args)) is not None:
            self.recorder.notes.add(note)
        try:
            if name in _READS:
                if not self.recorder.executor.has_value(args[0]):
                    raise UnsupportedError("the step depends on the values of a tensor", DATA_DEPENDENT)
                self.recorder.note_read(args[0])
            if name == "requires_grad_" or (name == "__set__" and func == _SET_REQUIRES_GRAD):
                self._lose_values(args[0])
            elif name[-1] == "_" and (name[-2] != "_" or name in _WRITING):
                self._lose_written_values(args, kwargs)
            if name in _INDEXING:
                args = (args[0], self._index(args[0], args[1]), *args[2:])
            if name == "pin_memory" and self._device_type != "cpu":
                return args[0]
            if name == "type" and (legacy := _legacy_type(args[1:])) is not None:
                return self._move(torch.Tensor.to, (args[0], *legacy), {})
            if name in _MOVES:
                return self._move(func, args, kwargs)
            if func in self._factories or kwargs.get("device") is not None:
                return self._make(func, args, kwargs)
            if torch.is_autocast_enabled(self._device_type):
                cast = self.autocast.apply(func, args, kwargs)
                if cast is not None:
                    args, kwargs = cast
            rule = self._rules.get(name)
            if rule is not None and not (name in _TELLING and self.recorder.executor.has_value(args[0])):
                if not getattr(rule, "as_given", False):
                    args, kwargs = map_tensors(args, self._lift), map_tensors(kwargs, self._lift)
                result = self._apply(rule, args, kwargs)
                if result is not NotImplemented:
                    return result
            result = func(*args, **kwargs)
            if name in _FINITE_TESTS and isinstance(result, torch.Tensor):
                self.recorder.finite_tests[self.recorder.table.number_of(unwrap(result))] = _FINITE_TESTS[name]
            return result
        except Exception as error:
            self.recorder.note_failure(error, name)
            raise

    def _apply(self, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a rule. In one marked as `composed`, autocast applies to the functions that it calls, not to itself.

        One marked as `emulated` runs code of torch that asks tensors for their device; one marked `as_given` only calls
        other functions, and gets tensors of the user's as they are: the ops that these become find out whose they are.
        """
        composed = getattr(rule, "composed", False) and torch.is_autocast_enabled(self._device_type)
        if composed or getattr(rule, "emulated", False):
            with self:
                return rule(self._context, *args, **kwargs)
        return rule(self._context, *args, **kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.stand_ins.get(id(tensor), tensor)

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.recorder.executor.lift(tensor, self.recorder.calls.path)

    def _lose_written_values(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Lift a real tensor that gradients will flow through to a meta tensor, before autograd sees the write."""
        if not args or not isinstance(args[0], torch.Tensor) or args[0].is_meta or not torch.is_grad_enabled():
            return
        if any(each.requires_grad for each in tensors_of((*args[1:], *kwargs.values()))):
            self._lose_values(args[0])

    def _lose_values(self, tensor: torch.Tensor) -> None:
        """Turn a real tensor that is to take gradients into the meta tensor that stands for it, in its place.

        So are the tensor that it is a view of and that one's other views, which share its gradients.
        """
        if tensor.is_meta or unwrap(tensor) is not tensor:
            return
        with DisableTorchFunction(), disable_current_modes():
            base = base_of(tensor)
            base = tensor if base is None else base
            views = [] if tensor is base else [tensor]
            pointer = storage_key(base)
            if storage_use_count(pointer) > len(views) + 2:  # more than these, and its Python object
                tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
                views = [each for each in tensors if base_of(each) is base]
            stand_in = self._lift(base).detach()
            for view in views:
                swap_tensors(view, replay_view(view, stand_in))
            swap_tensors(base, stand_in)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a factory: on the target it makes a meta or a small real tensor, on the host a real one."""
        device = kwargs.get("device")
        if func in _CONVERSIONS and args and isinstance(args[0], torch.Tensor) and not kwargs.get("copy"):
            return self._move(torch.Tensor.to, args, {k: v for k, v in kwargs.items() if k in ("device", "dtype")})
        if device is None:
            place = _default_device_type()
        else:
            place = torch.device(device).type if not isinstance(device, int) else "cuda"
        kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        previous, self.recorder.forced_device = self.recorder.forced_device, "cpu" if place == "cpu" else "cuda"
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.forced_device = previous

    def _index(self, tensor: torch.Tensor, index: Any) -> Any:
        """Return an index with tensors in place of lists of numbers: of a real tensor torch makes them, of meta not."""
        if isinstance(index, tuple):
            return tuple(self._index(tensor, each) for each in index)
        if not isinstance(index, list) or not _holds_numbers(index):
            return index
        on_device = self._device_type != "cpu" and self.recorder.table.on_device(unwrap(tensor))
        return self._make(torch.tensor, (index,), {"device": "cuda" if on_device else "cpu"})

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `Tensor.to`, `.cuda` and `.cpu`: copy when the device changes, and only then."""
        tensor = args[0]
        if func.__name__ != "to":
            device, dtype, options = func.__name__, None, {}
        else:
            device, dtype, options = self._destination(args[1:], dict(kwargs))
        if device is None:
            return func(*args, **kwargs)
        place = "cpu" if not isinstance(device, int) and torch.device(device).type == "cpu" else "cuda"
        if self._device_type == "cpu" or (place == "cuda") == self.recorder.table.on_device(unwrap(tensor)):
            return tensor.to(dtype or tensor.dtype, **options)
        previous, self.recorder.forced_device = self.recorder.forced_device, place
        try:
            return torch.ops.aten._to_copy(tensor, dtype=dtype)
        finally:
            self.recorder.forced_device = previous

    def _destination(self, values: Any, kwargs: dict[str, Any]) -> tuple[Any, torch.dtype | None, dict[str, Any]]:
        """Return device, dtype and other options of `Tensor.to`, in any of its three forms."""
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        other = kwargs.pop("other", None)
        flags = ["non_blocking", "copy"]
        for value in (*values, other):
            if isinstance(value, torch.Tensor):
                device, dtype = self.device_of(value), value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, bool):
                kwargs[flags.pop(0)] = value
            elif value is not None:
                device = value
        return device, dtype, kwargs


_WRITING = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")
)
_TELLING = frozenset(
    ("max", "min", "median", "nanmedian", "amax", "amin", "any", "all", "sum", "prod", "cumprod")
).union(("quantile", "nanquantile"))
"""What a step may branch on: of known values, these are known too."""
_SET_REQUIRES_GRAD = vars(TensorBase)["requires_grad"].__set__


def _legacy_type(values: Any) -> tuple[str, torch.dtype] | None:
    """Return the device and dtype of a tensor type of CUDA; None for what is no such type."""
    given = values[0] if values else ""
    name = given if isinstance(given, str) else f"{given.__module__}.{getattr(given, '__name__', '')}"
    module, _, kind = name.rpartition(".")
    return ("cuda", _LEGACY_DTYPES[kind]) if module == "torch.cuda" and kind in _LEGACY_DTYPES else None


def _default_device_type() -> str:
    """Return the type of the default device; `torch.get_default_device` makes a tensor on it to find out."""
    for mode in reversed(function_modes()):
        if isinstance(mode, DeviceContext):
            return mode.device.type
    context = global_device_context()
    return "cpu" if context is None else context.device.type


def _getter(name: str) -> Any:
    """Return what a function mode is called with when the attribute of a tensor is read."""
    return vars(TensorBase)[name].__get__


_GETTERS: dict[Any, Callable[[Emulation, torch.Tensor], Any]] = {
    _getter("device"): Emulation.device_of,
    _getter("is_meta"): lambda *_: False,
    _getter("is_cuda"): lambda emulation, tensor: emulation.device_of(tensor).type == "cuda",
    _getter("is_cpu"): lambda emulation, tensor: emulation.device_of(tensor).type == "cpu",
    torch.Tensor.get_device: lambda emulation, tensor: 0 if emulation.device_of(tensor).type == "cuda" else -1,
}


@contextlib.contextmanager
def python_functions_open() -> Iterator[None]:
    """Let the bodies of torch's Python functions run under the mode.

    `F.multi_head_attention_forward` and its like would otherwise reach the mode as one call, inside which no mode is
    active.
    """
    replaced = []
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "torch" or module_name == "torch.overrides":
            continue
        for name in _SILENCED:
            original = vars(module).get(name)
            if original is not None:
                replaced.append((module, name, original))
    try:
        for module, name, _ in replaced:
            setattr(module, name, _no_override)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _no_override(*_: Any) -> bool:
    return False


def _holds_numbers(index: list[Any]) -> bool:
    """Return whether a list, or one inside it, holds numbers and nothing else."""
    return bool(index) and all(
        _holds_numbers(each) if isinstance(each, list) else isinstance(each, int) for each in index
    )
