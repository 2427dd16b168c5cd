"""What the README promises runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


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


def test_the_page_about_estimates_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential()
    model.add_module("layers", torch.nn.Sequential(torch.nn.Linear(8, 8)))
    step = memfit.Step(model, memfit.spec((2, 8)), loss=lambda out, _: out.sum())
    memfit.save_trace(memfit.trace(step, target="h100-sxm"), tmp_path / "step.memfit")
    exec(compile("\n".join(python_blocks("docs/estimate.md")), "docs/estimate.md", "exec"), {"step": step})


def test_the_page_about_plans_runs_as_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(python_blocks("docs/plan.md")), "docs/plan.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "budget 12.00 GiB: optimal" in shown and "budget 6.00 GiB: infeasible" in shown
    assert "the plan was made for another step" in shown
    assert "only sharded" in shown


def test_the_page_about_running_plans_runs_as_written() -> None:
    found: dict[str, object] = {}
    exec(compile("\n".join(python_blocks("docs/apply.md")), "docs/apply.md", "exec"), found)
    assert isinstance(found["plan"], memfit.Plan) and found["plan"].checkpoint


def test_the_pages_about_verifying_and_guarding_run_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The guard's page goes on with the model and the plan of the other."""
    found: dict[str, Any] = {}
    exec(compile("\n".join(python_blocks("docs/verify.md")), "docs/verify.md", "exec"), found)
    assert "are the same bit for bit" in capsys.readouterr().out
    model = found["model"]
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: torch.Tensor) -> None:
        torch.nn.functional.cross_entropy(model(batch), found["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    found |= {"optimizer": optimizer, "loader": [found["x"]], "train": train, "step": found["step"]()}
    alone = [each for each in python_blocks("docs/guard.md") if "ranks=" not in each]  # that one needs torchrun
    exec(compile("\n".join(alone), "docs/guard.md", "exec"), found)
    assert found["guard"].steps == 1
