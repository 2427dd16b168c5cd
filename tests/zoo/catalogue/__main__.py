"""`python -m tests.zoo.catalogue`: examines every model, each in a process of its own, and writes docs/zoo.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.progress import Progress

from tests.zoo.catalogue.examination import Examined, Untrainable, examine, seed, train_plainly
from tests.zoo.catalogue.libraries import FOLDER, LIBRARIES
from tests.zoo.catalogue.page import write_page

PAGE = Path(__file__).parents[3] / "docs" / "zoo.md"
_SECONDS = 300
"""For one model."""
_TRAINED = "trained plainly"
"""What the process of a model prints before memfit begins."""


def main() -> int:
    """Examine models, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", nargs="*", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, help="a file of results: those in it are not examined again")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--one", nargs=2, metavar=("LIBRARY", "NAME"), help="examine one model and print the result")
    parser.add_argument("--names", metavar="LIBRARY", help="print the models of a library")
    arguments = parser.parse_args()
    if arguments.one:
        _find_library(arguments.one[0])
        print(examine_here(*arguments.one))
        return 0
    if arguments.names:
        _find_library(arguments.names)
        print(json.dumps(LIBRARIES[arguments.names].names()))
        return 0
    done = list(_earlier(arguments.results))
    seen = {(each["library"], each["name"]) for each in done}
    names = [
        (library, name)
        for library in arguments.libraries
        for name in _names(library)
        if (library, name) not in seen and (not arguments.models or name in arguments.models)
    ]
    with Progress() as progress, ThreadPoolExecutor(arguments.jobs) as pool:
        task = progress.add_task("examining", total=len(names))
        for future in as_completed([pool.submit(_in_process, *each) for each in names]):
            done.append(future.result())
            if arguments.results is not None:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
            progress.update(task, advance=1, description=done[-1]["name"])
    untrainable = [each for each in done if each.get("untrainable")]
    rows = [msgspec.convert(each, Examined) for each in done if not each.get("untrainable")]
    wrong = [row for row in rows if not row.holds and not row.refused]
    for row in wrong:
        print(f"{row.library} {row.name}: {row.error or 'bytes differ'}")
    if arguments.write:
        sys.path.append(FOLDER)  # for the versions of what is installed there
        write_page(PAGE, rows, len(untrainable))
    print(f"{len(rows)} models examined, {sum(row.holds for row in rows)} hold, {len(wrong)} wrong")
    return 1 if wrong else 0


def examine_here(library: str, name: str) -> str:
    """Examine one model in this process; return the result as JSON."""
    seed()
    try:
        step = LIBRARIES[library].build(name)
        train_plainly(step)
    except Exception as error:  # what the maker cannot build, or PyTorch cannot train, is no matter of memfit's
        why = str(error) if isinstance(error, Untrainable) else f"{type(error).__name__}: {error}"
        return json.dumps({"library": library, "name": name, "untrainable": why[:300]})
    print(_TRAINED, flush=True)
    seed()
    return msgspec.json.encode(examine(library, name, LIBRARIES[library].build(name))).decode()


def _find_library(library: str) -> None:
    """Let this process, which examines nothing else, import a library that has a folder of its own."""
    if LIBRARIES[library].beside:
        sys.path.append(FOLDER)


def _names(library: str) -> list[str]:
    """Return the models of a library, which another process imports."""
    command = [sys.executable, "-m", "tests.zoo.catalogue", "--names", library]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def _in_process(library: str, name: str) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.zoo.catalogue", "--one", library, name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        return {"library": library, "name": name, _blame(late.stdout): f"takes more than {_SECONDS} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines and ended.returncode == -signal.SIGKILL:
        why = "killed: it takes more memory than this machine has"
        return {"library": library, "name": name, _blame(ended.stdout): why}
    if not lines:
        return {"library": library, "name": name, "error": f"the process ended: {ended.stderr.strip()[-300:]}"}
    return json.loads(lines[-1])


def _blame(printed: str | bytes | None) -> str:
    """Return what a process that did not come to its end stands for: before it trained plainly, nothing of memfit's."""
    said = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    return "error" if _TRAINED in said else "untrainable"


def _earlier(results: Path | None) -> Iterator[dict[str, object]]:
    if results is not None and results.exists():
        yield from map(json.loads, results.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
