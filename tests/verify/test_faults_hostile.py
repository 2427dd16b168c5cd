"""Plan files that are damaged, of another model or made to harm: refused, nothing changed, no code run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.engines import plan_of_model

Document = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def plan() -> memfit.Plan:
    step = memfit.Step(Stack, memfit.spec((256, 32)), loss=lambda output, _: output.square().mean())
    captured = memfit.trace(step, target="cpu")
    least = memfit.plan(captured, budget="1B", progress=False).minimum_budget_bytes
    found = memfit.plan(captured, budget=least, progress=False)
    assert found.checkpoint
    return found


def refused(path: Path, match: str | None = None) -> None:
    """Loading or applying fails, and the model is what it was."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [set(vars(module)) for module in model.modules()]
    forwards = [type(module).forward for module in model.modules()]
    with pytest.raises(memfit.MemfitError, match=match):
        memfit.load(path).apply(model, optimizer)
    assert plan_of_model(model) is None
    assert [set(vars(module)) for module in model.modules()] == names
    assert [type(module).forward for module in model.modules()] == forwards
    assert not optimizer._optimizer_step_post_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def change(name: str, value: Any) -> Callable[[Document], None]:
    def changed(document: Document) -> None:
        document["checkpoint"][0][name] = value

    return changed


def rename(name: str) -> Callable[[Document], None]:
    def changed(document: Document) -> None:
        document["checkpoint"][0].update(unit=name, module=name)

    return changed


HOSTILE: dict[str, Callable[[Document], None]] = {
    "a folder above": rename("../../etc/passwd"),
    "a dunder": rename("layers.0.__class__"),
    "a method": rename("layers.0.forward"),
    "a parameter": rename("layers.0.up.weight"),
    "an expression": rename("__import__('os').system('touch harmed')"),
    "a name of a megabyte": rename("layers." * 150_000),
    "another kind of module": change("kind", "Linear"),
    "a loss after no module": lambda document: document["checkpoint"][0].update(unit="<loss>", module="", after="../x"),
    "a number as a name": change("module", 7),
    "a huge end": change("end", 10**400),
    "a negative call": change("call", -1),
    "no calls": change("calls", 0),
    "ops that are a string": change("saved_ops", "all"),
    "a dict for a list": lambda document: document.update(checkpoint={"0": {}}),
    "a negative budget": lambda document: document.update(budget_bytes=-1),
    "a field too many": lambda document: document.update(__reduce__=["os.system", "touch harmed"]),
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_documents_are_refused_and_nothing_is_changed(
    plan: memfit.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Document], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = json.loads(plan.to_json())
    damage(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    refused(path)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"\xff\xfe{",
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"schema": 1, "fingerprint": "' + b"0" * 64 + b'", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"schema": ' + b"9" * 5000 + b', "fingerprint": ""}',
        pickle.dumps(Harm()),
    ],
    ids=["empty", "null", "not text", "deep lists", "deep dicts", "deep in a plan", "huge schema", "a pickle"],
)
def test_files_that_are_no_plans_are_refused_and_no_code_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    refused(path, match="give a file that Plan.save wrote")
    assert not (tmp_path / "harmed").exists()


def test_a_plan_cut_off_anywhere_is_refused(plan: memfit.Plan, tmp_path: Path) -> None:
    text = plan.to_json().rstrip()
    path = tmp_path / "plan.json"
    for end in range(0, len(text), max(1, len(text) // 40)):
        path.write_text(text[:end])
        with pytest.raises(memfit.InputError):
            memfit.load(path)


def test_a_plan_of_another_model_is_refused_with_what_differs(plan: memfit.Plan) -> None:
    model = Stack(width=48)
    with pytest.raises(memfit.InputError, match=r"layers\..*up\.weight.*float32\[192, 48\] here"):
        plan.apply(model)
    assert plan_of_model(model) is None


@pytest.mark.parametrize("everything", ["saved", "dropped"])
def test_a_plan_that_lies_about_what_to_keep_still_gives_the_same_gradients(plan: memfit.Plan, everything: str) -> None:
    document = json.loads(plan.to_json())
    for entry in document["checkpoint"]:
        both = sorted(entry["saved_ops"] + entry["recomputed_ops"])
        if everything == "saved":
            entry.update(saved_ops=both, recomputed_ops=[])
        else:
            places = [[op[0], place] for op in both for place in range(3)]
            entry.update(saved_ops=[], recomputed_ops=[op for op in both if op[0] <= entry["stop"]], dropped=places)
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(256, 32)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = gradients()
    lying = memfit.Plan.from_json(json.dumps(document))
    lying.apply(model)
    found = [gradients(), gradients()]
    lying.remove(model)
    assert all(torch.equal(one, other) for run in found for one, other in zip(plain, run, strict=True))
