"""Walks over a model's modules."""

from __future__ import annotations

from torch import nn

from memfit.torch_private.modules import modules_by_path


def test_modules_are_found_as_torch_finds_them() -> None:
    shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"first": nn.ModuleList([shared, nn.Sequential(nn.Tanh(), shared)]), "last": shared})
    model["first"].register_module("nothing", None)
    assert modules_by_path(model) == list(model.named_modules())
