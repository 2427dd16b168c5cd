from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memfit.sharded.values import map_values, tensors_in


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass(frozen=True)
class Result:
    hidden: torch.Tensor
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.made + 1)


class Named(OrderedDict):
    """A dict that is built by keywords, as the outputs of transformers are."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)


def test_tensors_are_changed_wherever_they_are() -> None:
    one = torch.ones(1)
    value = {"a": [one, (one, None)], "b": Pair(one, {"c": 3}), "d": Result(one), "e": Named(x=one), "f": "text"}
    changed = map_values(value, lambda tensor: tensor + 1)
    assert len(tensors_in(changed)) == 5
    assert all(tensor.item() == 2 for tensor in tensors_in(changed))
    assert isinstance(changed["b"], Pair) and changed["b"].right == {"c": 3}
    assert isinstance(changed["d"], Result) and isinstance(changed["e"], Named) and changed["f"] == "text"


def test_what_does_not_change_is_the_same_object() -> None:
    one = torch.ones(1)
    value = {"a": [one], "b": (one, [], torch.Size([2])), "c": Result(one), "d": Pair(one, None)}
    assert map_values(value, lambda tensor: tensor) is value


def test_a_dataclass_is_copied_without_its_constructor() -> None:
    changed = map_values(Result(torch.ones(1)), lambda tensor: tensor + 1)
    assert changed.made == 1 and changed.hidden.item() == 2


def test_what_several_functions_return_keeps_its_kind() -> None:
    found = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    changed = map_values(found, lambda tensor: tensor * 2)
    assert type(changed) is type(found) and changed.values.item() == 4
