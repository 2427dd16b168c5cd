"""memfit's sharded runtime beside PyTorch's FSDP2 and DDP: step time and peak memory on two ranks over Gloo.

One process a rank with one thread each; all ways to train take steps in turn, medians. "Kept" leaves gathered
parameters between forward and backward (`reshard_after_forward=False`). Peak memory is what stays between steps and the
highest point of the allocator's events in a step, replayed by address, because frees on Gloo's threads are missing from
the events. A step divides into ops of the model (compute), ops of the runtime (copies), the optimizer, time in which
the thread was not running (waiting), and the rest (host).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from fully_sharded.measure import parts_of, resident_bytes, timed
from fully_sharded.model import KINDS, SIZES, Size, trained

RANKS = 2


def measure(rank: int, folder: str, number: int, rounds: int) -> None:
    """Train one size in all ways in turn, and write down what was measured on this rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{number}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10))
    models = {kind: trained(SIZES[number], kind) for kind in KINDS}
    for _, _, step in models.values():
        step()
        step()
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    losses = dict.fromkeys(KINDS, 0.0)
    for _ in range(rounds):
        for kind, (_, _, step) in models.items():
            dist.barrier()
            times[kind].append(timed(step))
    found = {}
    for kind, (model, optimizer, step) in models.items():
        dist.barrier()
        parts, peak_bytes = parts_of(step)
        losses[kind] = step()
        walls = [wall for wall, _ in times[kind]]
        wall = statistics.median(walls)
        own = statistics.median(own for _, own in times[kind])
        parts["waiting"] = max(wall - own, 0.0)
        parts["host"] = max(own - parts["compute"] - parts["copies"] - parts["optimizer"], 0.0)
        found[kind] = {
            "step_ms": wall,
            "steps_ms": walls,
            "parts": parts,
            "peak_bytes": peak_bytes + resident_bytes(model, optimizer),
            "loss": losses[kind],
        }
    Path(folder, f"{number}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def show(size: Size, ranks: list[dict[str, dict]]) -> tuple[float, float, float, float]:
    """Print a table; time and memory of memfit over FSDP2's, resharded and kept."""
    print(f"\n{size.name}, batch {size.batch} x {size.length}, {RANKS} ranks")
    print(f"{'':14}{'step':>9}{'peak a rank':>14}   compute  copies  optimizer  waiting  host")
    for kind in KINDS:
        one = ranks[0][kind]
        peak = max(each[kind]["peak_bytes"] for each in ranks)
        parts = "".join(
            f"{one['parts'][part] / one['step_ms']:>9.0%}"
            for part in ("compute", "copies", "optimizer", "waiting", "host")
        )
        print(f"{kind:14}{one['step_ms']:>6.0f} ms{peak / 2**20:>10.1f} MiB {parts}   loss {one['loss']:.6f}")
    ratios = []
    for ours, theirs in (("memfit", "FSDP2"), ("memfit kept", "FSDP2 kept")):
        pairs = zip(ranks[0][ours]["steps_ms"], ranks[0][theirs]["steps_ms"], strict=True)
        ratios.append(ranks[0][ours]["step_ms"] / ranks[0][theirs]["step_ms"])
        ratios.append(
            max(each[ours]["peak_bytes"] for each in ranks) / max(each[theirs]["peak_bytes"] for each in ranks)
        )
        ahead = statistics.mean(first < second for first, second in pairs)
        print(f"{ours} / {theirs}: time {ratios[-2]:.3f} (faster in {ahead:.0%} of rounds), memory {ratios[-1]:.3f}")
    return ratios[0], ratios[2], ratios[1], ratios[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(range(len(SIZES))), help="which sizes, by number")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in args.sizes:
            torch.multiprocessing.spawn(measure, (folder, number, args.rounds), nprocs=RANKS)
            ranks = [json.loads(Path(folder, f"{number}-{rank}.json").read_text()) for rank in range(RANKS)]
            found.append((SIZES[number], show(SIZES[number], ranks)))
    print()
    for size, (sharded, kept, memory, kept_memory) in found:
        print(
            f"{size.name}: time over FSDP2's {sharded:.3f} (at most 0.88), kept {kept:.3f} (at most 0.95); "
            f"memory {memory:.3f}, kept {kept_memory:.3f} (at most 1)"
        )


if __name__ == "__main__":
    main()
