"""`hf:org/name`: a configuration in the local cache of Hugging Face; nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from memfit.presets.errors import WrongRequest

_REPOSITORY = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_CONFIG = "config.json"


def names_repository(text: str) -> bool:
    """Return whether a text may be a model on the Hub, such as `org/name`, `gpt2` or `org/name@revision`."""
    return _REPOSITORY.fullmatch(text) is not None and not text.endswith(".json")


def cache_folder() -> Path:
    """Return where huggingface_hub keeps what it downloads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(os.environ.get("HF_HOME") or default) / "hub").expanduser()


def cached_config(text: str) -> Path:
    """Return the config.json of a model in the cache; `@revision` is a branch, a tag or a commit, by default `main`."""
    match = _REPOSITORY.fullmatch(text)
    if match is None:
        raise WrongRequest(f"'hf:{text}' names no model; write hf:org/name, or hf:path/to/config.json")
    name, revision = match["name"], match["revision"]
    cache = cache_folder()
    folder = cache / f"models--{name.replace('/', '--')}"
    if not folder.is_dir():
        raise WrongRequest(
            f"there is no file or folder {name}, and no model of that name in the cache of Hugging Face ({cache}). "
            f"Nothing is downloaded here: get it with `hf download {name} {_CONFIG}`, or write hf:path/to/{_CONFIG}"
        )
    commits = _commits(folder)
    wanted = _resolved(folder, revision or "main")
    if wanted is None and revision is None and len(commits) == 1:
        wanted = commits[0]  # downloaded by its commit, so that no branch leads to it
    if wanted is None:
        there = f"the cache has {', '.join(commits[:3])}" if commits else "the cache has no revision of it"
        raise WrongRequest(
            f"revision {revision or 'main'!r} of {name} is not in the cache of Hugging Face ({cache}); {there}. Write "
            f"hf:{name}@COMMIT, or get it with `hf download {name} {_CONFIG}{_option(revision)}`"
        )
    path = folder / "snapshots" / wanted / _CONFIG
    if not path.is_file():
        missing = (folder / ".no_exist" / wanted / _CONFIG).exists()
        why = f"the model has no {_CONFIG}" if missing else f"its {_CONFIG} was not downloaded"
        raise WrongRequest(
            f"{name} is in the cache of Hugging Face ({cache}) without a {_CONFIG}: {why}; "
            + (
                "for any model at all write path/to/file.py:function"
                if missing
                else f"get it with `hf download {name} {_CONFIG}{_option(revision)}`"
            )
        )
    return path


def _resolved(folder: Path, revision: str) -> str | None:
    """Return the commit that a branch, a tag or the beginning of a commit stands for, if the cache has it."""
    ref = folder / "refs" / revision
    if ref.is_file():
        return ref.read_text().strip()
    if len(revision) < 7:
        return None
    return next((commit for commit in _commits(folder) if commit.startswith(revision)), None)


def _commits(folder: Path) -> list[str]:
    snapshots = folder / "snapshots"
    return sorted(each.name for each in snapshots.iterdir() if each.is_dir()) if snapshots.is_dir() else []


def _option(revision: str | None) -> str:
    return "" if revision is None else f" --revision {revision}"
