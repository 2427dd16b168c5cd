"""A slice of `make isa`: captures equal real steps also on older instruction sets and other numbers of threads."""

from __future__ import annotations

import pytest

from tests.capture.instruction_sets import onednn_sets, run, settings

pytestmark = pytest.mark.slow

SLICE = (
    "tests/capture/test_cpu_products.py::test_the_peak_of_a_step_is_that_of_a_real_one",
    "tests/capture/test_cpu_rules.py::test_flash_attention_workspaces[33-16-77-dtype1]",
    "tests/capture/test_cpu_layouts.py::test_the_peak_of_a_step_is_that_of_a_real_one[upsampling, sum]",
    "tests/capture/test_real_ops.py::test_ops_layouts_and_peak_are_those_of_a_real_step[lstm-bf16]",
    "tests/capture/test_real_ops.py::test_ops_layouts_and_peak_are_those_of_a_real_step[group-norm-bf16-autocast]",
)
TOGETHER = {
    "oldest, one thread": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OMP_NUM_THREADS": "1",
    },
    "avx2, four threads": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "4"},
    "avx512, two threads": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OMP_NUM_THREADS": "2"},
}
"""A library that is told to use an instruction set which the machine does not have uses the best one it has."""


@pytest.mark.parametrize("name", TOGETHER)
def test_captures_equal_real_steps_under_other_settings(name: str) -> None:
    done = run(TOGETHER[name], *SLICE)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-2000:]}"


def test_the_settings_of_make_isa_are_those_of_this_machine() -> None:
    names = [next(iter(setting.items())) for setting in settings()]
    assert [value for key, value in names if key == "ONEDNN_MAX_CPU_ISA"] == onednn_sets()
    assert [value for key, value in names if key == "OMP_NUM_THREADS"] == ["1", "2", "4"]
    assert len(set(names)) == len(names)
