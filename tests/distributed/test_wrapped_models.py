"""Models that are sharded or wrapped: refused before anything is touched, or captured with what the wrapper keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.capture import Category, Step
from memfit.errors import InputError, PlanDrift
from memfit.memory import Timeline
from memfit.solve import SolveOptions

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{meeting}")
    yield
    dist.destroy_process_group()


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def of_fully_shard() -> nn.Module:
    model = plain()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_one_sharded_layer() -> nn.Module:
    model = plain()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    return model


def of_first_fsdp(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(plain(), device_id=torch.device("cpu"), **options)


def tensor_parallel() -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(plain(), init_device_mesh("cpu", (1,)), plan)


def distributed() -> nn.Module:
    def distribute(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    from torch.distributed.tensor import DTensor

    return distribute_module(
        plain(),
        init_device_mesh("cpu", (1,)),
        distribute,
        input_fn=lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh),),
        output_fn=lambda module, output, mesh: output.full_tensor(),
    )


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fully_shard": (of_fully_shard, "the model is sharded by fully_shard"),
    "one layer": (with_one_sharded_layer, "module '0' is sharded by fully_shard"),
    "FSDP1": (of_first_fsdp, "sharded by FullyShardedDataParallel"),
    "FSDP1 original": (lambda: of_first_fsdp(use_orig_params=True), "sharded by FullyShardedDataParallel"),
    "tensor parallel": (tensor_parallel, "parameter '0.weight' is a DTensor"),
    "DTensor": (distributed, "parameter '0.weight' is a DTensor"),
}


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("name", REFUSED)
def test_sharded_models_are_refused_and_train_on(name: str, target: str) -> None:
    build, says = REFUSED[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 16)

    def train() -> float:
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first = train()
    parameters = list(model.parameters())
    step = Step(model, batch, loss=lambda output, _: output.square().sum(), optimizer=optimizer)
    with pytest.raises(InputError, match=says) as caught:
        memfit.trace(step, target=target)
    assert "from before it was sharded" in str(caught.value)
    with pytest.raises(InputError, match="sharded"):
        memfit.plan(step, target=target, progress=False)
    with pytest.raises(InputError, match="sharded"):
        memfit.trace(train, target=target)
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    assert train() < first


@pytest.mark.parametrize("build", [of_fully_shard, of_first_fsdp])
def test_a_sharded_model_beside_the_model_is_refused_and_works_on(build: Callable[[], nn.Module]) -> None:
    """A teacher that only the loss knows of: its hooks would gather parameters in the capture and lose them."""
    teacher, student, batch = build(), plain(), torch.randn(4, 16)
    expected = teacher(batch)
    step = Step(student, batch, loss=lambda output, x: (output - teacher(x).detach()).square().mean())
    with pytest.raises(InputError, match="that the step calls is sharded by"):
        memfit.trace(step, target="h100-sxm")
    assert torch.equal(teacher(batch), expected)


def test_a_distributed_batch_is_refused() -> None:
    batch = distribute_tensor(torch.randn(4, 16), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(InputError, match=r"batch\['x'\] is a DTensor"):
        memfit.trace(Step(plain(), {"x": batch}), target="cpu")


def gradient_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("target", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_the_buckets_of_data_parallelism_are_resident(options: dict[str, bool], target: str) -> None:
    model = DistributedDataParallel(plain(), **options)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, torch.randn(4, 16), loss=lambda output, _: output.square().sum(), optimizer=optimizer)
    step.execute(model, optimizer, "cpu")
    trace = memfit.trace(step, target=target)
    inner = plain()
    without = memfit.trace(Step(inner, torch.randn(4, 16), loss=lambda output, _: output.square().sum()), target=target)
    buckets = [storage for storage in trace.storages if storage.category is Category.COMMUNICATION]
    assert sum(storage.bytes for storage in buckets) == gradient_bytes(inner)
    assert Timeline.of(trace).peak_bytes == Timeline.of(without).peak_bytes + gradient_bytes(inner)
    assert any("buckets" in note for note in trace.notes)
    for _ in range(2):
        step.execute(model, optimizer, "cpu")


def test_a_plan_for_a_model_in_data_parallelism_names_its_modules_without_the_wrapper() -> None:
    model, batch = DistributedDataParallel(nn.Sequential(plain(), plain())), torch.randn(4, 16)
    step = Step(model, batch, loss=lambda output, _: output.sum())
    plan = memfit.plan(step, target="cpu", budget="1GiB", options=SolveOptions(force=("0",)), progress=False)
    assert [entry.module for entry in plan.checkpoint] == ["0"]
    with pytest.warns(UserWarning, match="checkpoint policies are carried out"):
        plan.apply(model)
    model(batch).sum().backward()
    plan.remove(model)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_what_wraps_a_planned_model_afterwards_is_told_once(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = nn.Sequential(plain(), plain()), torch.randn(4, 16)
    step = Step(model, batch, loss=lambda output, _: output.sum())
    plan = memfit.plan(step, target="cpu", budget="1GiB", options=SolveOptions(force=("0",)), progress=False)
    plan.apply(model)
    wrapped = wrap(model)
    with pytest.warns(PlanDrift, match=f"the model is in {wrap.__name__} since the plan was applied"):
        loss = wrapped(batch).sum()
    loss.backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanDrift)
        wrapped(batch)
