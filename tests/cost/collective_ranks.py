"""What each process of the collective tests runs; a module of its own so that spawned processes can import it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from memfit.cost.collective_benchmark import CollectiveBenchmark
from memfit.errors import MemfitError


def measure(rank: int, ranks: int, folder: str) -> None:
    """Measure over Gloo, make the mistakes that need a process group, and write down what came of it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        benchmark = CollectiveBenchmark(repetitions=3, warmup=1)
        times = benchmark.measure(sizes=(1000, 8 << 20))
        first_only = dist.new_group([0])
        errors = {
            "different": _error(lambda: benchmark.measure(sizes=(1000, 2000 * (rank + 1)))),
            "one size": _error(lambda: benchmark.measure(sizes=(1000,))),
            "alone": _error(lambda: CollectiveBenchmark(first_only)),
        }
        Path(folder, f"times{rank}.json").write_bytes(times.to_json())
        Path(folder, f"errors{rank}.json").write_text(json.dumps(errors))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _error(call) -> str:
    try:
        call()
    except MemfitError as error:
        return str(error)
    return ""
