"""Run the tests that compare with this machine's CPU kernels under each setting by which kernels are chosen.

    python tests/capture/instruction_sets.py [pytest arguments]

What CPU kernels allocate depends on the instruction set of ATen and of oneDNN and on the number of threads. Both
libraries can be told to use an older instruction set, never a newer one. Prints a table in Markdown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]
AFFECTED = (
    "tests/capture",
    "tests/memory",
    "tests/engines",
    "tests/verify",
    "tests/recovery",
    "tests/recovery",
    "tests/distributed/test_fsdp2_memory.py",
)
THREADS = (1, 2, 4)


def settings() -> list[dict[str, str]]:
    """Every setting that makes a difference on this machine, one at a time."""
    aten = {"DEFAULT": (), "AVX2": ("default",), "AVX512": ("default", "avx2")}
    lower = aten.get(torch.backends.cpu.get_cpu_capability(), ())
    return [
        *({"ATEN_CPU_CAPABILITY": name} for name in lower),
        *({"ONEDNN_MAX_CPU_ISA": name} for name in onednn_sets()),
        *({"OMP_NUM_THREADS": str(threads)} for threads in THREADS),
    ]


def onednn_sets() -> list[str]:
    """The instruction sets of oneDNN that this machine has, the oldest first; none where it is no x86."""
    if not hasattr(torch.cpu, "_is_avx2_supported") or not torch.cpu._is_avx2_supported():
        return []
    names = ["SSE41", "AVX2"]
    for has, name in (
        ("_is_avx512_supported", "AVX512_CORE"),
        ("_is_vnni_supported", "AVX512_CORE_VNNI"),
        ("_is_avx512_bf16_supported", "AVX512_CORE_BF16"),
        ("_is_amx_tile_supported", "AVX512_CORE_AMX"),
        ("_is_amx_fp16_supported", "AVX512_CORE_AMX_FP16"),
    ):
        if getattr(torch.cpu, has, bool)():
            names.append(name)
    return names


def run(setting: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own under a setting."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": str(REPOSITORY / "src"), **setting},
        capture_output=True,
        text=True,
        check=False,
    )


def main(arguments: list[str]) -> int:
    """Print the table, and which tests failed; 1 when any did."""
    failures: list[str] = []
    write = sys.stdout.write
    write("| setting | passed | failed | minutes |\n|---|---|---|---|\n")
    for setting in ({}, *settings()):
        name = " ".join(f"`{key}={value}`" for key, value in setting.items()) or "none"
        began = time.monotonic()
        done = run(setting, *(arguments or AFFECTED))
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
        bad = counts.get("failed", 0) + counts.get("error", 0) + (not counts)
        write(f"| {name} | {counts.get('passed', 0)} | {bad} | {(time.monotonic() - began) / 60:.1f} |\n")
        sys.stdout.flush()
        if bad:
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            failures += [f"{name}: {line}" for line in lines or [done.stderr[-500:]]]
    write("".join(f"\n{line}" for line in failures) + "\n" * bool(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
