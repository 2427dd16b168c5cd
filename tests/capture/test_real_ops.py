"""Layers on CPU, in their variants: ops, layouts and peak of the trace are those of a real step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import Step, check_trace
from memfit.memory import Timeline, measured
from tests.capture.real_run import differences

pytestmark = pytest.mark.usefixtures("frozen_heap")

LAST, LAST3D = torch.channels_last, torch.channels_last_3d


class Of(nn.Module):
    """A module whose forward is a function of its parts and its inputs."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.parts, *inputs)


def image(*shape: int, last: bool = False) -> torch.Tensor:
    return torch.rand(*shape).to(memory_format=(LAST if len(shape) == 4 else LAST3D) if last else None)


def mean_square(output: Any, _: Any) -> torch.Tensor:
    while isinstance(output, tuple):
        output = output[0]
    return output.float().pow(2).mean()


def group_norms() -> nn.Module:
    blocks = [(nn.Conv2d(width, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for width in (3, 16)]
    return nn.Sequential(*(module for block in blocks for module in block), nn.Conv2d(16, 3, 1))


def after(convolution: nn.Module, *modules: nn.Module) -> nn.Module:
    return nn.Sequential(convolution, *modules)


def conv(inputs: int = 3, outputs: int = 8) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attention(**options: Any) -> nn.Module:
    return Of(lambda layer, x: layer(x, x, x, **options), nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True))


def ctc(output: torch.Tensor, _: Any) -> torch.Tensor:
    return F.ctc_loss(output.log_softmax(-1), torch.randint(1, 8, (4, 5)), [12] * 4, [5] * 4)


LAYERS: dict[str, Callable[[], Step]] = {}


def layer(name: str, model: Callable[[], nn.Module], batch: Callable[[], Any], **options: Any) -> None:
    options = {"loss": mean_square, **options}
    LAYERS[name] = lambda: Step(model(), batch(), optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9), **options)


for last in (False, True):
    suffix = "-channels-last" if last else ""
    small = partial(image, 2, 3, 16, 16, last=last)
    layer(f"group-norm{suffix}", group_norms, small)
    layer(f"group-norm-large{suffix}", group_norms, partial(image, 2, 3, 48, 48, last=last))
    layer(f"group-norm-bf16-autocast{suffix}", group_norms, small, autocast=torch.bfloat16)
    layer(
        f"group-norm-3d{suffix}",
        lambda: nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv3d(8, 2, 1)),
        partial(image, 2, 2, 4, 8, 8, last=last),
    )
    layer(f"instance-norm{suffix}", lambda: after(conv(), nn.InstanceNorm2d(8, affine=True), nn.ReLU()), small)
    layer(f"batch-norm{suffix}", lambda: after(conv(), nn.BatchNorm2d(8), conv(8), nn.BatchNorm2d(8)), small)
    layer(f"batch-norm-frozen{suffix}", lambda: after(conv(), nn.BatchNorm2d(8).eval(), nn.ReLU()), small)
    layer(
        f"transposed-convolution{suffix}",
        lambda: after(nn.ConvTranspose2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 2)),
        small,
    )
    layer(
        f"pixel-shuffle{suffix}",
        lambda: after(conv(3, 16), nn.PixelShuffle(2), conv(4, 4), nn.PixelUnshuffle(2)),
        small,
    )
    layer(f"reflection-pad{suffix}", lambda: after(conv(), nn.ReflectionPad2d(1), conv(8)), small)
    layer(f"replication-pad{suffix}", lambda: after(conv(), nn.ReplicationPad2d(1), conv(8)), small)
    layer(
        f"unpooling{suffix}",
        lambda: Of(
            lambda first, pool, unpool, x: unpool(*pool(first(x))),
            conv(),
            nn.MaxPool2d(2, return_indices=True),
            nn.MaxUnpool2d(2),
        ),
        small,
    )
    layer(
        f"max-pool-3d{suffix}",
        lambda: after(nn.Conv3d(2, 4, 3), nn.MaxPool3d(2)),
        partial(image, 2, 2, 8, 8, 8, last=last),
    )
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        layer(
            f"interpolate-{mode}{suffix}",
            partial(Of, lambda first, x, mode=mode: F.interpolate(first(x), scale_factor=2, mode=mode), conv()),
            small,
        )

for name, kind in {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}.items():
    for batch_first in (False, True):
        for bidirectional in (False, True):
            for bias in (False, True):
                words = [
                    name,
                    *(word for word, said in (("batch-first", batch_first), ("two-way", bidirectional)) if said),
                ]
                layer(
                    "-".join([*words, "biased"] if bias else words),
                    partial(
                        kind, 6, 8, 2, batch_first=batch_first, bidirectional=bidirectional, bias=bias, dropout=0.3
                    ),
                    lambda: torch.rand(5, 4, 6),
                )
layer("lstm-projected", lambda: nn.LSTM(6, 8, 2, proj_size=4, bidirectional=True), lambda: torch.rand(5, 4, 6))
layer("lstm-bf16", lambda: nn.LSTM(6, 8, 2).bfloat16(), lambda: torch.rand(5, 4, 6).bfloat16())
layer(
    "layer-norm-bf16",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)).bfloat16(),
    lambda: torch.rand(64, 8).bfloat16(),
)
layer(
    "mean-bf16",
    lambda: nn.Linear(8, 64).bfloat16(),
    lambda: torch.rand(64, 8).bfloat16(),
    loss=lambda output, _: output.mean(),
)
layer("gru-autocast", lambda: nn.GRU(6, 8, 2, batch_first=True), lambda: torch.rand(5, 4, 6), autocast=torch.bfloat16)
layer(
    "gru-twice", lambda: Of(lambda gru, x: gru(gru(x)[0]), nn.GRU(8, 8, batch_first=True)), lambda: torch.rand(5, 4, 8)
)

layer("encoder", encoder, lambda: torch.rand(4, 6, 16))
layer("encoder-norm-first", lambda: encoder(norm_first=True, dropout=0.0), lambda: torch.rand(4, 6, 16))
layer("attention-weights", attention, lambda: torch.rand(2, 5, 16))
layer("attention-no-weights", lambda: attention(need_weights=False), lambda: torch.rand(2, 5, 16))
layer("convolution-1d", lambda: after(nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(8, 4, 3)), lambda: torch.rand(2, 4, 8))
layer("fold", lambda: Of(lambda c, x: F.fold(F.unfold(c(x), 3), (16, 16), 3), conv()), lambda: image(2, 3, 16, 16))
layer("mish", lambda: nn.Sequential(nn.Linear(8, 8), nn.Mish(), nn.Linear(8, 8)), lambda: torch.rand(4, 8))
layer("rrelu", lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)), lambda: torch.rand(4, 8))
layer("ctc", lambda: nn.Linear(6, 8), lambda: torch.rand(12, 4, 6), loss=ctc)
layer(
    "views-in-place",
    lambda: Of(lambda f, x: f(f(x).t_().t_()).unsqueeze_(0).transpose_(0, 1) * 2, nn.Linear(8, 8)),
    lambda: torch.rand(4, 8),
)
layer(
    "stft",
    lambda: Of(
        lambda f, x: torch.stft(f(x), 16, window=torch.hann_window(16), return_complex=True).abs(), nn.Linear(64, 64)
    ),
    lambda: torch.rand(2, 64),
)
layer("bilinear", lambda: nn.Bilinear(4, 5, 6), lambda: (torch.rand(2, 4), torch.rand(2, 5)))
for name, loss in {"binary": F.binary_cross_entropy, "soft-margin": F.soft_margin_loss}.items():
    layer(
        f"{name}-loss",
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()),
        lambda: torch.rand(4, 8),
        loss=lambda output, _, loss=loss: loss(output, torch.ones(4, 8)),
    )
for mode in ("sum", "mean", "max"):
    layer(f"bag-{mode}", partial(nn.EmbeddingBag, 20, 8, mode=mode), lambda: torch.randint(0, 20, (4, 6)))


@pytest.mark.parametrize("name", LAYERS)
def test_ops_layouts_and_peak_are_those_of_a_real_step(name: str) -> None:
    torch.manual_seed(0)
    step = LAYERS[name]()
    model = step.build_model()
    optimizer = step.build_optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step.execute(model, optimizer, "cpu")
        with measured() as truth:
            step.execute(model, optimizer, "cpu")
        trace = memfit.trace(
            Step(model, step.batch, loss=step.loss, optimizer=optimizer, autocast=step.autocast), target="cpu"
        )
        found = differences(trace, step, model, layouts=True)
    check_trace(trace)
    timeline = Timeline.of(trace)
    assert not found, f"{name}\n{found}"
    assert timeline.peak_bytes - timeline.start_bytes == truth.peak_bytes
