"""Paths that differ in numbers only."""

from __future__ import annotations

import pytest

from memfit.paths import alike, folded, repeated_blocks, unwrapped


def test_only_whole_numbers_are_stars() -> None:
    assert alike("layers.31.norm1.0") == "layers.*.norm1.*"
    assert alike("") == ""


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["layers.3"], "layers.3"),
        (["layers.9", "layers.10", "layers.11"], "layers.9-11"),
        (["layers.0.mlp", "layers.1.mlp", "layers.5.mlp"], "layers.0-1,5.mlp"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], "a.0-1.b.0-1"),
        (["a.0.b.0", "a.1.b.1"], "a.*.b.*"),
        (["a.0.b.7", "a.1.b.7"], "a.0-1.b.7"),
        (["", ""], ""),
    ],
)
def test_ranges(paths: list[str], shown: str) -> None:
    assert folded(paths) == shown


def test_a_wrapper_is_of_the_kind_of_what_it_wraps() -> None:
    kinds = {"": "Model", "0": "Wrapper", "0._inner": "Compiled", "0._inner._orig": "Block", "1": "Block"}
    kinds |= {"0._inner._orig.0": "Linear", "1.0": "Linear"}
    names = ("_inner", "_orig")
    blocks = {"": "Model", "0": "Block", "0._inner._orig.0": "Linear", "1": "Block", "1.0": "Linear"}
    assert unwrapped(kinds, names) == blocks
    assert repeated_blocks(unwrapped(kinds, names)) == ("0", "1")
    assert repeated_blocks(kinds) == (), "a wrapper alone is unlike the block beside it"
