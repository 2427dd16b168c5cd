"""`memfit calibrate`: the figures of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Group
from rich.table import Table
from rich.text import Text

from memfit.cli.options import Count, Json, arg
from memfit.cli.output import plain, show, show_json
from memfit.cli.problems import UsageError, about, check_files, for_file
from memfit.text import number_table

if TYPE_CHECKING:
    from memfit.cost import Calibration


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine for some minutes and write its figures as a device of your own.

    Give the new device as target, and predicted times are those of this machine. Under torchrun all ranks are measured
    at once, with the collectives between them and the engines that shard: those of a plan for as many ranks on this
    machine.

    examples:
      memfit calibrate
      torchrun --nproc-per-node 2 -m memfit calibrate --threads 1
      memfit calibrate --device h100-sxm --name our-h100
    """

    device: Annotated[str, arg("DEVICE", "cpu")] = "cpu"
    """The device that this machine has: `cpu`, or the name of its GPU such as `h100-sxm`."""
    name: Annotated[str | None, arg("NAME", "the device's with -calibrated")] = None
    """What to call it."""
    output: Annotated[Path | None, arg("FILE", "among the user's devices", "-o")] = None
    """Where to write the device file."""
    threads: Annotated[Count, arg("N", "as many as torch takes")] = None
    """Threads that torch may use."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        import torch

        from memfit.cost import calibrate, calibrate_on_ranks
        from memfit.files import check_can_write
        from memfit.hardware import load_device, user_device_paths
        from memfit.verify import calibrate_engines

        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}; write a whole number of at least 1")
        check_files({"--output": self.output})
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with about("--device"):
            device = load_device(self.device)
        if self.output is None:
            folder = user_device_paths()[-1]
            with for_file("--output"):
                folder.mkdir(parents=True, exist_ok=True)
                check_can_write(folder / f"{self.name or device.name}.toml", "device.toml")
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            torch.distributed.init_process_group("gloo")
            calibration = calibrate_engines(calibrate_on_ranks(device, name=self.name))
            rank = torch.distributed.get_rank()
            torch.distributed.destroy_process_group()
            if rank:
                return 0
        else:
            calibration = calibrate(device, name=self.name)
        with for_file("--output"):
            path = calibration.save(self.output)
        target = calibration.name if self.output is None else str(self.output)
        if self.json:
            show_json({**plain(calibration), "file": str(path), "target": target})
            return 0
        show(
            Group(
                _table(calibration),
                Text(f"wrote {path}"),
                Text(f"use it with --target {target}, in Python with target={target!r}"),
            ),
            soft_wrap=True,
        )
        return 0


def _table(calibration: Calibration) -> Table:
    from memfit.units import display_ms

    title = f"{calibration.machine}: parts of its peak that kernels reach"
    table = number_table("family", "of peak FLOP/s", "of bandwidth", "fixed time", title=title)
    for each in calibration.efficiency.families:
        table.add_row(each.family.value, f"{each.compute:.2f}", f"{each.bandwidth:.2f}", display_ms(each.overhead_ms))
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in calibration.flops_per_s.items())
    table.caption = f"{rates}; memory {calibration.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    if calibration.disk is not None:
        away, back = calibration.disk.to_host_bytes_per_s, calibration.disk.to_device_bytes_per_s
        table.caption += f"; disk {away / 1e9:.1f} GB/s there, {back / 1e9:.1f} GB/s back"
    for each in calibration.engines:
        table.caption += f"; {each.engine} {display_ms(each.collective_ms)} a collective, {each.waiting:.0%} waiting"
    return table
