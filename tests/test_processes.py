"""Two pieces of work at once: in a process of our own the second runs beside the first, with the same results."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from memfit.processes import both, can_fork

OWN = """
import os, sys, time
from memfit.processes import ForkedCall, allow_fork, both, can_fork
os.sched_getaffinity = lambda pid: {0, 1}  # also where one core is given
allow_fork()
assert can_fork()

def check_no_process_is_left():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    raise SystemExit("a process is left")
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OWN + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


def test_a_process_of_somebody_else_is_not_forked() -> None:
    assert not can_fork()
    assert both(os.getpid, os.getpid) == (os.getpid(), os.getpid())


@linux
def test_the_second_runs_in_another_process() -> None:
    run("first, second = both(os.getpid, os.getpid); assert first == os.getpid() != second")


@linux
def test_both_run_at_once() -> None:
    run("""
        reader, writer = os.pipe()
        first, second = both(lambda: os.read(reader, 1), lambda: os.write(writer, b"x"))  # one after the other: hangs
        assert (first, second) == (b"x", 1)
    """)


@linux
@pytest.mark.parametrize(
    "second",
    ["os._exit(3)", "sys.exit(0)", "[][1]", "(lambda: 0)"],
    ids=["dies", "exits", "raises", "cannot be pickled"],
)
def test_what_fails_beside_is_done_here(second: str) -> None:
    run(f"""
        here = os.getpid()
        assert both(lambda: 1, lambda: "done here" if os.getpid() == here else {second}) == (1, "done here")
    """)


@linux
def test_an_error_of_either_is_raised_and_leaves_no_process() -> None:
    run("""
        for work in ((lambda: [][1], lambda: time.sleep(100)), (lambda: 1, lambda: [][1])):
            try:
                both(*work)
            except IndexError:
                pass
            else:
                raise SystemExit("no error")
        check_no_process_is_left()
    """)


@linux
def test_a_large_result_comes_through() -> None:
    run("assert both(lambda: 0, lambda: 'x' * 10_000_000) == (0, 'x' * 10_000_000)")


@linux
def test_a_result_that_could_not_be_written_is_made_here() -> None:
    run("""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        assert both(lambda: 0, lambda: "x" * 10_000_000) == (0, "x" * 10_000_000)
    """)


@linux
def test_where_no_process_can_be_made_all_is_done_here() -> None:
    run("""
        import multiprocessing.popen_fork

        def refuse():
            raise OSError("no more processes")

        os.fork = refuse
        assert both(os.getpid, os.getpid) == (os.getpid(), os.getpid())
    """)


@linux
def test_what_is_printed_beside_a_spinner_blocks_nothing() -> None:
    """The streams are then the spinner's own, and their lock may be held by its thread when the process is forked."""
    run("""
        import threading

        lock = threading.Lock()

        class Locked:
            def write(self, text):
                with lock:
                    return len(text)

            def flush(self):
                pass

        sys.stdout = Locked()
        with lock:
            assert both(lambda: 0, lambda: print("beside") or 1) == (0, 1)
        sys.stdout = sys.__stdout__
    """)


@linux
def test_a_call_that_is_stopped_leaves_no_process_and_no_file() -> None:
    run("""
        before = len(os.listdir("/proc/self/fd"))
        call = ForkedCall(lambda: time.sleep(100))
        call.stop()
        call.stop()
        assert len(os.listdir("/proc/self/fd")) == before
        check_no_process_is_left()
    """)


@linux
def test_the_process_ends_with_its_parent() -> None:
    run("""
        import signal

        reader, writer = os.pipe()
        parent = os.fork()
        if not parent:
            os.close(reader)
            ForkedCall(lambda: time.sleep(100))
            os.write(writer, b"x")
            time.sleep(100)
        os.close(writer)
        assert os.read(reader, 1) == b"x"
        time.sleep(2)  # until the process beside has come to its work
        os.kill(parent, signal.SIGKILL)
        assert os.read(reader, 1) == b""  # hangs as long as the pipe is held
    """)


@linux
def test_levers_are_the_same_in_one_process_and_in_two() -> None:
    program = """
        import memfit
        import memfit.processes
        from memfit.presets import load_shape, shape_step

        step = shape_step(load_shape("gpt2"), batch=2, seq=128).step
        two = memfit.explain(step, target="rtx-4090", ranks=2, progress=False)
        memfit.processes._own_process = False
        one = memfit.explain(step, target="rtx-4090", ranks=2, progress=False)
        assert one.levers and one == two
        print(len(one.levers))
    """
    assert int(run(program)) > 2


@linux
def test_the_command_shows_the_same_plan_and_levers_in_one_process_and_in_two() -> None:
    """Where a plan fits, and where none does."""
    program = """
        import contextlib, io
        import memfit.processes
        from memfit.cli import main

        def shown(*words):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                code = main(["plan", "gpt2", *words, "--target", "rtx-4090", "--batch", "2", "--seq", "128"])
            return code, out.getvalue()

        for words in (("--ranks", "2"), ("--autocast", "float32", "--budget", "2GiB")):
            allow_fork()
            two = shown(*words)
            memfit.processes.can_fork = lambda: False
            import memfit.analysis.levers.early as early
            early.can_fork, before = (lambda: False), early.can_fork
            one = shown(*words)
            memfit.processes.can_fork = early.can_fork = before
            assert one == two, (one, two)
            assert "bfloat16" in one[1], one
    """
    run(program)
