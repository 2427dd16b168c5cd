import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InputError, MemfitError
from memfit.units import GiB, KiB, MiB, display_budget, display_bytes, display_ms, parse_bytes


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("72GiB", 72 * GiB),
        ("80GB", 80 * 10**9),
        ("512 MiB", 512 * MiB),
        ("1.5 kib", 1536),
        ("123B", 123),
        ("1_048_576", 1 << 20),
        ("85899345920", 80 * GiB),
        (4096, 4096),
        ("7 bytes", 7),
        (0, 0),
    ],
)
def test_sizes_as_people_write_them(written, expected):
    assert parse_bytes(written) == expected


@pytest.mark.parametrize("written", [0.5, "0.5", "50%", "50 %"])
def test_a_fraction_is_of_the_total(written):
    assert parse_bytes(written, total_bytes=80 * GiB) == 40 * GiB


@pytest.mark.parametrize("written", [0.5, "0.5", "50%"])
def test_a_fraction_without_a_total_is_refused(written):
    with pytest.raises(InputError, match="fraction of a total"):
        parse_bytes(written)


@pytest.mark.parametrize(
    "written", ["", "GiB", "12 XB", "-3GiB", -1, "1e", True, None, "12G", 1.5, 0.0, float("nan"), "150%"]
)
def test_nonsense_is_refused_with_an_input_error(written):
    with pytest.raises(InputError):
        parse_bytes(written, total_bytes=GiB)


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("80", "write 80GiB or 80GB, or 80% of the device"),
        (" 80 ", "write 80GiB or 80GB, or 80% of the device"),
        ("1", "write 1GiB or 1GB, or 1% of the device"),
        ("141", "write 141GiB or 141GB$"),
        ("81920", "write 81920MiB, 81920MB or 81920B"),
        ("1e3", "write 1e3GiB"),
        ("80.0", "write 80.0GiB"),
        ("23.5", "no fraction of at most 1; write 23.5GiB"),
        ("0", "write for example '72GiB'"),
        ("-80", "write for example '72GiB'"),
    ],
)
def test_a_number_without_a_unit_is_refused_and_says_what_to_write(written, instead):
    with pytest.raises(InputError, match=instead):
        parse_bytes(written, total_bytes=80 * GiB)


def test_a_number_with_a_point_is_a_fraction():
    assert parse_bytes("1.0", total_bytes=80 * GiB) == 80 * GiB


def test_a_bare_letter_is_refused_and_says_what_to_write():
    with pytest.raises(InputError, match="12GiB or 12GB"):
        parse_bytes("12g")


def test_an_input_error_is_a_value_error_and_a_memfit_error():
    with pytest.raises(ValueError, match="size"):
        parse_bytes("much")
    assert issubclass(InputError, MemfitError)


def test_display_chooses_the_unit():
    assert display_bytes(0) == "0 B"
    assert display_bytes(1023) == "1023 B"
    assert display_bytes(3 * KiB) == "3.00 KiB"
    assert display_bytes(int(79.19 * GiB)) == "79.19 GiB"
    assert display_bytes(-2 * MiB) == "-2.00 MiB"


def test_display_in_a_given_unit_is_written_as_pytorch_writes_it():
    from torch.distributed._tools.ilp_utils import display_bytes as theirs

    for unit in ("KiB", "MiB", "GiB"):
        assert display_bytes(123456789, unit) == theirs(123456789, unit)
    with pytest.raises(InputError, match="unknown unit"):
        display_bytes(1, "GB")


def test_display_ms():
    assert [display_ms(t) for t in (0, 0.25, 12.34, 2500, 90e3, 7200e3)] == [
        "0 ms",
        "250 us",
        "12.3 ms",
        "2.50 s",
        "1.5 min",
        "2.0 h",
    ]


@given(st.integers(min_value=0, max_value=2**60))
def test_round_trip_in_bytes_is_exact(n):
    assert parse_bytes(display_bytes(n, "B")) == n


@given(st.integers(min_value=0, max_value=2**50))
def test_round_trip_for_people_is_within_the_digits_shown(n):
    assert abs(parse_bytes(display_bytes(n)) - n) <= n * 0.0051 + 1


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["", " "]))
def test_a_budget_that_is_shown_is_enough_when_it_is_typed_in(n, space):
    assert n <= parse_bytes(display_budget(n, space)) <= n + n * 0.0101 + 1


@given(st.integers(min_value=0, max_value=2**20), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_whole_units_round_trip_exactly(n, unit):
    assert parse_bytes(f"{n}{unit}") == parse_bytes(display_bytes(parse_bytes(f"{n} {unit}"), unit))


def test_a_float_above_one_is_told_how_to_write_bytes():
    with pytest.raises(InputError, match=r"1100000000\.0 is a float.*for bytes write 1100000000, or '1\.1GB'"):
        parse_bytes(1.1e9, total_bytes=10)
    with pytest.raises(InputError, match="for GiB write '72GiB'"):
        parse_bytes(72.0, total_bytes=10)


def test_whole_numbers_of_numpy_are_bytes():
    assert parse_bytes(np.int64(7)) == 7
