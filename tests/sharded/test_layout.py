from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.sharded.boxes import split_into_boxes
from memfit.sharding.flat_layout import ALIGNED_ELEMENTS, FlatLayout

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(shapes=st.lists(SHAPES, min_size=1, max_size=6), ranks=st.integers(1, 7))
def test_the_parts_of_all_ranks_are_every_element_once_and_in_order(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = FlatLayout.of((((str(number),), shape) for number, shape in enumerate(shapes)), ranks)
    for slot in layout.slots:
        assert slot.elements == math.prod(slot.shape)
        found: list[int] = []
        for rank in range(ranks):
            part = layout.part(slot, rank)
            found += range(part.begin, part.end)
            assert 0 <= part.at <= part.at + part.elements <= layout.shard_elements
            if part.elements:  # the same element, counted in the flat tensor from either side
                assert rank * layout.shard_elements + part.at == slot.begin + part.begin
        assert found == list(range(slot.elements))


@given(shapes=st.lists(SHAPES, min_size=1, max_size=6), ranks=st.integers(1, 7))
def test_slots_do_not_overlap_and_begin_aligned(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layout = FlatLayout.of((((str(number),), shape) for number, shape in enumerate(shapes)), ranks)
    assert all(slot.begin % ALIGNED_ELEMENTS == 0 for slot in layout.slots)
    assert all(one.end <= other.begin for one, other in zip(layout.slots, layout.slots[1:], strict=False))
    assert layout.slots[-1].end <= layout.elements
    assert layout.elements == ranks * layout.shard_elements
    assert layout.shard_elements % ALIGNED_ELEMENTS == 0


@given(shape=SHAPES, data=st.data())
def test_boxes_are_the_interval_row_by_row(shape: tuple[int, ...], data: st.DataObject) -> None:
    elements = math.prod(shape)
    begin = data.draw(st.integers(0, elements))
    end = data.draw(st.integers(begin, elements))
    numbers = torch.arange(elements).view(shape)
    found: list[int] = []
    offsets = set()
    for box in split_into_boxes(shape, begin, end):
        assert len(box.offsets) == len(box.sizes) == len(shape)
        assert math.prod(box.sizes) > 0
        block = numbers[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        found += block.reshape(-1).tolist()
        offsets.add(box.offsets)
    assert found == list(range(begin, end))
    assert len(offsets) == len(split_into_boxes(shape, begin, end)) <= max(2 * len(shape) - 1, 1)
