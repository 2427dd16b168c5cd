"""Which modules are units, and which unit each parameter belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memfit.errors import InputError
from memfit.paths import around, repeated_blocks, unwrapped
from memfit.sharded.flat_param import Member, ParameterSlot
from memfit.sharded.options import Precision, UnitOptions
from memfit.sharding import JoinableUnit, join_neighbours
from memfit.torch_private.modules import parameter_table
from memfit.torch_private.wrappers import INNER_NAMES, name_in_state

UnitModule = str | nn.Module | type[nn.Module]
Units = (
    Mapping[str, UnitOptions]
    | Mapping[tuple[str, ...], UnitOptions]
    | Sequence[UnitModule | Sequence[UnitModule]]
    | Callable[[str, nn.Module], bool]
    | type[nn.Module]
)
"""Which modules are units: paths, modules, classes, a function of path and module, or paths with options.

A list or tuple of modules among them is one unit.
"""
Ignored = str | nn.Parameter | nn.Module
"""What stays whole on every rank: a parameter or all those of a module, itself or by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundUnit:
    """A module, or several, that becomes a unit, and its parameters."""

    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    options: UnitOptions
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """The path of its first module, empty for the root."""
        return self.paths[0]


def find_units(
    model: nn.Module, units: Units | None, *, default: UnitOptions, ignored: Iterable[Ignored]
) -> list[FoundUnit]:
    """Find the units of a model, the root first; those without options of their own get the default.

    A parameter belongs to the innermost unit around all the places that hold it.
    """
    _check_forward("the model", model)
    named = _named(model, units)
    modules = dict(model.named_modules(remove_duplicate=False))
    paths: dict[str, tuple[str, ...]] = {"": ("",)}
    options = {"": UnitOptions(keep=True)}
    for together, each in named.items():
        first, *_ = ordered = tuple(path for path in modules if path in together)
        paths[first] = ordered
        options[first] = each if each is not None else default
    options = {path: options[path] for path in modules if path in options}
    unit_of = {modules[each]: path for path in options for each in paths[path]}
    members: dict[str, list[Member]] = {path: [] for path in options}
    for names, places, parameter in _parameters(model, _ignored(model, ignored)):
        inside = [[unit_of[modules[path]] for path in around(name) if modules[path] in unit_of] for name in names]
        owner = next(path for path in reversed(inside[0]) if all(path in each for each in inside))
        saved = tuple(name_in_state(name) for name in names)
        members[owner].append(Member(parameter=parameter, names=saved, places=places))
    return [
        FoundUnit(
            paths=paths[path],
            modules=tuple(modules[each] for each in paths[path]),
            options=options[path],
            members=tuple(members[path]),
        )
        for path in options
        if members[path] or not path
    ]


def join_small_units(
    found: Sequence[FoundUnit], precisions: Sequence[Precision], cap_bytes: int
) -> tuple[list[FoundUnit], list[Precision]]:
    """Join neighbouring small units of one precision, the root excepted and what a user has grouped."""
    joinable = [
        JoinableUnit(
            unit.name,
            _gathered_bytes(unit, precision.param_dtype),
            (unit.options if len(unit.modules) == 1 else unit.paths, precision),
        )
        for unit, precision in zip(found[1:], precisions[1:], strict=True)
    ]
    together = [[0], *([1 + number for number in numbers] for numbers in join_neighbours(joinable, cap_bytes))]
    return (
        [_joined([found[number] for number in numbers]) for numbers in together],
        [precisions[numbers[0]] for numbers in together],
    )


def _gathered_bytes(unit: FoundUnit, param_dtype: torch.dtype | None) -> int:
    return sum(
        parameter.numel() * (param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype).itemsize
        for parameter in (member.parameter for member in unit.members)
    )


def _joined(units: Sequence[FoundUnit]) -> FoundUnit:
    return FoundUnit(
        paths=tuple(path for unit in units for path in unit.paths),
        modules=tuple(module for unit in units for module in unit.modules),
        options=units[0].options,
        members=tuple(member for unit in units for member in unit.members),
    )


def default_units(model: nn.Module) -> tuple[str, ...]:
    """Return blocks that are alike and numbered, and have parameters; one in a wrapper is like the others."""
    kinds = {
        path: type(module).__name__
        for path, module in model.named_modules()
        if path and any(True for _ in module.parameters()) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    return repeated_blocks(unwrapped(kinds, INNER_NAMES))


def _named(model: nn.Module, units: Units | None) -> dict[tuple[str, ...], UnitOptions | None]:
    """Return the paths of each unit's modules, mostly one, and its options."""
    modules = dict(model.named_modules())
    if units is None:
        return dict.fromkeys((path,) for path in default_units(model))
    if isinstance(units, str):
        raise InputError(f"units is {units!r}; give a list of module paths, [{units!r}]")
    named: dict[tuple[str, ...], UnitOptions | None] = {}
    if isinstance(units, Mapping):
        for path, options in units.items():
            if not isinstance(options, UnitOptions):
                raise InputError(
                    f"units gives {path!r} no UnitOptions but {options!r}; write UnitOptions(keep=True), say"
                )
            named[(path,) if isinstance(path, str) else tuple(path)] = options
    elif isinstance(units, type):
        named = {(path,): None for path, module in modules.items() if isinstance(module, units)}
    elif isinstance(units, Sequence):
        for given in units:
            if isinstance(given, Sequence) and not isinstance(given, str | nn.Module):
                named[tuple(path for each in given for path in _paths(modules, each))] = None
            else:
                for path in _paths(modules, given):
                    named[path,] = None
    elif callable(units):
        named = {(path,): None for path, module in modules.items() if units(path, module)}
    else:
        raise InputError(
            f"units is a {type(units).__name__}; give module paths, modules, a class of modules, or a function"
        )
    paths = {module: path for path, module in modules.items()}
    shared = {path: paths[module] for path, module in model.named_modules(remove_duplicate=False)}
    named = {
        tuple(dict.fromkeys(shared.get(path, path) for path in together)): options
        for together, options in named.items()
    }
    for path in (path for together in named for path in together):
        if path not in modules:
            raise InputError(f"unit {path!r} is no module of this model; it has {_some(modules)}")
        _check_forward(f"unit {path!r}", modules[path])
    _check_groups(named)
    return named


def _check_groups(named: Iterable[tuple[str, ...]]) -> None:
    """Refuse groups that are empty, overlap, or have a module inside of another."""
    unit_of: dict[str, tuple[str, ...]] = {}
    for together in named:
        if not together:
            raise InputError("units has an empty list; give the modules that are to be gathered together")
        for path in together:
            if path in unit_of:
                raise InputError(
                    f"module {path!r} is in two units, {list(unit_of[path])} and {list(together)}; name it in one"
                )
            unit_of[path] = together
            if len(together) > 1 and (not path or any(each in together for each in around(path) if each)):
                raise InputError(
                    f"unit {list(together)} has a module inside of another, {path or 'the model itself'!r}; give "
                    "modules that are called one after another"
                )


def _check_forward(what: str, module: nn.Module) -> None:
    """Refuse a list of modules, which nobody calls; a subclass of one may have a forward."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise InputError(f"{what} is a {type(module).__name__}, which has no forward; give the modules in it")


def _paths(modules: Mapping[str, nn.Module], given: str | nn.Module | type[nn.Module]) -> list[str]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, nn.Module):
        found = [path for path, module in modules.items() if module is given]
    elif not isinstance(given, type):
        raise InputError(
            f"units has a {type(given).__name__}; give module paths, modules or classes of modules, each a unit of its "
            "own, or lists of modules that are one unit"
        )
    else:
        found = [path for path, module in modules.items() if isinstance(module, given)]
    if not found:
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise InputError(f"units names a {name}, and the model has none; give modules of the model, or their paths")
    return found


def _parameters(
    model: nn.Module, ignored: set[nn.Parameter]
) -> Iterable[tuple[tuple[str, ...], tuple[ParameterSlot, ...], nn.Parameter]]:
    """Yield every parameter once, with all its names and places."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    places: dict[nn.Parameter, list[ParameterSlot]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in parameter_table(module).items():
            if parameter is None or parameter in ignored:
                continue
            names[parameter].append(f"{path}.{attribute}" if path else attribute)
            place = ParameterSlot(module=module, attribute=attribute)
            if place not in places[parameter]:
                places[parameter].append(place)
    for parameter, found in names.items():
        yield tuple(found), tuple(places[parameter]), parameter


def _ignored(model: nn.Module, given: Iterable[Ignored]) -> set[nn.Parameter]:
    if isinstance(given, str | nn.Module):
        raise InputError(f"ignored is one {type(given).__name__}; give a list of them")
    named = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    found: set[nn.Parameter] = set()
    for each in given:
        if isinstance(each, str):
            if each not in named and each not in modules:
                raise InputError(
                    f"ignored names {each!r}, which is no parameter and no module of this model; it has {_some(named)}"
                )
            found.update([named[each]] if each in named else modules[each].parameters())
        elif isinstance(each, nn.Module):
            if all(each is not module for module in modules.values()):
                raise InputError(f"ignored has a {type(each).__name__} that is no part of the model; give its modules")
            found.update(each.parameters())
        elif any(each is parameter for parameter in named.values()):
            found.add(each)
        else:
            raise InputError("ignored has a parameter that is not the model's; give its own parameters, or their names")
    return found


def _some(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names if name]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
