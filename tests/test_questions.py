"""The page of questions: each is answered, its commands can be written so, and its Python runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.cli.command import command_class, parse_command
from tests.presets.few_layers import few_layers

PAGE = (Path(__file__).parent.parent / "docs" / "questions.md").read_text()
QUESTIONS = range(1, 18)
LATER = "not there yet"
NEED_THE_SHARDED_RUNTIME = {13, 14}


def sections() -> dict[int, str]:
    """The text below each numbered heading."""
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    return {int(part.split(".")[0]): part for part in parts if part[0].isdigit()}


def rows() -> dict[int, list[str]]:
    """The cells of the table after the number: question, command, Python."""
    found = re.findall(r"^\| \[(\d+)\]\(#[^)]+\) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    return {int(number): cells.split(" | ") for number, cells in found}


def commands() -> list[str]:
    """The command lines of the sections, in order, each once."""
    return list(dict.fromkeys(re.findall(r"^    \$ memfit (.+)$", PAGE, flags=re.MULTILINE)))


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In place of the shape, one of few layers that are as much wider, so that budgets of the page mean the same."""
    monkeypatch.setattr("memfit.presets.named_steps.load_shape", few_layers)
    monkeypatch.chdir(tmp_path)


def test_every_question_has_a_row_and_a_section() -> None:
    assert list(rows()) == list(sections()) == list(QUESTIONS)


@pytest.mark.parametrize("number", QUESTIONS)
def test_every_question_has_a_command_and_a_python_call(number: int) -> None:
    question, command, call = rows()[number]
    section = sections()[number]
    assert question and "`memfit " in command and re.search(r"`[\w.]+\(.*\)", call)
    assert "    $ memfit " in section and python_blocks(section)


def test_what_is_not_there_yet_is_said_in_both_places() -> None:
    said = {number for number, row in rows().items() if LATER in row[1]}
    assert said == {number for number, text in sections().items() if LATER in text.lower()}
    assert said == NEED_THE_SHARDED_RUNTIME
    assert all("sharded runtime" in sections()[number] for number in said)


def test_numbers_lead_to_their_sections() -> None:
    anchors = dict(re.findall(r"^\| \[(\d+)\]\(#([^)]+)\)", PAGE, flags=re.MULTILINE))
    for number, text in sections().items():
        heading = text.splitlines()[0].lower()
        assert anchors[str(number)] == re.sub(r"[^\w -]", "", heading).replace(" ", "-")


def test_every_command_can_be_written_so() -> None:
    in_table = [line for row in rows().values() for line in re.findall(r"`memfit ([^`]+)`", row[1])]
    for line in [*commands(), *in_table]:
        name, *arguments = shlex.split(line)
        assert isinstance(parse_command(name, arguments), command_class(name)), line


@pytest.mark.usefixtures("narrow")
def test_files_that_a_command_reads_were_written_by_one_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are run by the Python of their questions."""
    for line in (line for line in commands() if ".json" in line):
        assert main(shlex.split(line)) == 0, f"memfit {line}\n{capsys.readouterr().err}"
        assert capsys.readouterr().out


@pytest.mark.usefixtures("narrow")
def test_python_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile("\n".join(python_blocks(PAGE)), "docs/questions.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.count("two plans compared") == len(re.findall(r"memfit\.compare\(.*\)\)$", PAGE, flags=re.MULTILINE))
    assert "checkpointed: " in shown and "samples/s" in shown and "tokens/s" in shown
    assert "still there: result that the policy saves" in shown and "still there: held by Python" in shown
