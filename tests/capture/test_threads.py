"""A capture is of one thread: on all others torch works as it always does."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step


def outcome(call: Any) -> str:
    """Say what a call returns, or which error it raises."""
    try:
        return type(call()).__name__
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"


def train() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


CALLS: dict[str, Any] = {
    "record_stream": lambda: torch.ones(2).record_stream(None),  # type: ignore[arg-type]
    "cuda.Stream": lambda: torch.cuda.Stream(),
    "cuda.Event": lambda: torch.cuda.Event(),
    "Stream": lambda: torch.Stream(device="cuda"),
    "cuda.device": lambda: torch.cuda.device(0).__enter__(),
    "nvtx": lambda: torch.cuda.nvtx.range_push("a"),
    "Generator": lambda: torch.Generator(),
    "optimizer": train,
}


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_other_threads_do_not_notice_a_capture(target: str) -> None:
    expected = {name: outcome(call) for name, call in CALLS.items()}
    found: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()

    class Waiting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def other() -> None:
                found.put({name: outcome(call) for name, call in CALLS.items()})

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return super().forward(x).sum()

    memfit.trace(Step(Waiting(4, 4), torch.randn(2, 4), optimizer=torch.optim.SGD), target=target)
    assert found.qsize()
    assert all(found.get() == expected for _ in range(found.qsize()))
