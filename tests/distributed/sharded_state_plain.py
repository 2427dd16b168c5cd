"""A small plain model with buffers, two dtypes and an optimizer, for tests of saves in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).to(torch.bfloat16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1](model[0](torch.randn(4, 3))).sum().backward()
    for parameter in model[2].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Every bit of both, as text."""
    state = optimizer.state_dict()
    tensors = [
        *model.state_dict().items(),
        *((number, sorted(each.items())) for number, each in state["state"].items()),
    ]
    return repr((_exact(tensors), state["param_groups"]))


def _exact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    return [_exact(each) for each in value] if isinstance(value, list | tuple) else value
