"""Finding a device by name, alias or file: shipped ones, and the user's own, which come first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.hardware.device import AllocatorRules, Device, Link
from memfit.hardware.efficiency import Efficiency
from memfit.hardware.schema import build_allocators, build_device, build_efficiencies, build_links, read_toml
from memfit.text import close_names, did_you_mean

ENVIRONMENT = "MEMFIT_DEVICES"
_SECTIONS = ("memory", "flops", "links", "overheads", "compute", "sustained", "efficiency", "engines", "sources")

_NAME_IT = "name it, such as 'h100-sxm', 'a100-sxm-80gb', 'rtx-4090' or 'mi300x'"
_MAKERS = re.compile(r"\b(nvidia|amd|intel|geforce|tesla|instinct|gpu)\b")
_SHORT = 3
"""Names as short as this are alike by chance: a tpu is no cpu."""

RawFile = tuple[Path, dict[str, Any]]


def load_device(name: str) -> Device:
    """Load the device called `name` (case, spaces and dashes do not matter), or described by that TOML file."""
    users = list(_user_files())
    if _is_path(name):
        path = Path(name).expanduser()
        return _build((path, read_toml(path)), users)
    name = re.sub(r":\d+$", "", name)  # torch's cuda:0 and cpu:0
    for files in (users, list(_shipped_files())):
        found = _find(name, files)
        if found is not None:
            return _build(found, users)
    raise InputError(_unknown(name, users))


def list_devices() -> tuple[Device, ...]:
    """List every known device, the user's own included, by name."""
    users = list(_user_files())
    files = {_name(file): file for file in [*_shipped_files(), *users]}
    return tuple(_build(files[name], users) for name in sorted(files))


def load_link(name: str) -> Link:
    """Load a link of the shipped table, such as 'infiniband-ndr'."""
    links = _shipped_links()
    key = next((k for k in links if _normal(k) == _normal(name)), None)
    if key is None:
        raise InputError(f"unknown link {name!r}; choose one of {', '.join(links)}, or give a Link")
    return links[key]


def list_links() -> tuple[Link, ...]:
    """List every shipped link."""
    return tuple(_shipped_links().values())


def user_device_paths() -> tuple[Path, ...]:
    """List where the user's device files are looked for: MEMFIT_DEVICES, then the configuration folder."""
    given = [Path(p).expanduser() for p in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if p]
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "memfit" / "devices"
    return (*given, config)


def _build(file: RawFile, users: list[RawFile]) -> Device:
    path, _ = file
    raw = _with_base(file, users, ())
    return build_device(raw, str(path), _shipped_links(), _shipped_allocators(), _shipped_efficiencies())


def _with_base(file: RawFile, users: list[RawFile], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Fill in from `base` what the file leaves out. A figure is taken over or replaced as a whole."""
    path, raw = file
    base = raw.get("base")
    if base is None:
        return raw
    if not isinstance(base, str):
        raise InputError(f"{path}: base is {base!r}; write the name of a device")
    if path in seen:
        raise InputError(f"{path}: base = {base!r} leads back to this file")
    others = [user for user in users if user[0] != path]
    found = _find(base, others) or _find(base, list(_shipped_files()))
    if found is None:
        raise InputError(f"{path}: base: {_unknown(base, others)}")
    inherited = _with_base(found, users, (*seen, path))
    merged = {k: v for k, v in inherited.items() if k != "aliases"}
    for key, value in raw.items():
        if key == "base":
            continue
        if key in _SECTIONS and isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


def _find(name: str, files: list[RawFile]) -> RawFile | None:
    wanted = _normal(name)
    named = [file for file in files if _normal(_name(file)) == wanted]
    found = named or [file for file in files if wanted in {_normal(alias) for alias in _aliases(file)}]
    if len(found) > 1:
        raise InputError(f"{name!r} is defined twice: in {found[0][0]} and in {found[1][0]}; rename one")
    return found[0] if found else None


def _unknown(name: str, users: list[RawFile]) -> str:
    if _normal(name) in ("cuda", "gpu", "nvidia", "amd", "rocm"):
        return f"{name!r} is not one device; {_NAME_IT}"
    names: dict[str, str] = {}
    for file in [*_shipped_files(), *users]:
        for spelling in (_name(file), *_aliases(file)):
            names.setdefault(_normal(spelling), _name(file))
    wanted = _normal(_MAKERS.sub("", name.lower()))
    if not wanted:
        return f"{name!r} is not one device; {_NAME_IT}"
    nearest = list(dict.fromkeys(names[key] for key in _near(wanted, names)))[:3]
    hint = did_you_mean(nearest, f"known are {', '.join(sorted(set(names.values())))}.")
    if name.endswith("-calibrated"):
        hint = "`memfit calibrate` measures this machine and writes it, in some minutes."
    return f"unknown device {name!r}; {hint} Or give the path of a device file (.toml)"


def _near(wanted: str, names: Mapping[str, str]) -> list[str]:
    """Return names that may have been meant, nearest first; only those with the same model number where it is known."""
    model = _model(wanted)
    same = [key for key in names if model and _model(key) == model]
    if same:
        return close_names(wanted, same, most=len(same), cutoff=0.0)
    close = [key for key in names if key.startswith(wanted)]
    for cutoff, keys in ((0.5, [key for key in names if len(key) > _SHORT]), (0.8, list(names))):
        close += close_names(wanted, keys, most=5, cutoff=cutoff)
    return close


def _model(name: str) -> str:
    """Return the letters and the number that a normalized name begins with: h100 of h100sxm, rtx4090 of rtx4090."""
    found = re.match(r"[a-z]+\d+", name)
    return found[0] if found else ""


def _name(file: RawFile) -> str:
    path, raw = file
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: name is missing; write for example name = 'my-gpu'")
    return name


def _aliases(file: RawFile) -> list[str]:
    path, raw = file
    aliases = raw.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InputError(f"{path}: aliases is {aliases!r}; write a list of names")
    return aliases


def _user_files() -> Iterator[RawFile]:
    for place in user_device_paths():
        if place.is_dir():
            yield from ((path, read_toml(path)) for path in sorted(place.glob("*.toml")))
        elif place.is_file():
            yield place, read_toml(place)
        elif place in user_device_paths()[:-1]:
            raise InputError(f"{ENVIRONMENT} names {place}, which does not exist")


@cache
def _shipped_files() -> tuple[RawFile, ...]:
    with resources.as_file(resources.files("memfit.hardware") / "data" / "devices") as folder:
        return tuple((path, read_toml(path)) for path in sorted(folder.glob("*.toml")))


@cache
def _shipped_links() -> dict[str, Link]:
    with resources.as_file(resources.files("memfit.hardware") / "data" / "links.toml") as path:
        return build_links(read_toml(path), str(path))


@cache
def _shipped_allocators() -> dict[str, AllocatorRules]:
    with resources.as_file(resources.files("memfit.hardware") / "data" / "allocators.toml") as path:
        return build_allocators(read_toml(path), str(path))


@cache
def _shipped_efficiencies() -> dict[str, Efficiency]:
    with resources.as_file(resources.files("memfit.hardware") / "data" / "efficiency.toml") as path:
        return build_efficiencies(read_toml(path), str(path))


def _is_path(name: str) -> bool:
    return name.endswith(".toml")


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
