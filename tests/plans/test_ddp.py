"""Plans for DistributedDataParallel: buckets in the document, on the terminal and in levers; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memfit
from memfit.capture import Trace
from memfit.errors import InputError, MissingFeatureError
from memfit.plans import DdpPlan
from memfit.sharding import ShardOptions
from memfit.solve import SolveOptions

DDP = SolveOptions(shard=ShardOptions(parallel="ddp"))
VIEWS = SolveOptions(shard=ShardOptions(parallel="ddp", gradient_as_bucket_view=True))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))


def step(rows: int = 512) -> memfit.Step:
    return memfit.Step(model, memfit.spec((rows, 256)), loss=lambda output, batch: output.square().mean())


@pytest.fixture(scope="module")
def trace() -> Trace:
    return memfit.trace(step(), target="h100-sxm")


@pytest.fixture(scope="module")
def small() -> Trace:
    """A step whose peak is in the optimizer, where all gradients are."""
    return memfit.trace(step(8), target="h100-sxm")


def gradient_bytes(trace: Trace) -> int:
    return sum(trace.storages[each.storage].bytes for each in trace.parameters if each.trainable)


def test_a_replicated_step_has_everything_and_buckets_beside_it(small: Trace) -> None:
    trace = small
    alone = memfit.plan(trace, progress=False)
    plan = memfit.plan(trace, ranks=8, options=DDP, progress=False)
    views = memfit.plan(trace, ranks=8, options=VIEWS, progress=False)
    assert plan.shard is None and plan.ddp is not None and plan.ddp.ranks == 8
    assert sum(plan.ddp.buckets) == gradient_bytes(trace) and len(plan.ddp.buckets) > 1
    assert plan.ddp.buckets[0] < 2 * (1 << 20) + (1 << 20), "the first is small"
    buckets = sum(plan.ddp.buckets)
    assert buckets <= plan.baseline.peak_bytes - alone.baseline.peak_bytes <= buckets + 512 * len(plan.ddp.buckets)
    assert alone.baseline.peak_bytes <= views.baseline.peak_bytes < plan.baseline.peak_bytes
    assert plan.predicted is not None and alone.predicted is not None
    assert plan.predicted.exposed_communication_ms > 0
    assert plan.predicted.step_ms == pytest.approx(
        alone.predicted.step_ms + plan.predicted.exposed_communication_ms,
        abs=2e-6,  # each is rounded to a nanosecond
    )


def test_all_reduces_hide_behind_the_backward(trace: Trace) -> None:
    plan = memfit.plan(trace, ranks=8, options=DDP, progress=False)
    one = SolveOptions(shard=ShardOptions(parallel="ddp", bucket_cap_bytes=1 << 40))
    late = memfit.plan(trace, ranks=8, options=one, progress=False)
    assert plan.predicted is not None and late.predicted is not None and late.ddp is not None
    assert len(late.ddp.buckets) == 1, "which is full only when the backward has ended"
    assert plan.predicted.exposed_communication_ms < late.predicted.exposed_communication_ms


def test_a_plan_for_ddp_checkpoints_to_meet_its_budget_and_says_what_it_is(trace: Trace, tmp_path: Path) -> None:
    free = memfit.plan(trace, ranks=8, options=DDP, progress=False)
    plan = memfit.plan(trace, ranks=8, options=DDP, budget=free.baseline.peak_bytes - (1 << 20), progress=False)
    assert plan.checkpoint and plan.predicted is not None
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.baseline.peak_bytes
    shown = " ".join(str(plan).split())
    assert "replicated on 8 ranks: gradients are averaged in" in shown and "beside the gradients" in shown
    assert "wrap the model yourself" in shown and "only sharded" not in shown and "only replicated (DDP)" in shown
    plan.save(tmp_path / "plan.json")
    assert memfit.load(tmp_path / "plan.json") == plan


def test_a_plan_for_ddp_that_does_not_fit_is_still_one_for_ddp(small: Trace) -> None:
    plan = memfit.plan(small, ranks=8, options=DDP, budget="1MiB", progress=False)
    assert plan.status == "infeasible" and plan.ddp is not None
    found = memfit.explain(plan, step(8))
    names = [lever.name for lever in found.levers]
    assert "gradients as views of DDP's buckets" in names
    assert "sharding over the 8 ranks, not replicating" in names


def test_a_plan_for_ddp_is_carried_out_on_a_model_that_the_user_wraps() -> None:
    real = memfit.Step(model(), torch.randn(64, 256), loss=lambda output, batch: output.square().mean())
    captured = memfit.trace(real, target="cpu")
    free = memfit.plan(captured, ranks=2, options=DDP, progress=False)
    assert free.minimum_budget_bytes is None or free.minimum_budget_bytes <= free.baseline.peak_bytes
    forced = SolveOptions(shard=ShardOptions(parallel="ddp"), force=("0",))
    plan = memfit.plan(captured, ranks=2, options=forced, progress=False)
    assert [entry.module for entry in plan.checkpoint] == ["0"]
    applied = model()
    plan.apply(applied)
    assert torch.equal(applied(real.batch), model()(real.batch))
    with pytest.raises(MissingFeatureError, match="replicated on 2 ranks"):
        plan.verify(real)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parallel": "tp"}, "parallel is 'tp'; write 'fsdp'"),
        ({"parallel": "ddp", "param_dtype": "bfloat16"}, "param_dtype is for sharded parameters"),
        ({"gradient_as_bucket_view": True}, "are for parallel='ddp'"),
        ({"parallel": "ddp", "bucket_cap_bytes": 0}, "bucket_cap_bytes is 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ShardOptions(**options)  # type: ignore[arg-type]


def test_a_parameter_without_a_gradient_is_refused_as_ddp_refuses_it() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x).sum()

    with pytest.raises(InputError, match=r"'unused\.weight' is trained and gets no gradient.*find_unused_parameters"):
        memfit.plan(Unused, memfit.spec((4, 8)), target="cpu", ranks=2, options=DDP, progress=False)


def test_documents_are_consistent(trace: Trace) -> None:
    plan = memfit.plan(trace, ranks=8, options=DDP, progress=False)
    assert isinstance(plan.ddp, DdpPlan)
    with pytest.raises(InputError, match=r"ddp\.ranks is 8, and ranks is 4"):
        memfit.Plan.from_json(plan.to_json().replace('"ranks": 8,\n  "budget', '"ranks": 4,\n  "budget'))


def test_a_model_that_is_wrapped_already_is_not_planned_as_if_it_were_sharded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        step = memfit.Step(wrapped, torch.zeros(4, 8), loss=lambda output, _: output.sum())
        with pytest.raises(InputError, match=r"wrapped in DistributedDataParallel.*parallel='ddp'.*model\.module"):
            memfit.plan(step, target="cpu", ranks=2, progress=False)
        planned = memfit.plan(step, target="cpu", ranks=2, options=DDP, progress=False)
    finally:
        dist.destroy_process_group()
    assert isinstance(planned.ddp, DdpPlan)
