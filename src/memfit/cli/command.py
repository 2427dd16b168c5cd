"""`main`: finds the command, lets tyro read its options, runs it, and turns errors into words and exit codes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Any, Protocol

from memfit.cli.commands import command_class
from memfit.cli.output import close_quietly, only_results, say_problem
from memfit.cli.problems import DONE, FAILED, STOPPED, USAGE, UsageError, check_options
from memfit.errors import MemfitError
from memfit.processes import allow_fork
from memfit.text import close_names, did_you_mean
from memfit.torch_private.deferred_imports import defer_imports

COMMANDS = {
    "plan": "the fastest plan for a training step that fits the memory",
    "explain": "what fills the memory, and what would help",
    "estimate": "what training a model takes of one device as it is",
    "curve": "memory against time: every budget that matters",
    "search": "the largest batch or longest sequence that fits",
    "compare": "two plans or two traces side by side",
    "verify": "run a plan, and see what was predicted beside what was measured",
    "tune": "the plan that is the fastest on this machine, by running those that may be",
    "report": "a plan as a page, a Perfetto trace, a snapshot, Markdown or JSON",
    "shapes": "the built-in models that can stand for a step",
    "devices": "the hardware that memfit knows, with sources",
    "calibrate": "measure this machine, for times that are its own",
    "env": "versions and settings, for a bug report",
    "version": "memfit's version",
}
_COLLECT_EVERY = 1_000_000
"""Objects made between two garbage collections. A command imports torch and reads a trace: millions of objects that
stay. Collecting every 700 of them, as Python does unless told otherwise, is an eighth of a command's time."""
_EPILOG = """examples:
  memfit plan llama3-8b --target h100-sxm --ranks 8 --batch 2 --seq 8192
  memfit plan train.py:step --target a100-sxm-80gb --budget 60GiB -o plan.json
  memfit explain train.py:step --target h100-sxm
  memfit COMMAND --help

train.py:step is a function that returns a memfit.Step(model, batch, ...).
exit codes: 0 done, 1 error, 2 wrong usage, 3 nothing fits the budget, 130 interrupted"""


class Command(Protocol):
    """One of the commands with its options."""

    def run(self) -> int: ...


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code is 0 when done, 1 on an error, 2 on wrong usage, 3 when nothing fits.

    Without arguments it is the program itself, and those of its command line are taken.
    """
    program = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if program:
        defer_imports()
        allow_fork()
        gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])
        atexit.register(_leave)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run(arguments, program=program)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UsageError as error:
        say_problem(str(error))
        return USAGE
    except MemfitError as error:
        say_problem(str(error))
        return FAILED
    except KeyboardInterrupt:
        say_problem("stopped")
        return STOPPED
    except BrokenPipeError:
        close_quietly()
        return FAILED
    return code


def _leave() -> None:
    """Make the end of the process short. Everything that registered later has run.

    As the interpreter ends it looks for cycles among millions of objects, several times, and frees them one by one.
    """
    gc.freeze()


def _run(arguments: list[str], *, program: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        if len(arguments) > 1 and arguments[0] == "help":
            return _run([arguments[1], "--help"], program=program)
        _print_help(sys.stdout if arguments else sys.stderr)
        return DONE if arguments else USAGE
    name = arguments[0]
    if name in ("-V", "--version"):
        name, arguments = "version", ["version", *arguments[1:]]
    if name.startswith("--tyro-"):
        return _completion(arguments)
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        near = map(repr, close_names(name, COMMANDS))
        hint = did_you_mean(near, f"there are {_listed(list(COMMANDS))}; memfit --help says more")
        raise UsageError(f"there is no {what} {name!r}; {hint}")
    check_options(name, command_class(name), arguments[1:])
    command = parse_command(name, arguments[1:])
    with only_results(to_the_end=program):
        return command.run()


def parse_command(name: str, arguments: list[str]) -> Command:
    """Parse the command that its arguments ask for; wrong ones end the program with code 2."""
    import tyro

    return tyro.cli(command_class(name), prog=f"memfit {name}", args=arguments, config=(tyro.conf.OmitArgPrefixes,))


def _completion(arguments: list[str]) -> int:
    """Return completion scripts, which tyro writes from all commands at once."""
    import tyro

    kinds: dict[str, Callable[..., Any]] = {name: command_class(name) for name in COMMANDS}
    tyro.extras.subcommand_cli_from_dict(kinds, prog="memfit", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    return DONE


def _print_help(stream: Any) -> None:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    intro = "Makes PyTorch training fit in memory, and then as fast as it can be. No GPU is needed to plan."
    print("usage: memfit COMMAND [options]", "", intro, "", *rows, "", _EPILOG, sep="\n", file=stream)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
