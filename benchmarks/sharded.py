"""memfit's sharded runtime beside PyTorch's FSDP1, FSDP2 and DDP: step time and peak memory on two ranks over Gloo.

One process a rank with one thread each. For time, all ways to train take steps in turn, in another order each round;
the figure is the median over rounds of one step's time over the other's. "Kept" leaves gathered parameters between
forward and backward (`reshard_after_forward=False`); the root is kept by all. For memory every way has processes of its
own: what stays between steps, and by how much a process grows in a step (`VmHWM` after `clear_refs`). A step divides
into ops of the model (compute), ops of the runtime (copies), the optimizer, time in which the thread did not run
(waiting, or robbed by another), and the rest (host); ops are timed under the profiler, so parts add up roughly.

    python benchmarks/sharded.py --models tiny --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from fully_sharded.measure import parts_of, resident_bytes, rise_bytes, timed
from fully_sharded.model import CASES, Case
from fully_sharded.training import KEPT, KINDS, trained

RANKS = 2
PARTS = ("compute", "copies", "optimizer", "waiting", "host")
PAIRS = (
    ("memfit", "FSDP2", 0.85),
    ("memfit", "FSDP1", 1.0),
    ("memfit", "DDP", None),
    ("memfit kept", "FSDP2 kept", 0.95),
)


def join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )


def measure_time(rank: int, folder: str, name: str, kinds: tuple[str, ...], rounds: int) -> None:
    """Train one model in all ways in turn, and write down what was measured on this rank."""
    join(rank, f"{folder}/time-{name}")
    steps = {kind: trained(CASES[name], kind)[2] for kind in kinds}
    for step in steps.values():
        step()
        step()
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    order = deque(kinds)
    for _ in range(rounds):
        for kind in order:
            dist.barrier()
            times[kind].append(timed(steps[kind]))
        order.rotate()
    found = {}
    for kind, step in steps.items():
        dist.barrier()
        parts = parts_of(step)
        wall = statistics.median(wall for wall, _ in times[kind])
        own = statistics.median(own for _, own in times[kind])
        parts["waiting"] = max(wall - own, 0.0)
        parts["host"] = max(own - parts["compute"] - parts["copies"] - parts["optimizer"], 0.0)
        found[kind] = {"step_ms": wall, "steps_ms": [wall for wall, _ in times[kind]], "parts": parts, "loss": step()}
    Path(folder, f"time-{name}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(rank: int, folder: str, name: str, kind: str) -> None:
    """Train one model in one way, and write down what this rank takes."""
    join(rank, f"{folder}/memory-{name}-{kind}")
    model, optimizer, step = trained(CASES[name], kind)
    for _ in range(3):
        step()
    peak = resident_bytes(model, optimizer) + rise_bytes(step)
    Path(folder, f"memory-{name}-{kind}-{rank}.json").write_text(json.dumps(peak))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(measure: Callable[..., None], *args: object) -> None:
    """Run a function on every rank, in processes that have torch imported already."""
    torch.multiprocessing.start_processes(measure, args, nprocs=RANKS, start_method="fork")


def show(case: Case, kinds: tuple[str, ...], times: dict[str, Any], peaks: dict[str, int]) -> list[str]:
    """Print a table; return the ratios of memfit over the others, in words."""
    print(f"\n{case.title}, {RANKS} ranks")
    print(f"{'':14}{'step':>9}{'peak a rank':>14} " + "".join(f"{part:>11}" for part in PARTS))
    for kind in kinds:
        one = times[kind]
        parts = "".join(f"{one['parts'][part] / one['step_ms']:>11.0%}" for part in PARTS)
        print(f"{kind:14}{one['step_ms']:>6.0f} ms{peaks[kind] / 2**20:>10.1f} MiB {parts}   loss {one['loss']:.6f}")
    said = []
    for ours, theirs, bar in PAIRS:
        if ours not in kinds or theirs not in kinds:
            continue
        paired = [a / b for a, b in zip(times[ours]["steps_ms"], times[theirs]["steps_ms"], strict=True)]
        medians = times[ours]["step_ms"] / times[theirs]["step_ms"]
        limit, least = ("", "") if bar is None else (f"at most {bar:g}; ", " (at most 1)")
        said.append(
            f"{case.title}: {ours} over {theirs}: time {statistics.median(paired):.3f} ({limit}ratio of medians "
            f"{medians:.3f}), memory {peaks[ours] / peaks[theirs]:.3f}{least}"
        )
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind")
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES), help="which models")
    args = parser.parse_args()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            case = CASES[name]
            kinds = KINDS + (KEPT if case.kept else ())
            on_ranks(measure_time, folder, name, kinds, args.rounds)
            peaks = {}
            for kind in kinds:
                on_ranks(measure_memory, folder, name, kind)
                files = [Path(folder, f"memory-{name}-{kind}-{rank}.json") for rank in range(RANKS)]
                peaks[kind] = max(json.loads(file.read_text()) for file in files)
            said += show(case, kinds, json.loads(Path(folder, f"time-{name}-0.json").read_text()), peaks)
    print("", *said, sep="\n")


if __name__ == "__main__":
    main()
