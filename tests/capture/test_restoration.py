"""A capture leaves the model, the optimizer, the batch and the process as it found them."""

from __future__ import annotations

import contextlib
import copy
import queue

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import CaptureError, Step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.constant = torch.arange(8.0)
        self.calls = 0
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.constant.add_(1.0)
        y, _ = self.lstm(self.norm(x).unsqueeze(1) + self.constant)
        return nn.functional.dropout(self.head(y), 0.5).sum()


def snapshot(model: nn.Module) -> dict[str, object]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "identity": {
            name: (id(t), t.data_ptr(), t._version, t.requires_grad, t.grad is None) for name, t in tensors.items()
        },
        "flat weights": [id(weight) for weight in model.lstm._flat_weights],
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
    }


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_model_batch_and_randomness_are_untouched(target: str) -> None:
    model = Model()
    batch = torch.randn(4, 8)
    before, values, inputs = snapshot(model), copy.deepcopy(model.state_dict()), batch.clone()
    constant = model.constant.clone()
    random_state = torch.get_rng_state()
    memfit.trace(Step(model, batch), target=target)
    assert snapshot(model) == before
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model.constant, constant), "a plain attribute that the forward writes to"
    assert torch.equal(batch, inputs)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_optimizer_and_gradients_are_untouched() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    gradient = model.weight.grad
    kept = gradient.clone()
    memfit.trace(Step(model, torch.randn(2, 4), loss=lambda o, _: o.sum(), optimizer=optimizer), target="cpu")
    assert model.weight.grad is gradient and torch.equal(gradient, kept)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for number, entries in state["state"].items():
        assert all(torch.equal(value, after["state"][number][name]) for name, value in entries.items())
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)] == [
        True,
        True,
    ]


def test_a_step_after_a_capture_equals_one_without() -> None:
    def train(with_capture: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = Step(model, torch.randn(3, 4), loss=lambda o, _: o.sum(), optimizer=optimizer)
        step.execute(model, optimizer, "cpu")
        if with_capture:
            memfit.trace(step, target="cpu")
        step.execute(model, optimizer, "cpu")
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_a_failed_capture_restores_everything() -> None:
    class Fails(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("the user's own error")

    model = Fails()
    before = snapshot(model)
    call, backward = nn.Module.__call__, torch.autograd.backward
    with pytest.raises(CaptureError, match=r"KeyError: .*the user's own error"):
        memfit.trace(Step(model, torch.randn(4, 8)), target="cpu")
    assert snapshot(model) == before
    assert nn.Module.__call__ is call and torch.autograd.backward is backward
    assert torch.nn.functional.has_torch_function is torch.overrides.has_torch_function


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.BatchNorm1d(16), nn.Linear(16, 8))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.plain, self.parts = nn.Linear(8, 8), nn.ModuleList([inner])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(x)
        for part in self.parts:
            x = x + part(x)
        return x.sum()


SCRIPTED = {
    "scripted": lambda: torch.jit.script(perceptron()),
    "traced": lambda: torch.jit.trace(perceptron().eval(), torch.randn(4, 8)).train(),
}


@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_modules_are_refused_by_name_and_keep_their_weights(kind: str) -> None:
    model = Wrapper(SCRIPTED[kind]())
    values, devices = copy.deepcopy(model.state_dict()), {p.device.type for p in model.parameters()}
    with pytest.raises(memfit.InputError, match=r"module 'parts.0' \(a Sequential\).*before torch.jit"):
        memfit.trace(Step(model, torch.randn(4, 8)), target="cpu")
    assert {p.device.type for p in model.parameters()} == devices == {"cpu"}
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    model(torch.randn(4, 8)).backward()


def test_a_scripted_module_without_tensors_is_captured_as_it_is_written() -> None:
    plain, scripted = Wrapper(nn.GELU()), Wrapper(torch.jit.script(nn.GELU()))
    plain_ops, ops = (
        [op.name for op in memfit.trace(Step(model, torch.randn(4, 8)), target="cpu").ops]
        for model in (plain, scripted)
    )
    assert ops == plain_ops


@pytest.mark.parametrize("fails", [False, True])
def test_tables_of_parameters_that_are_no_plain_dicts_are_put_back(fails: bool) -> None:
    class Table(dict):
        """As libraries that watch parameters put it in the place of a module's own."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("the user's own error")

    model = Wrapper(Fails() if fails else perceptron())
    for module in model.modules():
        module._parameters, module._buffers = Table(module._parameters), Table(module._buffers)
    before = [*model.parameters(), *model.buffers()]
    with pytest.raises(CaptureError, match="own error") if fails else contextlib.nullcontext():
        memfit.trace(Step(model, torch.randn(4, 8)), target="cpu")
    after = [*model.parameters(), *model.buffers()]
    assert [id(tensor) for tensor in after] == [id(tensor) for tensor in before]


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
def test_a_generator_of_the_steps_own_is_untouched(target: str) -> None:
    generator = torch.Generator().manual_seed(3)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * torch.rand(8, generator=generator)).sum()

    state = generator.get_state()
    memfit.trace(Step(Noisy(), torch.randn(4, 8)), target=target)
    assert torch.equal(generator.get_state(), state)


def test_a_loss_module_of_a_training_function_keeps_no_stand_in() -> None:
    class Remembers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x.detach()
            return x.square().mean()

    model, criterion = nn.Linear(8, 8), Remembers()
    memfit.trace(lambda: criterion(model(torch.ones(2, 8))).backward(), target="cpu")
    assert not hasattr(criterion, "last")


def test_hooks_of_the_user_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()  # a list would be put back as it was
    model[0].register_forward_hook(lambda *_: seen.put("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.put("backward"))
    model[1].weight.register_hook(lambda grad: seen.put("gradient"))
    memfit.trace(Step(model, torch.randn(2, 4), loss=lambda o, _: o.sum()), target="cpu")
    assert sorted(seen.get() for _ in range(seen.qsize())) == ["backward", "forward", "gradient"]
