"""Files that cannot be written are found before the work, and named with their option; so is a disk that fills up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.files import check_can_write, write_whole
from tests.cli.command_runner import STEP, Runner

WRITERS = {
    "plan": ("--output", "--html", "--perfetto", "--snapshot", "--markdown"),
    "verify": ("--output",),
    "report": ("--html", "--perfetto", "--snapshot", "--markdown"),
    "calibrate": ("--output",),
}
OPTIONS = [(name, option) for name, options in WRITERS.items() for option in options]


def arguments(name: str, files: Path) -> tuple[object, ...]:
    """What a command needs; a step that does not exist, for nothing is to be done with it."""
    return {"plan": ("no-such-step",), "calibrate": ()}.get(name, (files / "plan.json", "no-such-step"))


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_file_that_cannot_be_written_is_said_before_the_work(
    name: str, option: str, run: Runner, files: Path, tmp_path: Path
) -> None:
    wrong = {
        tmp_path / "missing" / "out": f"{option}: there is no folder {tmp_path / 'missing'} to write out to",
        tmp_path: f"{option}: {tmp_path} is a folder; give the path of a file in it, such as {tmp_path}/",
        Path("/proc/out"): f"{option}: /proc/out cannot be written: ",  # where not even root may write
        tmp_path / ("n" * 254): "cannot be written: File name too long; give another path",
    }
    for path, says in wrong.items():
        ran = run(name, *arguments(name, files), option, path)
        assert ran.code == 1 and says in ran.said and "no-such-step" not in ran.said, path
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_said(run: Runner, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    ran = run("plan", "no-such-step", "-o", tmp_path / "plan.json")
    assert ran.code == 1 and f"--output: {tmp_path / 'plan.json'} cannot be written: Permission denied" in ran.said


def test_a_disk_that_fills_up_is_said(run: Runner) -> None:
    for option in ("--output", "--html"):
        ran = run("plan", STEP, "--target", "cpu", option, "/dev/full", "--no-levers")
        assert ran.code == 1 and f"{option}: /dev/full cannot be written: No space left on device" in ran.said
        assert "Traceback" not in ran.err


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_can_write(pipe, "plan.json")
    write_whole(pipe, b"content", "plan.json")
    assert os.read(reader, 100) == b"content" and pipe.is_fifo()
    os.close(reader)


def test_the_standard_output_is_no_file(run: Runner) -> None:
    ran = run("plan", "no-such-step", "-o", "/dev/stdout")
    assert ran.code == 2 and "--output: /dev/stdout is where results are printed; leave --output out" in ran.said


def test_a_file_that_is_there_is_kept_when_it_cannot_be_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")
    check_can_write(path, "plan.json")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"plan\.json cannot be written: No space left on device; give another path"):
        write_whole(path, b"after", "plan.json")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_device_that_could_not_be_saved_is_not_measured(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    ran = run("calibrate")
    assert ran.code == 1 and "--output: " in ran.said and "cannot be written: Not a directory" in ran.said
