"""A plan changes nothing of a model that can be seen, costs nothing outside training, and goes without a trace."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import Step
from memfit.engines import attachment, recompute, tape
from memfit.errors import StateError
from memfit.plans import Plan, PlanMismatch
from memfit.solve import SolveOptions
from tests.engines.engine_cases import both, plan_for, run_steps, same
from tests.engines.test_exact import Block, Blocks, case, squares

VECTORS = torch.randn(6, 16)


@pytest.fixture
def step() -> Step:
    return Step(Blocks(), VECTORS, loss=squares)


@pytest.fixture
def plan(step: Step) -> Plan:
    made = plan_for(step, options=SolveOptions(force=("blocks.0", "blocks.1")))
    assert made.checkpoint
    return made


def looks(model: nn.Module) -> Any:
    """All of a model that code can look at, but for the entries of planned modules (Note [Attachment])."""
    return (
        [
            (name, type(module), {key: each for key, each in vars(module).items() if not ours(each)})
            for name, module in model.named_modules()
        ],
        [inspect.signature(module.forward) for module in model.modules() if type(module) is not nn.ModuleList],
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        repr(model),
        [
            (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for module in model.modules()
        ],
    )


def ours(entry: Any) -> bool:
    return type(entry).__module__ == attachment.__name__


def test_a_planned_model_looks_as_before(step: Step, plan: Plan) -> None:
    model = Blocks()
    before = looks(model)
    plan.apply(model, step.build_optimizer(model))
    assert looks(model) == before
    assert isinstance(model.blocks[0], Block) and type(model.blocks[0]) is Block
    run_steps(step, model, step.build_optimizer(model), 1)
    assert [name for name, *_ in looks(model)[0]] == [name for name, *_ in before[0]]
    plan.remove(model)
    assert not any(ours(entry) for module in model.modules() for entry in vars(module).values())


def test_copies_and_pickles_are_plain_models(step: Step, plan: Plan) -> None:
    model = Blocks()
    plan.apply(model)
    run_steps(step, model, None, 1)
    assert attachment.attached(model.blocks[0]) is not None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch_saved(model)):
        assert attachment.attached(other.blocks[0]) is None
        assert not any(ours(entry) or key == "forward" for each in other.modules() for key, entry in vars(each).items())
        other.zero_grad()
        model.zero_grad()
        assert same(run_steps(step, model, None, 1), run_steps(step, other, None, 1))


def torch_saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_shallow_copy_or_a_replica_of_a_unit_runs_its_own_parts(plan: Plan) -> None:
    """Both copy the dictionary, and with it would have run the original's forward."""
    model = Blocks()
    plan.apply(model)
    for other in (copy.copy(model.blocks[0]), model.blocks[0]._replicate_for_data_parallel()):
        assert not any(map(ours, vars(other).values()))
        other._modules = dict.fromkeys(other._modules, nn.Identity())
        x = torch.ones(2, 16)
        assert torch.equal(other(x), Block.forward(other, x))
    assert attachment.attached(model.blocks[0]) is not None and ours(vars(model.blocks[0])["forward"])


def test_a_class_with_its_own_ways_to_be_copied_keeps_them(plan: Plan) -> None:
    class Marked(Block):
        def __deepcopy__(self, memo: Any) -> Any:
            made = Block()
            made.__dict__ = copy.deepcopy(self.__dict__, memo)
            made.marked = True  # type: ignore[assignment]
            return made

        def __reduce__(self) -> Any:
            return Block, (), {**self.__dict__, "marked": True}

    Marked.__name__ = "Block"
    model = Blocks()
    model.blocks[0] = Marked()
    plan.apply(model)
    for other in (copy.deepcopy(model.blocks[0]), pickle.loads(pickle.dumps(model.blocks[0]))):
        assert other.marked and not any(map(ours, vars(other).values()))


def test_classes_are_never_touched(step: Step, plan: Plan) -> None:
    before = {kind: dict(vars(kind)) for kind in (Block, Blocks, nn.Linear, nn.Module)}
    model, other = Blocks(), Blocks()
    plan.apply(model)
    assert {kind: dict(vars(kind)) for kind in before} == before
    run_steps(step, model, None, 1)
    assert not any(ours(entry) for module in other.modules() for entry in vars(module).values())
    plan.remove(model)
    assert {kind: dict(vars(kind)) for kind in before} == before
    with pytest.raises(StateError, match="no plan"):
        plan.remove(model)


def test_a_forward_of_an_instance_comes_back(step: Step, plan: Plan) -> None:
    model = Blocks()
    own = model.blocks[0].forward
    model.blocks[0].forward = own
    plan.apply(model)
    run_steps(step, model, None, 2)
    assert model.blocks[0].__dict__["forward"] is not own
    plan.remove(model)
    assert model.blocks[0].__dict__["forward"] is own


def test_a_model_that_is_gone_is_not_held(step: Step, plan: Plan) -> None:
    model = Blocks()
    plan.apply(model, step.build_optimizer(model))
    run_steps(step, model, None, 1)
    model.zero_grad()
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert gone() is None, "freed at once, as it is without a plan"
    finally:
        gc.enable()


def test_nothing_is_done_without_training(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Neither hooks nor modes are there: what would put them there is made to fail."""
    model = Blocks()
    plan.apply(model)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the engine was asked")

    monkeypatch.setattr(recompute.RecomputedCall, "__init__", fail)
    monkeypatch.setattr(tape.Tape, "__init__", fail)
    with torch.no_grad():
        model(VECTORS)
    model.eval()
    model(VECTORS).sum().backward()
    model.train()
    with pytest.raises(AssertionError, match="engine was asked"):
        model(VECTORS)


def test_user_hooks_run_once(step: Step, plan: Plan) -> None:
    model = Blocks()
    calls: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    plan.apply(model)
    run_steps(step, model, None, 1)
    assert calls == ["before", "after", "backward"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.blocks.append(Block()), "3 in the plan"),
        (lambda model: setattr(model, "head", nn.Linear(16, 9)), "head.weight"),
        (lambda model: model.double(), "float64"),
        (lambda model: model.head.requires_grad_(False), "frozen"),
        (lambda model: setattr(model.blocks, "0", type("Other", (Block,), {})()), "a Other here and a Block"),
        (lambda model: model.to("meta"), "meta"),
    ],
)
def test_a_plan_for_another_model_is_refused_and_nothing_changes(plan: Plan, change: Any, message: str) -> None:
    model = Blocks()
    change(model)
    before = looks(model)
    with pytest.raises(PlanMismatch, match=message):
        plan.apply(model)
    assert looks(model) == before and not any(ours(entry) for each in model.modules() for entry in vars(each).values())


def test_what_cannot_be_applied_is_refused(step: Step, plan: Plan) -> None:
    model = Blocks()
    hopeless = memfit.plan(step, target="cpu", budget="1000B", progress=False)
    with pytest.raises(memfit.InputError, match=r"infeasible.*budget of"):
        hopeless.apply(model)
    sharded = memfit.plan(step, target="cpu", ranks=2, progress=False)
    with pytest.raises(memfit.MemfitError, match="2 ranks"):
        sharded.apply(model)
    with pytest.raises(memfit.InputError, match=r"nn\.Module"):
        plan.apply("model")  # type: ignore[arg-type]
    with pytest.raises(memfit.InputError, match="Optimizer"):
        plan.apply(model, "adam")  # type: ignore[arg-type]
    plan.apply(model)
    with pytest.raises(StateError, match="already runs a plan"):
        plan.apply(model)


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    from memfit.engines import local

    model = Blocks()
    before = looks(model)
    attach, count = local.attach, 0

    def fail_second(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("in the middle")
        attach(*args)

    monkeypatch.setattr(local, "attach", fail_second)
    with pytest.raises(RuntimeError, match="in the middle"):
        plan.apply(model)
    assert looks(model) == before and not any(ours(entry) for each in model.modules() for entry in vars(each).values())
    assert all(attachment.attached(module) is None for module in model.modules())
    monkeypatch.undo()
    plan.apply(model)


def test_a_model_compiled_afterwards_trains_under_its_plan(step: Step, plan: Plan) -> None:
    plain, planned, model, _ = both(Blocks, step, plan)
    assert same(plain, planned)
    plan.remove(model)
    torch.manual_seed(0)
    model = Blocks()
    plan.apply(model)
    compiled = torch.compile(model, backend="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    squares(compiled(VECTORS), None).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plan.remove(model)
    squares(model(VECTORS), None).backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(found, model.parameters(), strict=True))


def test_the_whole_graph_of_a_planned_model_is_refused_by_the_compiler_with_what_to_do(plan: Plan) -> None:
    torch._dynamo.reset()  # code that was compiled and given up before is not looked at again
    model = Blocks()
    plan.apply(model)
    with pytest.raises(Exception, match=r"plan\.remove"):
        torch.compile(model, backend="eager", fullgraph=True)(VECTORS)


def test_a_compiled_model_is_refused_with_what_to_do(plan: Plan) -> None:
    with pytest.raises(memfit.InputError, match=r"apply the plan to the module inside, model\._orig_mod"):
        plan.apply(torch.compile(Blocks(), backend="eager"))


def test_a_loss_of_ones_own_runs_again_inside_and_outside_of_the_model() -> None:
    build, made = case("shared and tied")
    plan = plan_for(made, 1.0, SolveOptions(force=("<loss>",)))
    assert [entry.unit for entry in plan.checkpoint] == ["<loss>"] and plan.checkpoint[0].after is None
    plain, planned, _, _ = both(build, made, plan)
    assert same(plain, planned)
    assert torch.autograd.backward.__module__ == "torch.autograd"
