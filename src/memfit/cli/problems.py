"""What the user is told when something is wrong: the option it came from, and what to write instead."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from memfit.errors import InputError
from memfit.text import close_names

DONE, FAILED, USAGE, INFEASIBLE, STOPPED = 0, 1, 2, 3, 130
"""Exit codes."""
_STANDARD_OUTPUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_EXAMPLES = {
    "--html": "report.html",
    "--perfetto": "step.perfetto.json",
    "--snapshot": "step.pickle",
    "--markdown": "plan.md",
}
"""Names that would do, by option."""


class UsageError(InputError):
    """An option or a value on the command line is wrong: exit code 2."""


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Raise an `InputError` of the block as a usage error of this option."""
    try:
        yield
    except UsageError:
        raise
    except InputError as error:
        raise UsageError(f"{option}: {error}") from error


def check_files(files: dict[str, Path | None]) -> None:
    """Refuse files that cannot be written, by option, before minutes of work are done."""
    from memfit.files import check_can_write

    for option, path in files.items():
        if path is None:
            continue
        if str(path) in _STANDARD_OUTPUT:
            raise UsageError(f"{option}: {path} is where results are printed; leave {option} out, or write --json")
        with for_file(option):
            check_can_write(path, _EXAMPLES.get(option, "plan.json"))
    given = [path.absolute() for path in files.values() if path is not None]
    if len(set(given)) < len(given):
        raise UsageError(f"two of {', '.join(files)} write to the same file; give each its own")


@contextlib.contextmanager
def for_file(option: str) -> Iterator[None]:
    """Raise a failed write in the block as an error of the file that this option names."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    except OSError as error:
        named = f"{error.filename} cannot be written: " if error.filename else ""
        raise InputError(f"{option}: {named}{error.strerror}; give another path") from error


# Options that other tools have and memfit does not


_PLANNED = (
    "parameters, gradients and optimizer state are sharded over all of --ranks N (FSDP2), or replicated with "
    "--parallel ddp; for a model that is cut up in other ways, give the step of what one rank computes, with its part "
    "of the layers"
)
_SIZE_UNITS = ("kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib")
_PARALLEL = {
    "tensor parallelism": ("tp", "tp-size", "tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size"),
    "pipeline parallelism": ("pp", "pp-size", "pipeline-parallel", "pipeline-parallel-size", "pipeline-stages"),
    "context parallelism": ("cp", "cp-size", "context-parallel", "context-parallel-size"),
    "sequence parallelism": ("sp", "sequence-parallel", "ulysses"),
    "expert parallelism": ("ep", "ep-size", "expert-parallel", "expert-parallel-size"),
}
_INSTEAD = {
    "--ranks": (
        "dp dp-size data-parallel world-size nproc nproc-per-node n-gpus num-gpus gpus ngpus num-devices devices "
        "fsdp zero zero-stage shards"
    ),
    "--parallel ddp": "ddp data-parallel-replicate replicate",
    "--replicas": "dp-replicate replicate-degree num-replicas hsdp",
    "--target": "gpu device hardware accelerator card",
    "--budget": "memory mem max-memory vram gpu-memory memory-budget limit",
    "--batch": "batch-size bs micro-batch micro-batch-size per-device-train-batch-size mbs",
    "--seq": "seq-len seq-length sequence-length max-seq-len max-length context-length sequence block-size",
    "--autocast": "amp bf16 fp16 precision mixed-precision dtype",
    "--accumulation-steps": "gradient-accumulation-steps grad-accum accumulate accumulation micro-batches",
    "--output": "out save",
}
"""Words that other tools use, by the option that does what they do."""


def check_options(name: str, kind: type[Any], arguments: list[str]) -> None:
    """Refuse an option that the command does not have, when something better than its nearest neighbour can be said."""
    known = set(_option_names(kind)) | {"--help", "-h"}
    for before, argument in itertools.pairwise(("", *arguments)):
        if argument == "--":
            return
        if before.replace(".", "", 1).isdecimal() and argument.lower() in _SIZE_UNITS:
            raise UsageError(f"{before} {argument} are two words; write {before}{argument}")
        option = argument.partition("=")[0].replace("_", "-")
        if not option.startswith("--") or option in known or option.replace("--no-", "--", 1) in known:
            continue
        word = option.removeprefix("--").lower()
        for what, words in _PARALLEL.items():
            if word in words:
                raise UsageError(f"there is no option {option!r}: {what} is not planned. Today {_PLANNED}")
        for instead, words in _INSTEAD.items():
            if word in words.split() and instead.partition(" ")[0] in known:
                raise UsageError(f"there is no option {option!r}; write {_example(instead)}")
        if not close_names(word, (each.lstrip("-") for each in known)):
            raise UsageError(f"there is no option {option!r}; `memfit {name} --help` lists those that there are")


def _example(option: str) -> str:
    """Return an option with a value that could be meant."""
    values = {
        "--ranks": "8, which shards the model over 8 ranks",
        "--target": "h100-sxm",
        "--budget": "72GiB",
        "--batch": "8",
        "--seq": "4096",
        "--autocast": "bfloat16",
        "--output": "plan.json",
        "--accumulation-steps": "4",
    }
    return f"{option} {values.get(option, '')}".rstrip()


def _option_names(kind: type[Any]) -> Iterator[str]:
    """Yield the options of a command as they are written, other names included."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _option_names(hint)  # type: ignore[arg-type]
            continue
        yield f"--{field.name.replace('_', '-')}"
        for marker in getattr(hint, "__metadata__", ()):
            yield from getattr(marker, "aliases", None) or ()
