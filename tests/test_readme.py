"""What the README promises runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memfit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_example_runs_as_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks("README.md")
    exec(compile("\n".join(blocks), "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "budget 24.00 MiB: optimal" in shown and "checkpointed:" in shown
    assert "the plan holds" in shown and "are the same bit for bit" in shown
    assert sum(bool(line.strip()) for line in blocks[0].splitlines()) <= 10


def test_links_lead_somewhere() -> None:
    for name in ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))):
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith("http"):
                assert ((ROOT / name).parent / link).exists(), f"{name} links to {link}"


def test_first_screen_has_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:20]
    assert any("make demo" in line for line in first_screen)
    assert any("make test" in line for line in first_screen)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_public_names_are_few_and_frozen() -> None:
    assert sorted(memfit.__all__) == [
        "CaptureError",
        "InputError",
        "MemfitError",
        "Plan",
        "Step",
        "Trace",
        "__version__",
        "compare",
        "curve",
        "explain",
        "guard",
        "hardware",
        "load",
        "load_trace",
        "memory",
        "plan",
        "presets",
        "report",
        "save_trace",
        "search",
        "shard",
        "sharded",
        "spec",
        "trace",
    ]
    assert all(hasattr(memfit, name) for name in memfit.__all__)
