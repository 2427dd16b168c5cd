"""Steps by name, as on a command line: `train.py:step`, `package.module:step`, `hf:config.json`, `llama3-8b`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from memfit.capture import Step
from memfit.errors import InputError, MemfitError
from memfit.presets.errors import NotTaken, StepRaised, WrongRequest
from memfit.presets.hub_cache import names_repository
from memfit.presets.shapes import load_shape, shape_step
from memfit.presets.training import NamedStep
from memfit.presets.transformers_config import PREFIX, Configured
from memfit.text import close_names, did_you_mean

_NOT_THE_USERS = (str(Path(__file__).parents[1]) + os.sep, importlib.__path__[0] + os.sep, "<frozen")
HOW = "write path/to/file.py:function or package.module:function, a function that returns a memfit.Step"


class NamedSteps(Protocol):
    """Makes the step that a text names, for a batch and a length."""

    def __call__(self, *, batch: int | None = None, seq: int | None = None) -> NamedStep: ...


def step_at(text: str, *, batch: int | None = None, seq: int | None = None, task: str | None = None) -> Step:
    """Return the step that a text names.

    `train.py:step` and `package.module:step` are functions that return one, `hf:config.json` is a configuration of
    transformers, `hf:org/name` that of a model in the local cache of Hugging Face, anything else a built-in shape such
    as `llama3-8b`. `task` is what a configuration is trained for, where its `architectures` do not say it.
    """
    return named_step_at(text, batch=batch, seq=seq, task=task).step


def named_step_at(text: str, *, batch: int | None = None, seq: int | None = None, task: str | None = None) -> NamedStep:
    """Return the step that a text names, with what it is and what was chosen for want of an option."""
    return named_steps_at(text, task=task)(batch=batch, seq=seq)


def named_steps_at(text: str, *, task: str | None = None) -> NamedSteps:
    """Return a function that makes the named step for any batch and length; what it names is loaded once."""
    if not isinstance(text, str) or not text.strip():
        raise WrongRequest(
            f"a step is named by a text, not {text!r}; {HOW}, or the name of a shape such as 'llama3-8b'"
        )
    if text.startswith(PREFIX):
        return Configured.at(text, task=task).step
    if task is not None:
        raise WrongRequest(
            f"task={task!r} (--task) is for configurations of transformers (hf:...), and {text!r} is none"
        )
    if ":" in text or text.endswith(".py") or os.sep in text:
        return partial(_located_step, StepLocation.at(text))
    return partial(shape_step, load_shape(text))


def _located_step(location: StepLocation, *, batch: int | None = None, seq: int | None = None) -> NamedStep:
    return NamedStep(step=location.step(batch=batch, seq=seq), title=location.text)


# -- functions of the user: path/to/file.py:function or package.module:function --------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLocation:
    """What a text such as `train.py:step` names, loaded: a function that returns a step, or a step."""

    text: str
    found: Any

    @classmethod
    def at(cls, text: str) -> StepLocation:
        """Run the file, or import the module, and find what the text names in it."""
        where, colon, name = text.rpartition(":")
        if not colon or not where or not name:
            hub = "/" in text and not text.endswith(".py") and names_repository(text)
            model = f"; for a model in the cache of Hugging Face write hf:{text}" if hub else ""
            raise WrongRequest(f"{text!r} names no function; {HOW}{model}")
        with _users(where):
            module = _file(Path(where), text) if where.endswith(".py") or os.sep in where else _module(where, text)
        found = getattr(module, name, None)
        if found is None:
            near = map(repr, close_names(name, vars(module)))
            raise WrongRequest(f"there is no {name!r} in {where}; {did_you_mean(near, HOW)}")
        return cls(text=text, found=found)

    def step(self, *, batch: int | None = None, seq: int | None = None) -> Step:
        """Return the step that the function returns; `batch` and `seq` are passed to it where it takes them."""
        found, place = self.found, self.text
        given = {key: value for key, value in (("batch", batch), ("seq", seq)) if value is not None}
        if callable(found) and not isinstance(found, Step):
            step = _called(found, place, given)
        elif not isinstance(found, Step):
            raise InputError(f"{place} is neither a function nor a memfit.Step but of the type {_type(found)}; {HOW}")
        elif given:
            raise NotTaken(f"{_options(given)} cannot be passed to {place}, which is no function", "leave it out")
        else:
            step = found
        if not isinstance(step, Step):
            raise InputError(f"{place} returned no memfit.Step but something of the type {_type(step)}; {HOW}")
        return step


def _type(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _called(function: Callable[..., Any], place: str, given: dict[str, int]) -> Any:
    """Return what the function returns for these arguments; those that it cannot take or lacks are named."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return _run(function, place, given)
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, each in parameters.items() if each.kind in by_name}
    refused = {name: value for name, value in given.items() if name not in named and not anything}
    if refused:
        first = next(iter(refused))
        raise NotTaken(
            f"{_options(refused)} cannot be passed to {place}, which takes no argument of that name",
            "leave it out",
            f"let the function take it: def {place.rpartition(':')[2]}({first}={given[first]})",
        )
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    lacking = [
        name
        for name, each in parameters.items()
        if name not in given and each.default is inspect.Parameter.empty and each.kind not in optional
    ]
    if lacking:
        ours = [f"--{name}" for name in lacking if name in ("batch", "seq")]
        how = f"give {' and '.join(ours)}" if len(ours) == len(lacking) else "give its arguments defaults"
        raise WrongRequest(f"{place} needs {', '.join(lacking)}; {how}")
    return _run(function, place, given)


def _run(function: Callable[..., Any], place: str, given: dict[str, int]) -> Any:
    with _users(place):
        return function(**given)


@contextmanager
def _users(place: str) -> Iterator[None]:
    """Raise what the user's code raises in the block as `StepRaised`, with their lines and none of memfit's."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
        raise StepRaised(place, error, theirs) from error


def _options(given: dict[str, int]) -> str:
    return " and ".join(f"{name}={value} (--{name})" for name, value in given.items())


def _file(path: Path, place: str) -> ModuleType:
    if not path.is_file():
        raise WrongRequest(f"there is no file {path}, which {place!r} names")
    _search_first(str(path.resolve().parent))  # as when the file is run as a script
    name = _name_for(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WrongRequest(f"{path} cannot be imported; {HOW}")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look classes up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _name_for(path: Path) -> str:
    """Return a file's name as a module: its own, so that the files beside it find it, unless that is taken."""
    name = path.stem
    if name.isidentifier() and name not in sys.modules and name not in sys.stdlib_module_names:
        return name
    words = re.sub(r"\W", "_", name)
    return f"memfit_step_{words}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"


def _module(name: str, place: str) -> ModuleType:
    _search_first(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise WrongRequest(f"there is no module {error.name!r}, which {place!r} names; {HOW}") from error


def _search_first(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
