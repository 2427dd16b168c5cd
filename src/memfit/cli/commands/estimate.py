"""`memfit estimate`: what training a model takes of one device, beside what its size alone says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from memfit.cli.options import HardwareOptions, Json, StepOptions
from memfit.cli.output import show, show_json
from memfit.cli.problems import UsageError
from memfit.cli.resolve import capture_step, step_and_target
from memfit.text import edgeless_table

if TYPE_CHECKING:
    from memfit.analysis import Estimate as Estimated


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What training STEP takes of one device as it is: states, activations, temporaries, allocator, process.

    `accelerate estimate-memory` counts the first three, from the model's size; the rest depends on the batch.

    examples:
      memfit estimate hf:config.json --target rtx-4090 --batch 8 --seq 512
      memfit estimate gpt2 --target rtx-4090 --batch 8
    """

    step: StepOptions
    hardware: HardwareOptions
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.analysis import estimate

        for name in ("budget", "mesh", "rank"):
            if getattr(self.hardware, name) is not None:
                raise UsageError(f"--{name}: an estimate is of a step as it is, on one device; see memfit plan")
        if (self.hardware.ranks or 1) > 1:
            raise UsageError("--ranks: an estimate is for one device; memfit plan and memfit explain shard the step")
        given, target = step_and_target(self.step, self.hardware)
        given.show()
        found = estimate(capture_step(given.step, target, self.hardware), target=target)
        if self.json:
            show_json(found)
        else:
            show(_table(found))
        return 0


def _table(found: Estimated) -> Group:
    from memfit.units import display_bytes

    table = edgeless_table()
    table.add_column("")
    table.add_column("bytes", justify="right")
    rows = (
        (f"weights ({found.parameters:,} parameters)", found.weights_bytes),
        ("gradients", found.gradients_bytes),
        ("optimizer state", found.optimizer_bytes),
        ("these alone", found.states_bytes),
        ("activations at the peak", found.activation_bytes),
        ("temporaries and workspaces at the peak", found.temporary_bytes),
        ("buffers and the batch", found.other_bytes),
        ("peak of all tensors", found.peak_bytes),
        ("reserved beyond by the allocator", found.rounding_bytes),
        ("process and context", found.outside_bytes),
        ("needed", found.needed_bytes),
    )
    for name, size in rows:
        table.add_row(name, display_bytes(size), style="bold" if name in ("these alone", "needed") else None)
    where = f"{found.device} ({display_bytes(found.device_bytes)})"
    verdict = f"fits {where}" if found.fits else f"does not fit {where} as it is; memfit plan finds what does"
    peak = "the peak may come before all gradients are there, so its parts are not the sum of the rows above it"
    return Group(table, Text(), Text(verdict), Text(peak, style="dim"))
