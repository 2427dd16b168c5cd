from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.errors import InputError
from memfit.sharded.options import Precision, UnitOptions
from memfit.sharded.wrap_policy import Units, default_units, find_units, join_small_units


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)


def owners(model: nn.Module, units: Units | None = None, **options: object) -> dict[str, list[str]]:
    found = find_units(model, units, default=UnitOptions(), ignored=options.get("ignored", ()))  # type: ignore[arg-type]
    return {unit.name: [name for member in unit.members for name in member.names] for unit in found}


def test_repeated_blocks_are_units_and_the_root_has_the_rest() -> None:
    assert default_units(Model()) == ("blocks.0", "blocks.1", "blocks.2")
    assert owners(Model()) == {
        "": ["embedding.weight", "head.weight"],
        **{f"blocks.{number}": [f"blocks.{number}.0.weight", f"blocks.{number}.0.bias"] for number in range(3)},
    }


@pytest.mark.parametrize(
    "units",
    [
        ["blocks.0", "blocks.1", "blocks.2"],
        nn.Sequential,
        [nn.Sequential],
        lambda path, module: isinstance(module, nn.Sequential),
        dict.fromkeys(["blocks.2", "blocks.1", "blocks.0"], UnitOptions()),
    ],
)
def test_units_may_be_named_in_several_ways_and_are_in_the_models_order(units: Units) -> None:
    assert list(owners(Model(), units)) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_a_parameter_belongs_to_the_innermost_unit() -> None:
    found = owners(Model(), ["blocks.0", "blocks.0.0", "head"])
    assert found["blocks.0.0"] == ["blocks.0.0.weight", "blocks.0.0.bias"]
    assert "blocks.0" not in found  # nothing is left for it
    assert found["head"] == ["head.weight"]


def test_a_parameter_tied_across_units_belongs_to_what_is_around_both() -> None:
    model = Model()
    model.blocks[2][0].weight = model.blocks[0][0].weight
    assert owners(model)[""] == ["embedding.weight", "blocks.0.0.weight", "blocks.2.0.weight", "head.weight"]


def test_a_parameter_tied_inside_of_a_unit_stays_in_it() -> None:
    model = Model()
    model.blocks[0].append(nn.Linear(4, 4))
    model.blocks[0][2].weight = model.blocks[0][0].weight
    assert owners(model, ["blocks.0"])["blocks.0"] == [
        "blocks.0.0.weight",
        "blocks.0.2.weight",
        "blocks.0.0.bias",
        "blocks.0.2.bias",
    ]


@pytest.mark.parametrize("name", ["blocks.0", "blocks.3"])
def test_a_module_with_two_paths_is_one_unit(name: str) -> None:
    model = Model()
    model.blocks.append(model.blocks[0])
    found = owners(model, [name])
    assert list(found) == ["", "blocks.0"]
    assert found["blocks.0"] == ["blocks.0.0.weight", "blocks.3.0.weight", "blocks.0.0.bias", "blocks.3.0.bias"]


@pytest.mark.parametrize("units", [[["blocks.2", "blocks.0"], "head"], {("blocks.2", "blocks.0"): UnitOptions()}])
def test_a_list_of_modules_is_one_unit_with_what_they_share(units: Units) -> None:
    model = Model()
    model.blocks[2][0].weight = model.blocks[0][0].weight
    found = owners(model, units)
    assert found["blocks.0"] == ["blocks.0.0.weight", "blocks.2.0.weight", "blocks.0.0.bias", "blocks.2.0.bias"]
    assert "blocks.1.0.weight" in found[""] and "blocks.2" not in found


def test_tiny_neighbours_with_the_same_options_are_joined_up_to_the_cap() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(64)))
    layer_bytes = 20 * 4

    def joined(cap_bytes: int, options: dict[str, UnitOptions] | None = None, low: int | None = None) -> list[int]:
        found = find_units(model, options, default=UnitOptions(), ignored=())
        precisions = [Precision(param_dtype=torch.bfloat16 if each.name == str(low) else None) for each in found]
        return [len(each.modules) for each in join_small_units(found, precisions, cap_bytes)[0][1:]]

    assert joined(1 << 20) == [4] * 16  # no more than one part in 16 of all
    assert joined(2 * layer_bytes) == [2] * 32
    assert joined(layer_bytes) == joined(0) == [1] * 64
    options = {str(number): UnitOptions(keep=number == 1) for number in range(64)}
    assert joined(1 << 20, options) == [1, 1, *[4] * 15, 2]
    assert joined(1 << 20, low=1)[:2] == [1, 1]  # one gather has one dtype


def test_ignored_parameters_belong_to_no_unit() -> None:
    model = Model()
    found = owners(model, ignored=("head.weight", model.blocks[0][0].bias))
    assert found[""] == ["embedding.weight"] and found["blocks.0"] == ["blocks.0.0.weight"]


@pytest.mark.parametrize(
    ("units", "said"),
    [
        ("blocks.0", r"give a list of module paths, \['blocks\.0'\]"),
        (["block"], "unit 'block' is no module of this model; it has 'embedding'"),
        (["blocks"], "unit 'blocks' is a ModuleList, which has no forward; give the modules in it"),
        ([nn.Conv2d], "units names a Conv2d, and the model has none"),
        ({"blocks.0": True}, "units gives 'blocks.0' no UnitOptions but True"),
        ([["blocks.0", "blocks.1"], "blocks.1"], r"module 'blocks.1' is in two units, \['blocks.0', 'blocks.1'\]"),
        ([["blocks.0", "blocks.0.0"]], "has a module inside of another, 'blocks.0.0'"),
        ([["", "head"]], "has a module inside of another, 'the model itself'"),
        ([[]], "units has an empty list"),
        ([[3]], "units has a int; give module paths, modules or classes"),
        (3, "units is a int; give module paths, modules, a class of modules, or a function"),
    ],
)
def test_wrong_units_are_refused_with_what_to_give(units: Units, said: str) -> None:
    with pytest.raises(InputError, match=said):
        owners(Model(), units)


def test_ignored_parameters_must_be_the_models() -> None:
    with pytest.raises(InputError, match="ignored names 'tail', which is no parameter and no module of this model"):
        owners(Model(), ignored=("tail",))
    with pytest.raises(InputError, match="ignored has a parameter that is not the model's"):
        owners(Model(), ignored=(Model().head.weight,))
