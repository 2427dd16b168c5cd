"""A batch that is halved is the same batch but for its rows."""

from __future__ import annotations

import torch
from torch import nn

import memfit
from memfit.capture import divide_batch


def test_a_tensor_in_two_places_of_a_batch_stays_one() -> None:
    ids, mask = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4)
    half = divide_batch({"input_ids": ids, "labels": ids, "mask": mask, "more": [ids, mask, 2]}, 2)
    assert half["labels"] is half["input_ids"] is half["more"][0] and half["mask"] is half["more"][1]
    assert half["input_ids"].shape == (2, 3) and half["mask"].shape == (2,) and half["more"][2] == 2
    one = divide_batch((ids, ids.clone()), 2)
    assert one[0] is not one[1]


class Same(nn.Module):
    """Takes ids for labels only when they are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels is input_ids
        return (self.linear(input_ids).relu() - labels).square().mean()


def test_the_lever_is_worked_out_for_a_batch_that_shares_a_tensor() -> None:
    x = torch.randn(64, 16)
    found = memfit.explain(memfit.Step(Same(), {"input_ids": x, "labels": x}), target="cpu")
    assert any(lever.name.startswith("micro-batch of 32") for lever in found.levers), found.left_out
