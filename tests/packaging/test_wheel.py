"""The wheel and the sdist: they are built, have what memfit reads at run time, and work where no repository is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).with_name("installed_memfit.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both with the tools that are installed, without a network."""
    folder = tmp_path_factory.mktemp("dist")
    code = (
        "import sys; from hatchling import build\n"
        "build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"  # what pip and `python -m build` call
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT, capture_output=True)
    return folder


def test_the_wheel_works_where_no_repository_is(built: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, CHECKS], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "site" / "memfit") in done.stdout


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    source = ROOT / "src"
    ours = {
        str(path.relative_to(source))
        for path in source.joinpath("memfit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        described = archive.read(metadata).decode()
    assert names == ours
    assert "Description-Content-Type: text/markdown" in described and "\n# memfit" in described


def test_the_sdist_builds_what_it_was_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "mkdocs.yml", "CHANGELOG.md"}
    assert wanted <= names
    assert {"src/memfit/plans/plan.schema.json", "tests/packaging/test_wheel.py", "docs/index.md"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("dist", "demo", "site"))]
