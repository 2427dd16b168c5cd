"""A built-in decoder on meshes of several shapes: what each process trains and writes down."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from memfit import Step
from memfit.presets import ParallelModel
from memfit.presets.models.llama import LlamaSizes
from memfit.presets.shapes import language_step
from tests.distributed.fsdp2_ranks import _levels, _resident_bytes
from tests.distributed.measured_steps import WARMUP, profiled, steps_of

SIZES = LlamaSizes(
    layers=2,
    hidden=64,
    heads=4,
    key_value_heads=2,
    head=16,
    feed_forward=96,
    vocabulary=256,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    query_key_norm=True,
)
LENGTH, GLOBAL_BATCH = 32, 8
SHAPES = ({"dp": 4, "tp": 1}, {"dp": 2, "tp": 2})


def step_of(batch: int, *, tied: bool = False) -> Step:
    """The step of a batch in float32."""
    tokens = torch.arange(batch * LENGTH).view(batch, LENGTH) * 7 % SIZES.vocabulary
    given = {"tokens": tokens, "labels": tokens.roll(-1, 1).clone()}
    step = language_step(replace(SIZES, tied=tied), LENGTH, given)
    assert isinstance(step.model, ParallelModel)
    return replace(step, model=replace(step.model, compute=None), autocast=None, optimizer=_adamw)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def _built(step: Step, shape: dict[str, int] | None) -> Any:
    torch.manual_seed(0)
    assert isinstance(step.model, ParallelModel)
    if shape is None:
        return step.model()
    return step.model(init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)))


def measured() -> list[dict[str, Any]]:
    """Train every shape over Gloo, and return how high its steps are and what stays between them."""
    trained = []
    for shape in SHAPES:
        step = step_of(GLOBAL_BATCH // shape["dp"])
        model = _built(step, shape)
        optimizer = step.build_optimizer(model)
        for _ in range(WARMUP):
            step.execute(model, optimizer, "cpu")
        trained.append((step, model, optimizer))
    runs = {
        str(number): functools.partial(step.execute, model, optimizer, "cpu")
        for number, (step, model, optimizer) in enumerate(trained)
    }
    found: list[dict[str, Any]] = [{"steps": []} for _ in trained]
    for number, events in steps_of(profiled(runs)):
        found[int(number)]["steps"].append(_levels(events))
    for each, (step, model, optimizer) in zip(found, trained, strict=True):
        beside = sum(tensor.nbytes for tensor in (*step.batch.values(), *model.buffers()))
        each["resident_bytes"] = _resident_bytes(model, optimizer) + beside
    return found


def compared(*, tied: bool) -> None:
    """Loss and gradients on every mesh are those of the plain model on the same tokens."""
    step = step_of(2, tied=tied)
    plain = _built(step, None)
    loss = plain(**step.batch)
    loss.backward()
    for shape in SHAPES:
        model = _built(step, shape)
        own = model(**step.batch)
        own.backward()
        torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=1e-6)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(
                parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6
            )


def pipelined() -> None:
    """A step of a pipeline, with tensor parallel stages, changes parameters as that of the plain model does."""
    step = replace(step_of(4), optimizer=_sgd, clip_grad_norm=None)
    plain = _built(step, None)
    optimizer = step.build_optimizer(plain)
    step.execute(plain, optimizer, "cpu")
    sizes = {"pp": 2, "dp": 1, "tp": 2}
    assert isinstance(step.model, ParallelModel)
    step = step.model.step_on_mesh(step, sizes)
    stage = _built(step, sizes)
    optimizer = step.build_optimizer(stage)
    step.execute(stage, optimizer, "cpu")
    first = 0 if stage.first else SIZES.layers // 2
    for name, parameter in stage.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) + first)
        expected = plain.get_parameter(".".join(parts))
        torch.testing.assert_close(parameter.detach().full_tensor(), expected.detach(), rtol=1e-4, atol=1e-5)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, foreach=False)
