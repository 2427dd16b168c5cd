"""A long run that is killed, stopped and made to fail at random, and goes on from its last save.

Every life of the run has another number of ranks (a hybrid mesh now and then) and ends with a fault of one rank:
killed, stopped, or with an error of its own, in a forward, a backward, the optimizer or a save. In between all ranks
raise in a step and repeat it. Saves alternate between `memfit.sharded.save` and the recipe of
`torch.distributed.checkpoint`. At the end parameters and optimizer state are compared with those of a run that nothing
disturbed, bit by bit: in the mode `exact` every sum is exact (multiples of powers of two, bounded), so that the number
of ranks makes no difference; in the mode `dropout` AdamW trains with dropout on two ranks in every life.
`python benchmarks/soak.py --steps 2000`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from memfit.sharded import Reduction, full_state_dict, load, save, shard

SAMPLES, WIDTH, LAYERS = 12, 16, 4
SAVE_EVERY = 10
TIMEOUT_S = 15.0
HOW = ("kill", "kill", "kill", "raise", "raise", "stop")
WHERE = ("forward", "backward", "optimizer", "save", "save")

_context = get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.checkpoint", "memfit.sharded"])


class Boom(Exception):
    """An error of the user's."""


class _Round(torch.autograd.Function):
    """Values and gradients as multiples of a power of two, bounded: sums of their products are exact in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mul(4).round().clamp(-8, 8).div(4)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].mul(16).round().clamp(-16, 16).div(16)


class _RoundWeight(torch.autograd.Function):
    """A weight as a multiple of a power of two; its gradient is left as it is, since ranks have parts of the sum."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.mul(16).round().clamp(-16, 16).div(16)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class ExactBlock(nn.Module):
    """A residual layer whose sums do not depend on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (_RoundWeight.apply(each) for each in (self.linear.weight, self.linear.bias))
        return _Round.apply(x + F.linear(_Round.apply(x), weight, bias).relu())


class DropoutBlock(nn.Module):
    """A residual layer with a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.linear(self.norm(x)).relu(), 0.2)


class Model(nn.Module):
    """Layers of one kind, which are the units."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ExactBlock() if mode == "exact" else DropoutBlock() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a rank does at a step: die, stop or raise, in a part of it."""

    step: int
    rank: int
    how: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the ranks of one life are told."""

    mode: str
    folder: str
    ranks: int
    replicas: int
    last: int
    fault: Fault | None
    retries: tuple[int, ...] = ()
    """Steps in which all ranks raise, and which they repeat."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What happened."""

    lives: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    steps_run: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    """From the first rank that died or raised to the last that was told; stopped ranks are told by the timeout."""
    equal: bool = False
    changed: bool = False


# -- One rank ---------------------------------------------------------------------------------------------------------


def _serve(pipe: connection.Connection, rank: int, life: Life, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, life.ranks),
        rank=rank,
        world_size=life.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        content = io.BytesIO()
        torch.save(_live(life), content)  # tensors in a pipe would be shared with a process that is gone
        pipe.send(("end", content.getvalue()))
    except BaseException as error:  # torch's CheckpointException is no Exception
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)  # what waits for this rank in a collective learns of it now


def _live(life: Life) -> dict[str, Any]:
    """Train from the last save to the last step; return the state at the end."""
    mesh = init_device_mesh("cpu", (life.replicas, life.ranks // life.replicas)) if life.replicas > 1 else None
    exact = life.mode == "exact"
    model = shard(
        Model(life.mode),
        mesh=mesh,
        reduction=Reduction(divisor=1) if exact else None,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD if exact else torch.optim.AdamW
    options = {"lr": 2**-8, "momentum": 0.5, "weight_decay": 2**-10} if exact else {"lr": 1e-3}
    optimizer = kind(model.parameters(), **options)
    torch.manual_seed(dist.get_rank())
    first = _load(Path(life.folder), life.mode, model, optimizer)
    for step in range(first, life.last):
        if life.fault is not None and step == life.fault.step and dist.get_rank() == life.fault.rank:
            _prepare(life.fault, model, optimizer)
        if step in life.retries:
            _fail_and_clear(model, optimizer, step)
        _train_step(model, optimizer, step)
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < life.last:
            _save(Path(life.folder), model, optimizer, step + 1)
    return full_state_dict(model, optimizer)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, target = torch.randint(-8, 9, (2, SAMPLES, WIDTH), generator=generator)[:, rank::ranks] / 4
    (model(x) - target).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _fail_and_clear(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise in the backward of a step on every rank, and leave the model as it was, random state included."""
    state = torch.get_rng_state()
    handle = model.get_submodule("blocks.1").register_forward_hook(
        lambda _module, _args, output: output.register_hook(_boom) and None
    )
    try:
        _train_step(model, optimizer, step)
    except Boom:
        optimizer.zero_grad()
    else:
        raise AssertionError("the step did not fail")
    finally:
        handle.remove()
        torch.set_rng_state(state)


def _boom(*_: Any) -> None:
    raise Boom("boom")


def _prepare(fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make this rank act in a part of the step, or in the next save."""
    act = {
        "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": _boom,
    }[fault.how]
    block = model.get_submodule("blocks.2")
    if fault.where == "forward":
        block.register_forward_pre_hook(act)
    elif fault.where == "backward":
        block.register_forward_hook(lambda _module, _args, output: output.register_hook(act) and None)
    elif fault.where == "optimizer":
        optimizer.register_step_pre_hook(act)
    else:
        os.fsync = act  # both kinds of save end a file with it


def _save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save by turns with memfit and with torch's recipe, whose folder counts when rank 0 has said so."""
    if step // SAVE_EVERY % 2:
        save(folder / "memfit", model, optimizer, extra={"step": step})
        return
    target = folder / "dcp" / f"step-{step}"
    dcp.save(_dcp_state(model, optimizer), checkpoint_id=target)
    if dist.get_rank() == 0:
        draft = folder / "dcp" / "latest.draft"
        draft.write_text(json.dumps({"step": step}))
        draft.replace(folder / "dcp" / "latest")
        for old in (folder / "dcp").glob("step-*"):
            if old.name not in (target.name, f"step-{step - 2 * SAVE_EVERY}"):
                shutil.rmtree(old, ignore_errors=True)


def _dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state, of_optimizer = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": of_optimizer, f"random.{dist.get_rank()}": torch.get_rng_state()}


def _load(folder: Path, mode: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest save of either kind and return its step."""
    by_dcp, kind = _newest(folder, mode)
    if kind == "memfit":
        return load(folder / "memfit", model, optimizer).extra["step"]
    if kind == "nothing":
        return 0
    state = _dcp_state(model, optimizer)
    mine = f"random.{dist.get_rank()}"
    target = folder / "dcp" / f"step-{by_dcp}"
    if mine not in dcp.FileSystemReader(target).read_metadata().state_dict_metadata:
        del state[mine]  # a rank more than saved
    dcp.load(state, checkpoint_id=target)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if mine in state:
        torch.set_rng_state(state[mine])
    return by_dcp


# -- The run ----------------------------------------------------------------------------------------------------------


def run_life(life: Life) -> tuple[list[Any], float]:
    """Start the ranks of a life; what each said (None where it died), and how long the last took after the first."""
    with tempfile.TemporaryDirectory() as place:
        pipes: list[connection.Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(life.ranks):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, rank, life, f"{place}/store"), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        said: list[Any] = ["nothing"] * life.ranks
        waiting, began, until = set(range(life.ranks)), 0.0, time.monotonic() + 600
        stopped = life.fault.rank if life.fault is not None and life.fault.how == "stop" else None
        while waiting - ({stopped} if began else set()):
            ready = connection.wait([pipes[rank] for rank in waiting], timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            if not began:
                began = time.monotonic()
                until = began + 4 * TIMEOUT_S
            for pipe in ready:
                rank = next(each for each in waiting if pipes[each] is pipe)
                try:
                    said[rank] = pipes[rank].recv()
                except (EOFError, ConnectionError):
                    said[rank] = None
                waiting.discard(rank)
        took = time.monotonic() - began
        for process in processes:
            process.kill()
            process.join()
    hung = [rank for rank in waiting if rank != stopped]
    if hung:
        raise AssertionError(f"ranks {hung} of {life} hang")
    return said, took


def soak(
    mode: str, steps: int, seed: int, mean_steps: int, folder: Path, ranks: tuple[int, ...] = (1, 2, 3, 4)
) -> Report:
    """Run to the last step through faults, and compare with a run without."""
    draw = random.Random(seed)
    choices = ranks if mode == "exact" else (2,)
    report = Report()
    for name in ("undisturbed", "disturbed"):
        (folder / name / "dcp").mkdir(parents=True)
    quiet = Life(mode=mode, folder=str(folder / "undisturbed"), ranks=2, replicas=1, last=steps, fault=None)
    wanted = _run_undisturbed(quiet)
    end = None
    while end is None:
        reached, kind = _newest(folder / "disturbed", mode)
        count = draw.choice(choices)
        replicas = 2 if count == 4 and draw.random() < 0.5 else 1
        at = reached + draw.randint(0, 2 * mean_steps)
        fault = Fault(step=at, rank=draw.randrange(count), how=draw.choice(HOW), where=draw.choice(WHERE))
        if count == 1 and fault.how == "stop":  # nobody would be told
            fault = replace(fault, how="kill")
        retries = tuple(each for each in range(steps) if draw.random() < 0.01)
        life = Life(
            mode=mode,
            folder=str(folder / "disturbed"),
            ranks=count,
            replicas=replicas,
            last=steps,
            fault=fault if at < steps else None,
            retries=retries,
        )
        said, took = run_life(life)
        report.lives[f"{count} ranks" + (", hybrid" if replicas > 1 else "")] += 1
        ends = [_loaded(each) for each in said if each and each[0] == "end"]
        report.loads[kind] += 1
        if len(ends) == count:
            end = ends[0]
            report.steps_run += steps - reached
            report.retries += sum(reached <= each for each in retries)
            continue
        if ends:
            raise AssertionError(f"some ranks of {life} ended well and others did not: {said}")
        _check_told(life, said)
        report.faults[f"{fault.how} in {fault.where}"] += 1
        stop = fault.step // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY if fault.where == "save" else fault.step
        report.steps_run += stop - reached
        report.retries += sum(reached <= each < stop for each in retries)
        if fault.how != "stop":
            report.slowest_s = max(report.slowest_s, took)
    report.equal = _same(end, wanted)
    initial = Model(mode).state_dict()
    report.changed = all(not torch.equal(each, initial[name]) for name, each in wanted["model"].items())
    return report


def _loaded(said: tuple[str, bytes]) -> dict[str, Any]:
    return torch.load(io.BytesIO(said[1]))


def _run_undisturbed(life: Life) -> dict[str, Any]:
    said, _ = run_life(life)
    if not all(each and each[0] == "end" for each in said):
        raise AssertionError(f"the undisturbed run failed: {said}")
    return _loaded(said[0])


def _check_told(life: Life, said: list[Any]) -> None:
    """Every rank but the one with the fault must have an error; that one died, is stopped or has its own."""
    fault = life.fault
    assert fault is not None, said
    for rank, each in enumerate(said):
        if rank == fault.rank:
            expected = {"kill": None, "stop": "nothing"}.get(fault.how, "error")
            if (each[0] if isinstance(each, tuple) else each) != expected:
                raise AssertionError(f"rank {rank} of {life} said {each}")
        elif not isinstance(each, tuple) or each[0] != "error":
            raise AssertionError(f"rank {rank} of {life} was not told: {each}")


def _newest(folder: Path, mode: str) -> tuple[int, str]:
    """The step of the newest save and its kind."""
    latest = folder / "dcp" / "latest"
    by_dcp = json.loads(latest.read_text())["step"] if latest.exists() else 0
    by_memfit = 0
    if (folder / "memfit" / "latest").exists():
        by_memfit = load(folder / "memfit", Model(mode), rng=False).extra["step"]
    return max((0, "nothing"), (by_memfit, "memfit"), (by_dcp, "dcp"), key=lambda each: each[0])


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mode", choices=("exact", "dropout"), default="exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-steps", type=int, default=40, help="steps between a save and the next fault")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(given.mode, given.steps, given.seed, given.mean_steps, Path(folder))
    for name in ("lives", "faults", "loads"):
        counted = getattr(report, name)
        print(f"{name}: {counted.total()} ({', '.join(f'{each} x {key}' for key, each in sorted(counted.items()))})")
    print(f"steps that all ranks failed in and repeated: {report.retries}")
    print(f"steps run for {given.steps}: {report.steps_run}, in {time.monotonic() - began:.0f} s")
    print(f"slowest rank to be told of a death or an error: {report.slowest_s:.1f} s")
    print(f"equal to the undisturbed run: {report.equal}; parameters changed in training: {report.changed}")
    raise SystemExit(0 if report.equal and report.changed else 1)


if __name__ == "__main__":
    main()
