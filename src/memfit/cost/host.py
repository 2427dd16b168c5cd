"""What the host needs beside the kernels, measured on steps so small that it decides their time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import nn

from memfit.capture import Phase, Step, Trace, trace
from memfit.capture.step import call_model
from memfit.cost.references import tiny_steps
from memfit.cost.runtime import Times
from memfit.hardware import Device, HostTimes

_REPEATS = 31
_CALLS = 2000
_LEAST_MS = 1e-5


class KernelTimes(Protocol):
    """Something that knows how long the kernels of a trace take."""

    def kernel_ms(self, trace: Trace) -> Times: ...


def measure_host(kernels: KernelTimes, device: Device) -> HostTimes:
    """The host's times: a view and a module call by themselves, an op by what is left of whole phases."""
    view_ms, call_ms = _view_ms(), _call_ms()
    spare_ms, counts = np.zeros(3), np.zeros(3)
    for step in tiny_steps():
        captured = trace(step, target=device)
        kernel = kernels.kernel_ms(captured) if device.type == "cpu" else np.zeros(len(captured.ops))
        measured = _phases_ms(step, device.type)
        calls = sum(call.phase is not Phase.BACKWARD for call in captured.calls)
        spare_ms += measured
        spare_ms[0] -= calls * call_ms
        for op, op_ms in zip(captured.ops, kernel, strict=True):
            place = _PLACES[op.phase]
            spare_ms[place] -= view_ms if op.view else op_ms
            counts[place] += not op.view
    forward_ms, backward_ms, optimizer_ms = np.maximum(spare_ms / counts, _LEAST_MS).tolist()
    return HostTimes(
        forward_ms=forward_ms, backward_ms=backward_ms, optimizer_ms=optimizer_ms, view_ms=view_ms, call_ms=call_ms
    )


_PLACES = {Phase.FORWARD: 0, Phase.LOSS: 0, Phase.BACKWARD: 1, Phase.OPTIMIZER: 2}


def _phases_ms(step: Step, device_type: str) -> Times:
    """Medians of forward, backward and optimizer."""
    with torch.random.fork_rng(devices=[]):
        model = step.build_model().to(device_type)
        batch = tuple(each.to(device_type) for each in (step.batch if isinstance(step.batch, tuple) else (step.batch,)))
        optimizer = step.build_optimizer(model)
        assert optimizer is not None
        laps = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            loss = call_model(model, batch)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            laps.append((forward - began, backward - forward, time.perf_counter() - backward))
            if device_type == "cuda":
                torch.cuda.synchronize()
    return np.median(np.array(laps[_REPEATS // 4 :]), axis=0) * 1e3


def _view_ms() -> float:
    tensor = torch.zeros(4, 4, requires_grad=True)
    return _each_ms(lambda: tensor.transpose(0, 1))


def _call_ms() -> float:
    module, tensor = nn.Identity(), torch.zeros(1)
    return max(_LEAST_MS, _each_ms(lambda: module(tensor)) - _each_ms(lambda: module.forward(tensor)))


def _each_ms(function: Callable[[], object]) -> float:
    laps = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for _ in range(_CALLS // _REPEATS):
            function()
        laps.append((time.perf_counter() - began) / (_CALLS // _REPEATS))
    return statistics.median(laps) * 1e3
