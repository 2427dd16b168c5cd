from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InputError
from memfit.sharded.checkpoint_files import from_json, to_json

KEYS = st.text(max_size=5).filter(lambda key: not key.startswith("$"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def _round_trip(value: Any) -> Any:
    return from_json(msgspec.json.decode(msgspec.json.encode(to_json(value, "it"))))


@given(VALUES)
def test_values_come_back_exactly(value: Any) -> None:
    assert repr(_round_trip(value)) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.25),
        torch.tensor([1, -2], dtype=torch.int64),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 2),
        torch.tensor(1 + 2j),
    ],
)
def test_tensors_come_back_with_their_dtype_and_shape(tensor: torch.Tensor) -> None:
    found = _round_trip([tensor])[0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_dtypes_and_floats_that_json_lacks_come_back() -> None:
    assert _round_trip(torch.bfloat16) is torch.bfloat16
    assert math.isnan(_round_trip(float("nan")))


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$tuple": []}, b"x", {1, 2}])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="extra has"):
        to_json({"a": [value]}, "extra")
