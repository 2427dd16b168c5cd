"""The `memfit` command."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from memfit.cost import Calibration, calibrate
from memfit.errors import InputError, MemfitError
from memfit.plan import load
from memfit.units import display_ms
from memfit.verify import step_at
from memfit.verify.verification import MEMORY_TOLERANCE, TIME_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine for a minute or two and write its figures as a device of your own.

    Give the new device as target, and predicted times are those of this machine.
    """

    device: str = "cpu"
    """The device that this machine has: `cpu`, or the name of its GPU such as `h100-sxm`."""
    name: str | None = None
    """What to call it; the device's name with -calibrated unless given."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write the device file; among the user's devices unless given."""
    threads: int | None = None
    """Threads that torch may use; as many as torch takes unless given."""

    def run(self) -> int:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        calibration = calibrate(self.device, name=self.name)
        path = calibration.save(self.output)
        console = Console()
        console.print(_table(calibration))
        console.print(f"wrote {path}", soft_wrap=True)
        target = calibration.name if self.output is None else str(self.output)
        console.print(f"use it with target={target!r}", soft_wrap=True)
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a training step with a plan and without it, and show what was predicted beside what was measured.

    The exit code is 0 when everything is within the tolerances and 1 when something is not.
    """

    plan: tyro.conf.Positional[Path]
    """The plan, as Plan.save wrote it."""
    step: tyro.conf.Positional[str]
    """A function that returns a memfit.Step: `path/to/file.py:function` or `package.module:function`."""
    steps: int = 3
    """Steps whose median is the measured time."""
    memory_tolerance: float = MEMORY_TOLERANCE
    """How far the measured peak may be from its prediction, as a part of it."""
    time_tolerance: float | None = TIME_TOLERANCE
    """The same of the step's time; None shows times without judging them."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def run(self) -> int:
        if not self.plan.is_file():
            raise InputError(f"there is no file {self.plan}; give a plan that Plan.save wrote")
        found = load(self.plan).verify(
            step_at(self.step),
            self.steps,
            memory_tolerance=self.memory_tolerance,
            time_tolerance=self.time_tolerance,
        )
        if self.json:
            print(found.to_json(), end="")
        else:
            Console().print(found)
        return 0 if found.ok else 1


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print memfit's version."""

    def run(self) -> int:
        from memfit import __version__

        print(__version__)
        return 0


Command = Calibrate | Verify | Version
_COMMANDS: dict[str, Callable[..., Command]] = {"calibrate": Calibrate, "verify": Verify, "version": Version}
_IN_PYTHON = {
    "plan": "memfit.plan(step, target='h100-sxm', budget='72GiB')",
    "explain": "print(memfit.load('plan.json'))",
    "devices": "memfit.hardware.list_devices()",
}
"""What there is no command for yet, and how it is done without."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code is 0 when done, 1 on an error and 2 on wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        _say(_unknown(arguments[0]))
        return 2
    command: Command = tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="memfit",
        description="Makes PyTorch training fit in memory, and then as fast as it can be.",
        args=arguments,
    )
    try:
        return command.run()
    except MemfitError as error:
        _say(str(error))
        return 1


def _unknown(name: str) -> str:
    """What to write instead of a command that does not exist."""
    if name in _IN_PYTHON:
        return f"there is no command {name!r} yet; in Python: {_IN_PYTHON[name]}"
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed(list(_COMMANDS))}; memfit --help says more"
    return f"there is no command {name!r}; {hint}"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _say(problem: str) -> None:
    console = Console(stderr=True)
    console.print(f"memfit: {problem}", style="red", highlight=False, markup=False, soft_wrap=True)


def _table(calibration: Calibration) -> Table:
    table = Table(title=f"{calibration.machine}: parts of its peak that kernels reach")
    for heading in ("family", "of peak FLOP/s", "of bandwidth", "fixed time"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for each in calibration.efficiency.families:
        table.add_row(each.family.value, f"{each.compute:.2f}", f"{each.bandwidth:.2f}", display_ms(each.overhead_ms))
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in calibration.flops_per_s.items())
    table.caption = f"{rates}; memory {calibration.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    return table


if __name__ == "__main__":
    sys.exit(main())
