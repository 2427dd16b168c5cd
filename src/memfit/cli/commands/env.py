"""`memfit env`: what a bug report needs, and no path of anybody's machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from rich.table import Table

from memfit._version import __version__
from memfit.cli.options import Json
from memfit.cli.output import show, show_json
from memfit.progress import Progress
from memfit.units import display_bytes

_PACKAGES = ("numpy", "msgspec", "highspy", "rich", "tyro", "transformers", "accelerate")
_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
"""Settings that change memory or time. None of them holds a path."""


@dataclass(frozen=True, kw_only=True)
class Env:
    """Versions, torch's build, GPUs and the context measured on each, cores and allocator settings.

    No path, host or user name of this machine is in it.

    examples:
      memfit env
      memfit env --json
    """

    json: Json = False
    """Print JSON."""

    def run(self) -> int:
        with Progress("asking torch"):
            found = environment()
        if self.json:
            show_json(found)
        else:
            show(_table(found))
        return 0


def environment() -> dict[str, Any]:
    """Return everything that is shown, by name."""
    import torch

    from memfit.hardware import list_devices, user_device_paths

    folders = [path for path in user_device_paths() if path.exists()]
    return {
        "memfit": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": {
            "version": str(torch.__version__),
            "commit": torch.version.git_version,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "threads": torch.get_num_threads(),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": os.cpu_count(),
        "host_memory_bytes": _host_memory_bytes(),
        "gpus": _gpus(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "devices": {"known": len(list_devices()), "folders of your own": len(folders)},
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    from memfit.errors import InputError
    from memfit.hardware import load_device, measure_context

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            known = load_device(properties.name).name
        except InputError:
            known = None
        context = measure_context(index)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "target": known,
                "context_bytes": None if context is None else context.size_bytes,
                "context_is_of_this_process": context is not None and context.of_this_process,
            }
        )
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _table(found: dict[str, Any]) -> Table:
    table = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("memfit", "python", "system"):
        table.add_row(name, str(found[name]))
    for name, value in found["torch"].items():
        table.add_row("torch" if name == "version" else f"  {name}", "none" if value is None else str(value))
    for name, value in found["packages"].items():
        table.add_row(name, "not installed" if value is None else value)
    memory = found["host_memory_bytes"]
    table.add_row("cores", str(found["cores"]))
    table.add_row("host memory", "unknown" if memory is None else display_bytes(memory))
    for gpu in found["gpus"]:
        target = gpu["target"] or "none that memfit knows"
        described = f"{gpu['name']}, {display_bytes(gpu['memory_bytes'])}, capability {gpu['capability']}"
        table.add_row("GPU", f"{described}, target {target}")
        if gpu["context_bytes"] is not None:
            others = "" if gpu["context_is_of_this_process"] else ", with what other processes hold there"
            size = f"{-(-gpu['context_bytes'] // (1 << 20))}MiB"
            table.add_row("  context", f"--context {size}{others}; a product and a convolution have run")
    if not found["gpus"]:
        table.add_row("GPU", "none that torch can use; plans need none")
    for name in _SETTINGS:
        if name in found["settings"]:
            table.add_row(name, found["settings"][name])
    if not found["settings"]:
        table.add_row("settings", "none of torch's allocator or threads")
    own = found["devices"]["folders of your own"]
    table.add_row("devices", f"{found['devices']['known']} known, {own} folders of your own")
    return table
