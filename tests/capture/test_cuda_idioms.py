"""What steps ask of torch.cuda, of torch.accelerator and of devices is answered as on the target, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import Event as ImportedEvent
from torch.cuda import Stream as ImportedStream

import memfit
from memfit.capture import Step, check_trace

GPU = "h100-sxm"
WIDTH = 16
IDIOMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def idiom(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    IDIOMS[function.__name__] = function
    return function


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)).float().sum()


def traced(function: Callable[[torch.Tensor], torch.Tensor], target: str = GPU) -> memfit.Trace:
    trace = memfit.trace(Step(Model(function), torch.randn(WIDTH, WIDTH)), target=target)
    check_trace(trace)
    return trace


@idiom
def likes(h: torch.Tensor) -> torch.Tensor:
    h = h + torch.zeros_like(h, device=h.device) + torch.full_like(h, 2.0, device=h.device)
    h = h + torch.rand_like(h, device="cuda") + torch.randn_like(h, device="cuda:0") + torch.ones_like(h, device=0)
    return h + torch.randint_like(h, 3, device=h.device) + torch.empty_like(h, device=h.device, dtype=torch.bfloat16)


@idiom
def like_on_host(h: torch.Tensor) -> torch.Tensor:
    on_host = torch.zeros_like(h, device="cpu", pin_memory=True)
    assert on_host.device.type == "cpu"
    return h + on_host.to(h.device)


@idiom
def like_of_host(h: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(torch.ones(WIDTH), device=h.device)
    assert made.is_cuda
    return h + made


@idiom
def new_ones(h: torch.Tensor) -> torch.Tensor:
    h = h + h.new_zeros(WIDTH, device=h.device) + h.new_tensor([1.0] * WIDTH, device="cuda")
    return h + h.new_full((WIDTH,), 2.0, device=h.device) + h.new_empty((WIDTH,), device=h.device)


@idiom
def conversions(h: torch.Tensor) -> torch.Tensor:
    h = torch.as_tensor(h, device=h.device) + torch.asarray(h, device="cuda")
    h = h + torch.as_tensor([1.0] * WIDTH, device=h.device) + torch.tensor(3.0, device=h.device)
    return h.type(torch.cuda.HalfTensor).type("torch.cuda.FloatTensor")


@idiom
def factories(h: torch.Tensor) -> torch.Tensor:
    h = h + torch.normal(0.0, 1.0, (WIDTH,), device=h.device) + torch.hann_window(WIDTH, device=h.device)
    h = h + torch.linspace(0, 1, WIDTH, device="cuda") + torch.empty_strided((WIDTH,), (1,), device=h.device)
    return h @ torch.eye(WIDTH, device=h.device) + torch.triu_indices(WIDTH, WIDTH, device=h.device)[0][:WIDTH]


@idiom
def streams(h: torch.Tensor) -> torch.Tensor:
    current, side = torch.cuda.current_stream(h.device), torch.cuda.Stream()
    assert isinstance(side, torch.cuda.Stream)
    side.wait_stream(torch.cuda.default_stream())
    current.wait_event(side.record_event())
    with torch.cuda.stream(side):
        h = h * 2
    h.record_stream(side)
    with ImportedStream(device=h.device, priority=-1), torch.cuda.stream(None):
        h = h * 2
    side.synchronize()
    assert side.query()
    torch.cuda.set_stream(current)
    return h


@idiom
def events(h: torch.Tensor) -> torch.Tensor:
    begin, end = torch.cuda.Event(enable_timing=True), ImportedEvent(enable_timing=True)
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    begin.record()
    h = h * 2
    end.record(torch.cuda.current_stream())
    end.synchronize()
    begin.wait()
    assert begin.query() and begin.elapsed_time(end) >= 0
    return h


@idiom
def streams_of_any_device(h: torch.Tensor) -> torch.Tensor:
    stream, event = torch.Stream(device="cuda"), torch.Event(device="cuda", enable_timing=True)
    event.record(stream)
    event.wait(stream)
    with stream:
        return h * 2


@idiom
def device_contexts(h: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device(h.device), torch.cuda.device_of(h), torch.cuda.device(0):
        h = h + torch.zeros(WIDTH, device="cuda")
    torch.cuda.set_device(h.device)
    with torch.device("cuda"):
        made = torch.zeros(WIDTH)
        assert made.is_cuda
    with torch.device(h.device):
        return h + made + torch.arange(WIDTH) + torch.tensor([2.0])


@idiom
def default_device(h: torch.Tensor) -> torch.Tensor:
    torch.set_default_device("cuda")
    try:
        made = torch.zeros(WIDTH)
        assert made.is_cuda and torch.get_default_device().type == "cuda"
    finally:
        torch.set_default_device(None)
    return h + made


@idiom
def questions(h: torch.Tensor) -> torch.Tensor:
    properties = torch.cuda.get_device_properties(h.device)
    assert properties.total_memory > 1 << 30 and properties.major == 9 and properties.multi_processor_count > 0
    assert torch.cuda.get_device_name(0) == properties.name
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == properties.total_memory == torch.cuda.memory.mem_get_info()[1]
    torch.cuda.memory_stats(), torch.cuda.memory_summary(), torch.cuda.ipc_collect(), torch.cuda.get_arch_list()
    assert torch.backends.cuda.is_built() and not torch.cuda.is_current_stream_capturing()
    return h * 2 if torch.cuda.memory_allocated(h.device) < total else h


@idiom
def mixed_precision(h: torch.Tensor) -> torch.Tensor:
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        product = h @ h.t()
    assert product.dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled("cuda")
        product = h @ h
    assert product.dtype is torch.float16
    torch.cuda.amp.GradScaler(), torch.amp.GradScaler("cuda")
    return product


@idiom
def accelerator(h: torch.Tensor) -> torch.Tensor:
    device = torch.accelerator.current_accelerator()
    assert torch.accelerator.is_available() and device is not None and device.type == "cuda"
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
    torch.accelerator.synchronize()
    torch.accelerator.current_stream().synchronize()
    with torch.accelerator.device_index(0):
        h = h + torch.ones(WIDTH, device=device)
    torch.get_device_module(h.device).synchronize()
    return h * 2 if torch.accelerator.memory_allocated() >= 0 else h


@idiom
def markers(h: torch.Tensor) -> torch.Tensor:
    torch.cuda.nvtx.range_push("product")
    with torch.cuda.nvtx.range("inner"), torch.autograd.profiler.record_function("inner"):
        h = h * 2
    torch.cuda.nvtx.range_pop()
    return h


@idiom
def random_states(h: torch.Tensor) -> torch.Tensor:
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    torch.cuda.manual_seed(torch.cuda.initial_seed())
    assert len(torch.cuda.get_rng_state_all()) == 1
    with torch.random.fork_rng(devices=[0]):
        h = h + torch.rand(WIDTH, device=h.device)
    with torch.random.fork_rng():
        return h + torch.rand(WIDTH, device=h.device)


@idiom
def moves(h: torch.Tensor) -> torch.Tensor:
    h = h.cuda() + torch.ones(WIDTH).cuda() + torch.ones(WIDTH).to("cuda:0", non_blocking=True)
    return h.cuda(device=torch.device("cuda")).to(device=0) + torch.ones(WIDTH).pin_memory().cuda(0)


@pytest.mark.parametrize("name", IDIOMS)
def test_steps_find_the_targets_gpu(name: str) -> None:
    trace = traced(IDIOMS[name])
    assert not any("host memory" in note for note in trace.notes)


def test_nothing_of_the_targets_gpu_is_left() -> None:
    modules: tuple[Any, ...] = (torch, torch.cuda, torch.cuda.memory, torch.accelerator, torch.cuda.nvtx, torch.Tensor)
    classes = (torch.cuda.Stream, torch.cuda.Event, torch.cuda.device)
    before = [dict(vars(owner)) for owner in (*modules, *classes)]
    traced(streams)
    with pytest.raises((ZeroDivisionError, memfit.InputError), match="zero"):
        traced(lambda h: h / (1 // 0))
    for owner, attributes in zip((*modules, *classes), before, strict=True):
        now = dict(vars(owner))
        assert {k: v for k, v in now.items() if attributes.get(k) is not v} == {}
        assert now.keys() == attributes.keys()


def test_streams_of_the_steps_own_have_a_note() -> None:
    assert any("one stream" in note for note in traced(streams).notes)
    only_asks = traced(lambda h: h * int(torch.cuda.current_stream().query()))
    assert not any("one stream" in note for note in only_asks.notes)


def test_a_tensor_on_the_device_is_not_copied_by_a_conversion() -> None:
    plain = traced(lambda h: h * 2)
    converted = traced(lambda h: torch.as_tensor(h, device="cuda") * 2)
    assert [op.name for op in converted.ops] == [op.name for op in plain.ops]


def test_likes_are_where_they_are_asked_to_be() -> None:
    def on_host(h: torch.Tensor) -> torch.Tensor:
        return h * 2 if torch.zeros_like(h, device="cpu").device.type == "cpu" else h

    assert len(traced(on_host).storages) == len(traced(lambda h: h * 2).storages)


@pytest.mark.parametrize("target", ["cpu", GPU])
def test_likes_keep_the_device_of_their_tensor(target: str) -> None:
    plain = traced(lambda h: h + torch.zeros_like(h), target)
    asked = traced(lambda h: h + torch.zeros_like(h, device=h.device), target)
    assert [storage.bytes for storage in asked.storages] == [storage.bytes for storage in plain.storages]
