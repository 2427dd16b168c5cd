"""`memfit devices`: the hardware that memfit knows, and where its figures come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Group, RenderableType
from rich.text import Text

from memfit.cli.options import Json, arg
from memfit.cli.output import plain, result_console, show, show_json
from memfit.cli.problems import about
from memfit.text import edgeless_table
from memfit.units import display_bytes

if TYPE_CHECKING:
    from memfit.hardware import Device, Provenance

_WIDE, _NARROW = 92, 74
"""Columns from which the table of devices has room for all it shows, and for most of it."""
_BANDWIDTH = "memory.bandwidth_bytes_per_s"
_RATES = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8", "fp64")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that --target takes, or every figure of one with its source.

    Your own are TOML files in the folders that MEMFIT_DEVICES names or in ~/.config/memfit/devices;
    `memfit calibrate` writes one.

    examples:
      memfit devices
      memfit devices h100-sxm
      memfit devices --json
    """

    name: Annotated[tyro.conf.Positional[str | None], arg("[NAME]", "all of them")] = None
    """A device: its name, another of its names, or a device file (.toml)."""
    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        from memfit.hardware import list_devices, load_device

        if self.name is None:
            devices = list_devices()
            if self.json:
                show_json([_record(device) for device in devices])
            else:
                show(_all(devices, result_console().width))
            return 0
        with about("NAME"):
            device = load_device(self.name)
        if self.json:
            show_json(_record(device))
        else:
            show(_one(device))
        return 0


def _record(device: Device) -> dict[str, Any]:
    return {**plain(device), "usable_bytes": device.usable_bytes}


def _all(devices: tuple[Device, ...], width: int) -> Group:
    """Build a table with a row for each device; columns that the width has no room for are left out."""
    table = edgeless_table()
    columns: dict[str, Callable[[Device], str]] = {
        "device": lambda device: device.name,
        "memory": lambda device: display_bytes(device.memory_total_bytes),
        "usable": lambda device: display_bytes(device.usable_bytes),
        "bf16 TFLOP/s": lambda device: _tera(device.flops_per_s.bf16),
        "fp32": lambda device: _tera(device.flops_per_s.fp32),
        "TB/s": lambda device: f"{device.memory_bandwidth_bytes_per_s / 1e12:.3g}",
        "rates from": _rates_from,
    }
    for name, least in (("rates from", _WIDE), ("usable", _NARROW), ("fp32", _NARROW)):
        if width < least:
            del columns[name]
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("device", "rates from") else "right")
    for device in devices:
        table.add_row(*(shown(device) for shown in columns.values()))
    note = "rates are dense peaks"
    if "usable" in columns:
        note = f"usable: without context and margin; {note}"
    return Group(table, Text(), Text(note, style="dim"))


def _rates_from(device: Device) -> str:
    found = _source(device, _BANDWIDTH)
    return "" if found is None else f"{found.publisher}, {found.date}"


def _one(device: Device) -> Group:
    title = Text(f"{device.title}, --target {device.name}", style="bold")
    parts: list[RenderableType] = [title]
    if device.aliases:
        parts.append(Text(f"also called {', '.join(device.aliases)}"))
    table = edgeless_table()
    for heading in ("figure", "value", "source"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "figure" else "right")
    sources: dict[str, int] = {}
    for name, value, key in _figures(device):
        found = _source(device, key)
        number = "" if found is None else str(sources.setdefault(_cited(found), len(sources) + 1))
        table.add_row(name, value, f"about, {number}" if found is not None and found.estimate else number)
    parts += [Text(), table, Text(), *(Text(f"{number}: {cited}") for cited, number in sources.items())]
    if device.notes:
        parts += [Text(), Text(" ".join(device.notes.split()))]
    parts += [Text(), Text("about: an estimate; --json has reasons, and what kernels reach", style="dim")]
    return Group(*parts)


def _figures(device: Device) -> Iterator[tuple[str, str, str]]:
    """Yield what is shown of a device, its value, and the key of its source."""
    yield "memory", display_bytes(device.memory_total_bytes), "memory.total_bytes"
    memory = device.rank_memory
    yield "  context", display_bytes(device.context_bytes), "overheads.context_bytes"
    if device.context_low_bytes is not None and device.context_high_bytes is not None:
        yield "    at least", display_bytes(device.context_low_bytes), "overheads.context_low_bytes"
        yield "    at most", display_bytes(device.context_high_bytes), "overheads.context_high_bytes"
    yield f"  margin, {memory.margin:.1%}", display_bytes(memory.margin_bytes), ""
    yield "  usable for tensors", display_bytes(memory.usable_bytes), ""
    workspaces = device.blas_workspace_bytes + device.blaslt_workspace_bytes
    yield "workspace of a thread's products", display_bytes(workspaces), "overheads.blas_workspace_bytes"
    yield "bandwidth", _gigabytes(device.memory_bandwidth_bytes_per_s), _BANDWIDTH
    for name in _RATES:
        rate = getattr(device.flops_per_s, name)
        if rate is not None:
            yield f"{name} FLOP/s" if name != "int8" else "int8 op/s", f"{_tera(rate)} T", f"flops.{name}"
    for what, link in (("host", device.host_link), ("peer", device.peer_link), ("inter-node", device.inter_node_link)):
        if link is not None:
            yield f"{what} link, {link.name}", f"{_gigabytes(link.bandwidth_bytes_per_s)} each way", ""
            if what == "host" and link.measured_copy_bytes_per_s is not None:
                yield "  copies of pinned memory", f"{_gigabytes(link.copy_bytes_per_s)} each way", ""
    yield "devices to a node", str(device.ranks_per_node), "links.ranks_per_node"
    if device.compute_capability is not None:
        yield "compute capability", ".".join(map(str, device.compute_capability)), "compute.capability"
    if device.multiprocessors is not None:
        yield "multiprocessors", str(device.multiprocessors), "compute.multiprocessors"


def _source(device: Device, key: str) -> Provenance | None:
    return next((each for each in device.provenance if each.key == key), None)


def _cited(source: Provenance) -> str:
    return f"{source.publisher}, {source.date}: {source.source}"


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:,.4g}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.4g} GB/s"
