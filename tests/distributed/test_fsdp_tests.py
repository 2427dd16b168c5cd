"""The table of PyTorch's FSDP tests names tests that exist, and counts what it has."""

from __future__ import annotations

import pytest

from tests.distributed.fsdp_tests import PAGE, RESULTS, Row, case_names, find_test, read_rows, replace_counts


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows(PAGE.read_text())


def test_every_row_has_a_result_and_what_shows_it(rows: list[Row]) -> None:
    for row in rows:
        assert row.result in RESULTS, row
        assert bool(row.named) == (row.result in ("holds", "refused")), row
        assert row.how and row.folder and row.file, row


def test_every_test_that_a_row_names_exists(rows: list[Row]) -> None:
    unknown = []
    for file, name, case in {each for row in rows for each in row.named}:
        function = find_test(file, name)
        if function is None or (case and case not in case_names(function)):
            unknown.append(f"{file}::{name}[{case}]")
    assert not unknown


def test_every_ported_behaviour_is_named(rows: list[Row]) -> None:
    named = {each for row in rows for each in row.named}
    for name in ("setup", "steps", "gradients", "state", "hybrid", "units", "meshes"):
        function = find_test("ported", f"test_{name}")
        assert function is not None
        assert not [case for case in case_names(function) if ("ported", f"test_{name}", case) not in named]


def test_the_counts_are_those_of_the_rows(rows: list[Row]) -> None:
    text = PAGE.read_text()
    assert replace_counts(text) == text, "run `python -m tests.distributed.fsdp_tests`"
    assert len({each for row in rows for each in row.named}) >= 300


def test_no_test_of_pytorch_is_listed_twice_unless_two_classes_have_it(rows: list[Row]) -> None:
    twice = {row for row in rows if sum((row.file, row.test) == (other.file, other.test) for other in rows) > 1}
    assert {row.file for row in twice} <= {"test_fsdp_mixed_precision.py"}, (
        "the same names for one rank and for several"
    )
