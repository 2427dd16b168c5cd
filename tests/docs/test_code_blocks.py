"""Every block of Python in the documentation runs, page by page, and every command that the site runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.docs.code_blocks import DOCS, Page, read_pages
from tests.presets.few_layers import few_layers

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ELSEWHERE = {"questions.md"}
"""Run by tests of their own, which look at what is printed."""


def _pages(*, several: bool) -> list[pytest.param]:
    found = [page for page in read_pages() if page.name not in ELSEWHERE and (page.ranks > 1) == several]
    return [pytest.param(page, id=page.name) for page in found]


@pytest.mark.parametrize("page", _pages(several=False))
def test_python_of_a_page_runs(page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("memfit.presets.named_steps.load_shape", few_layers)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(page.script(), page.name, "exec"), {"__name__": "__main__"})


def _commands() -> list[pytest.param]:
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        blocks = re.findall(r"^```console exec[^\n]*\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [pytest.param(block, id=f"{path.stem}-{number}") for number, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize("block", _commands())
def test_commands_that_the_site_runs_succeed(block: str, tmp_path: Path) -> None:
    """As the build runs them, in the root of the repository, with a folder of their own in place of `/tmp`."""
    bin = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([bin, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    script = "set -e\n" + "\n".join(line.removeprefix("$ ") for line in block.splitlines())
    script = script.replace("/tmp/", f"{tmp_path}/")
    ended = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-1500:]


_END = """
import torch.distributed as dist

dist.barrier()  # a rank that ends while Gloo's threads of another still answer it would end that one, too
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("page", _pages(several=True))
def test_python_of_a_page_runs_on_ranks(page: Page, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(page.script() + _END)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={page.ranks}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launcher, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
