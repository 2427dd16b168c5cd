"""Makes small training steps of timm's and torchvision's classifiers, of each family the one with least parameters.

torchvision's wheels have kernels that a CPU build of torch cannot load. Its models do not need them; its import does
ask for the names of two of them.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memfit import Step

BATCH, CLASSES = 2, 10
_SIDES = (64, 96, 128, 224)
_TRIED = 8
"""So many variants of a family are looked at."""


def classifier(model: nn.Module, side: int) -> Step:
    """Return the step of an image classifier."""
    return Step(model.train(), (torch.randn(BATCH, 3, side, side),), loss=_cross_entropy)


def _cross_entropy(output: Any, batch: Any) -> torch.Tensor:
    logits = output.logits if hasattr(output, "logits") else output["out"] if isinstance(output, dict) else output
    first = logits[0] if isinstance(logits, tuple | list) else logits
    return first.float().flatten(1).logsumexp(1).mean()


def _parameters(build: functools.partial[nn.Module]) -> int:
    """Return how many parameters a model has, which costs no memory to know."""
    with torch.device("meta"):
        return sum(each.numel() for each in build().parameters())


def _smallest(builds: list[functools.partial[nn.Module]]) -> functools.partial[nn.Module]:
    counted = []
    for build in builds:
        try:
            counted.append((_parameters(build), len(counted), build))
        except Exception:  # a variant that cannot be built on meta is passed over
            continue
    if not counted:
        raise RuntimeError("no variant of this family can be built on meta")
    return min(counted)[2]


def _step_at_some_size(build: functools.partial[nn.Module], size_name: str) -> Step:
    """Return the step with the smallest images that the model takes."""
    failure: Exception | None = None
    for side in _SIDES:
        try:
            sized = functools.partial(build, **{size_name: side}) if size_name else build
            model = _built(sized) or build()
            step = classifier(model, side)
            with torch.no_grad():
                model(*step.batch)
            return step
        except Exception as error:
            failure = error
    raise RuntimeError(f"takes none of the sizes {_SIDES}: {failure}")


def _built(build: functools.partial[nn.Module]) -> nn.Module | None:
    """Return the model; None if it does not know an argument."""
    try:
        return build()
    except TypeError:
        return None


# -- timm -------------------------------------------------------------------------------------------------------------


def timm_families() -> list[str]:
    """Return the modules of timm that have models."""
    timm = load_timm()
    return [name for name in timm.list_modules() if timm.list_models(module=name)]


def build_timm(family: str) -> Step:
    """Return the step of the smallest model of a family."""
    timm = load_timm()
    names = sorted(timm.list_models(module=family), key=lambda name: (_weight(name), name))
    builds = [functools.partial(timm.create_model, name, num_classes=CLASSES) for name in names[:_TRIED]]
    return _step_at_some_size(_smallest(builds), "img_size")


def _weight(name: str) -> int:
    small = ("test", "atto", "femto", "pico", "nano", "xxs", "xxt", "micro", "tiny", "_ti", "xs", "small", "_s", "b0")
    return next((rank for rank, part in enumerate(small) if part in name), len(small))


def load_timm() -> ModuleType:
    """Return timm, which imports torchvision."""
    load_torchvision()
    import timm

    return timm


# -- torchvision ------------------------------------------------------------------------------------------------------


@functools.cache
def load_torchvision() -> ModuleType:
    """Return torchvision. A CPU build of torch cannot load its kernels; the names that its import asks for are made."""
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        load_torchvision.keep = library  # type: ignore[attr-defined] # or the names go with it
        import torchvision
    return torchvision


def torchvision_families() -> list[str]:
    """Return the modules of torchvision that have classifiers or segmentation models."""
    return sorted(_by_module())


def _by_module() -> dict[str, list[str]]:
    models = load_torchvision().models
    found: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        found.setdefault(inspect.getmodule(models.get_model_builder(name)).__name__.rpartition(".")[2], []).append(name)
    return found


def build_torchvision(family: str) -> Step:
    """Return the step of the smallest model of a family."""
    models = load_torchvision().models
    builds = [functools.partial(models.get_model, name, num_classes=CLASSES) for name in _by_module()[family]]
    return _step_at_some_size(_smallest(builds), "image_size")
