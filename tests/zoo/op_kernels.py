"""Compares what rules and meta kernels say of single kernel calls with what the real kernels do on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.arguments import map_tensors, tensors_of
from memfit.capture.execution import Executor
from memfit.capture.kernels import allocations, operand_kind, signature
from memfit.capture.rules import RuleContext, rules_for
from memfit.capture.storages import StorageTable

_LABEL = "memfit: call "


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an aten op on real tensors."""

    func: Any
    args: Any
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.func)

    @property
    def kind(self) -> str:
        """The kind of its operands, as the table of certified kernels has it."""
        return operand_kind(tensors_of((*self.args, *self.kwargs.values())))


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, KernelCall] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and tensors_of((*args, *kwargs.values())):
            key = signature(func, args, kwargs)
            if key not in self.found:
                kept = map_tensors(args, torch.Tensor.detach), map_tensors(kwargs, torch.Tensor.detach)
                self.found[key] = KernelCall(func, *kept)
        return func(*args, **kwargs)


def kernel_calls(run: Callable[[], Any]) -> dict[Any, KernelCall]:
    """The different kernel calls that something makes, by their geometry."""
    with _Calls() as calls:
        run()
    return calls.found


@dataclass(frozen=True, slots=True)
class _Facts:
    """Results (geometry, and bytes of those with a storage of their own) and bytes held beyond them."""

    results: tuple[Any, ...]
    result_bytes: int
    workspace_bytes: int


def check_kernels(calls: Sequence[KernelCall]) -> list[str | None]:
    """What is wrong about each call: empty when nothing is, None when it cannot be said; in one profiler session."""
    executor = rule_executor()
    expected = [_expected(executor, call) for call in calls]
    prepared = [number for number, facts in enumerate(expected) if facts is not None and _runs(calls[number])]
    held: dict[int, tuple[tuple[Any, ...], int]] = {}
    levels: dict[int, list[int]] = {number: [] for number in prepared}
    with torch.no_grad(), allocations() as events:
        for number in prepared:
            call = calls[number]
            with torch.profiler.record_function(f"{_LABEL}{number}"):
                result = call.func(*call.args, **call.kwargs)
            held[number] = _results(result, call.args, call.kwargs)
            del result
    for event in events:
        if event.ops and event.ops[0].startswith(_LABEL):
            levels[int(event.ops[0][len(_LABEL) :])].append(event.bytes)
    problems: list[str | None] = [None] * len(calls)
    for number in prepared:
        level = peak = 0
        for size in levels[number]:
            level += size
            peak = max(peak, level)
        real = _Facts(*held[number], peak - level)
        problems[number] = "" if real == expected[number] else f"real {real}, captured {expected[number]}"
    return problems


def rule_executor() -> Executor:
    """What a capture for the CPU asks, without measurements."""
    context = RuleContext(device_type="cpu", compute_capability=None, threads=torch.get_num_threads())
    return Executor(context, rules_for("cpu"), StorageTable("cpu"))


def _runs(call: KernelCall) -> bool:
    try:
        with torch.no_grad():
            call.func(*call.args, **call.kwargs)
    except Exception:
        return False
    return True


def _expected(executor: Executor, call: KernelCall) -> _Facts | None:
    info = executor.describe(call.func)
    if info.aliases:
        return None
    args, kwargs = map_tensors(call.args, _twin), map_tensors(call.kwargs, _twin)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    try:
        result = executor._call(call.func, info, args, kwargs)
        outcome = executor._priced(call.func, info, args, kwargs, result)
    except Exception:
        return None
    return _Facts(*_results(outcome.result, args, kwargs), outcome.workspace_bytes)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _results(result: Any, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], int]:
    tensors = tensors_of((result,))
    given = {tensor.untyped_storage()._cdata for tensor in tensors_of((*args, *kwargs.values()))}
    made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return tuple(map(_geometry, tensors)), sum(size for pointer, size in made.items() if pointer not in given)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the strides that anything is read with."""
    shape = tuple(tensor.shape)
    strides = tuple(step for size, step in zip(shape, tensor.stride(), strict=True) if size > 1)
    return shape, strides if tensor.numel() else (), str(tensor.dtype)
