"""The streams of FSDP2's schedule against FSDP2's own code, on a process group of any size that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import Step, spec
from memfit.cost import Collective, Roofline, Runtime
from memfit.hardware import Target
from memfit.memory import Stream, Timeline
from memfit.sharding import ShardOptions, shard
from memfit.sharding.schedule import EventKind, Role, ShardSchedule

RANKS = 8
UNITS = ("1", "2", "3")
_MADE = {Role.GATHER_INPUT, Role.GATHER_OUTPUT, Role.REDUCE_INPUT, Role.REDUCE_OUTPUT, Role.SHARD_GRADIENT}
"""Unsharded parameters are resized in place, which is no op; the current stream is compute's then."""


def build_model() -> nn.Sequential:
    """Three unequal blocks, whose rows the ranks do not divide, between two layers that belong to the root."""
    blocks = [nn.Sequential(nn.Linear(40, width), nn.Linear(width, 40)) for width in (41, 59, 72)]
    return nn.Sequential(nn.Linear(40, 40), *blocks, nn.Linear(40, 40))


class Recorder(TorchDispatchMode):
    """Notes every allocation of FSDP2 and every collective: its bytes, and the stream that is current then."""

    def __init__(self, names: dict[torch.cpu.Stream, Stream]) -> None:
        super().__init__()
        self.names = names
        self.made: list[tuple[int, Stream]] = []
        self.sent: list[tuple[Collective, int, Stream]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, stream = str(func), self.names.get(torch.cpu.current_stream(), Stream.COMPUTE)
        if name.startswith("c10d._allgather_base_"):
            self.sent.append((Collective.ALL_GATHER, args[0].untyped_storage().nbytes(), stream))
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.sent.append((Collective.REDUCE_SCATTER, args[1].untyped_storage().nbytes(), stream))
        elif name in ("aten.empty.memory_format", "aten._to_copy.default") and result.dim() == 1:
            self.made.append((result.untyped_storage().nbytes(), stream))
        return result


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def recorded(policy: MixedPrecisionPolicy, kept: str | None = None) -> Recorder:
    """The second step of FSDP2, which is as all that follow; one unit may keep its parameters after the forward."""
    model, mesh = build_model(), init_device_mesh("cpu", (RANKS,))
    for name in (*UNITS, ""):
        reshard = False if name == kept else None
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    x = torch.ones(2, 40)
    model(x).sum().backward()
    model.zero_grad()
    context = model._get_fsdp_state()._comm_ctx  # type: ignore[operator]
    streams = {
        context.all_gather_copy_in_stream: Stream.COPY,
        context.all_gather_stream: Stream.GATHER,
        context.reduce_scatter_stream: Stream.REDUCE,
    }
    with Recorder(streams) as recorder:
        model(x).sum().backward()
    return recorder


def scheduled(options: ShardOptions) -> ShardSchedule:
    step = Step(build_model, spec((2, 40), torch.float32), loss=lambda out, _: out.sum(), optimizer=torch.optim.SGD)
    trace = memfit.trace(step, target="cpu")
    timeline, runtime = Timeline.of(trace, 1), Runtime.of(trace, Roofline())
    return shard(timeline, runtime, Target.parse("cpu", ranks=RANKS), options).schedule


@pytest.mark.parametrize("keep_last", [False, True], ids=["", "keep-last"])
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(None, None), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_buffers_and_collectives_are_on_the_streams_of_fsdp2(
    eight_ranks: None, param_dtype: Any, reduce_dtype: Any, keep_last: bool
) -> None:
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    policy = MixedPrecisionPolicy(**{name: each and getattr(torch, each) for name, each in dtypes.items()})
    found = recorded(policy, kept=UNITS[-1] if keep_last else None)
    schedule = scheduled(ShardOptions(units=UNITS, keep_last=keep_last, **dtypes))
    made = [
        (event.size_bytes, event.stream)
        for event in schedule.events
        if event.kind is EventKind.ALLOCATE and schedule.buffers[event.number].role in _MADE
    ]
    assert found.sent == [(each.kind, each.size_bytes, each.stream) for each in schedule.transfers]
    assert found.made == made
