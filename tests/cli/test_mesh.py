"""`--mesh`: steps whose model factory wraps the model itself."""

from __future__ import annotations

import json

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import memfit
from memfit.capture import load_trace
from memfit.plans import Plan
from tests.cli.command_runner import Runner

WHERE = f"{__name__}:step"


def build(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


step = memfit.Step(build, memfit.spec((512, 64), torch.float32), loss=lambda output, _: output.square().mean())


def test_a_plan_is_of_the_mesh(run: Runner) -> None:
    ran = run("plan", WHERE, "--target", "h100-sxm", "--mesh", "dp=4", "--no-levers", "--json")
    assert ran.code == 0, ran.err
    assert Plan.from_json(ran.out).mesh == {"dp": 4}


def test_a_trace_brings_its_mesh(run: Runner, tmp_path: object) -> None:
    path = f"{tmp_path}/step.memfit"
    memfit.save_trace(memfit.trace(step, target="h100-sxm", mesh={"dp": 4}), path)
    assert load_trace(path).mesh == {"dp": 4}
    ran = run("plan", path, "--no-levers", "--json")
    assert Plan.from_json(ran.out).ranks == 4
    assert "captured on {'dp': 4}" in run("plan", path, "--mesh", "dp=2", "--no-levers").said


def test_a_plan_is_of_the_rank_that_is_named(run: Runner) -> None:
    for rank in ("3", "dp=3"):
        ran = run("plan", WHERE, "--target", "h100-sxm", "--mesh", "dp=4", "--rank", rank, "--no-levers", "--json")
        assert ran.code == 0, ran.err
        assert Plan.from_json(ran.out).rank == 3


def test_what_is_wrong_is_named(run: Runner) -> None:
    for rank in ("4", "tp=0", "dp", "dp=x"):
        ran = run("plan", WHERE, "--target", "h100-sxm", "--mesh", "dp=4", "--rank", rank)
        assert ran.code == 2 and "--rank" in ran.said
    assert "--mesh pp=4" in run("plan", WHERE, "--target", "h100-sxm", "--rank", "1").said
    assert "leave it out" in run("search", WHERE, "-t", "h100-sxm", "--rank", "1").said
    for mesh in ("dp", "dp=0", "dp=2,dp=2", "=4"):
        ran = run("plan", WHERE, "--target", "h100-sxm", "--mesh", mesh)
        assert ran.code == 2 and "as in dp=8 or dp=8,tp=2" in ran.said
    assert "leave --ranks out" in run("plan", WHERE, "-t", "h100-sxm", "--mesh", "dp=4", "--ranks", 8).said
    assert "plan one mesh at a time" in run("search", WHERE, "-t", "h100-sxm", "--mesh", "dp=4").said


def of_batch(batch: int = 1) -> memfit.Step:
    return step.with_batch(memfit.spec((batch, 64), torch.float32))


def test_a_search_over_meshes_shows_every_shape(run: Runner) -> None:
    ran = run("search", f"{__name__}:of_batch", "--over", "mesh", "--gpus", 4, "-t", "h100-sxm", "--dims", "dp")
    assert ran.code == 0, ran.err
    assert "dp 4 is best" in ran.out and "the global batch, 4 samples" in ran.out
    assert "dp 4: " in ran.err and "peak" in ran.err, "told of when it has been planned"
    ran = run(
        "search", "llama3.2-1b", "--over", "mesh", "--values", "dp=2,tp=3/dp=6,tp=1", "-t", "h100-sxm", "--seq", 384,
        "--batch", 1, "--json",
    )  # fmt: skip
    found = json.loads(ran.out)
    assert ran.code == 0 and found["best"] == {"dp": 6, "tp": 1}
    assert found["fixed"] == "batch of a data-parallel rank" and found["counts"] == "tokens"
    assert found["points"][1]["reason"] == "tp 3: 8 key and value heads cannot be divided by 3"


def test_what_is_wrong_with_a_search_over_meshes_is_named(run: Runner) -> None:
    for given, said in (
        ((), "--gpus 64"),
        (("--gpus", 0), "--gpus is 0"),
        (("--gpus", 4, "--mesh", "dp=4"), "write it as --values"),
        (("--gpus", 4, "--batch", 1, "--global-batch", 4), "leave one out"),
        (("--gpus", 4, "--largest", 4), "--largest is for the other searches"),
        (("--gpus", 4, "--parallel", "ddp"), "the step is parallel itself"),
        (("--gpus", 4, "--values", "4"), "such as dp=32,tp=2/dp=16,tp=4"),
        (("--gpus", 4, "--values", "dp=2"), "compare shapes of as many"),
    ):
        ran = run("search", f"{__name__}:of_batch", "--over", "mesh", "-t", "h100-sxm", *given)
        assert ran.code == 2 and said in ran.said, ran.said
    assert "--gpus is for --over mesh" in run("search", WHERE, "-t", "h100-sxm", "--gpus", 4).said
