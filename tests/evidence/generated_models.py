"""The models that GPUMemNet's scripts generate and train, from the settings in a run's name.

itu-rad/GPUMemNet (code Apache-2.0, data CC BY 4.0), `NeuroNetGen_scripts`: multi-layer perceptrons, convolutional
networks and transformer encoders in float32, trained with Adam, `zero_grad` first in the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}
MOST_FILTERS = 2048


def settings(config: str) -> dict[str, str]:
    """The settings in a run's name; of one that stands there twice (`dropout`) the first has `_rate`."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"([a-z_]+):([^_]+(?:_(?:relu|pyramid))?)", config):
        name = name.strip("_")
        if name == "dropout" and name not in found and "dropout_rate" not in found:
            name = "dropout_rate"
        found[name] = value
    return found


class MLP(nn.Module):
    """`mlp_next.py`."""

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__()
        self.given, self.layers = given, list[nn.Module]()
        inputs, outputs, depth = int(given["input"]), int(given["output"]), int(given["depth"])
        width, arch = inputs, given["arch"]
        for _ in range(depth):
            if arch == "uniform":
                following = width
            elif arch == "gradual":
                following = max(width - (inputs - outputs) // depth, outputs)
            else:
                following = max(int(width * 0.5), outputs)
            width = self.hidden(width, following)
        if arch == "bottleneck":
            width = self.hidden(width, max(int(width * 0.5), outputs))
        self.layers += [nn.Linear(width, outputs), nn.Softmax(dim=1)]
        self.model = nn.Sequential(*self.layers)

    def hidden(self, width: int, following: int) -> int:
        self.layers.append(nn.Linear(width, following))
        if self.given["batchnorm"] == "True":
            self.layers.append(nn.BatchNorm1d(following))
        self.layers.append(ACTIVATIONS[self.given["act"]]())
        if self.given["dropout"] == "True":
            self.layers.append(nn.Dropout(float(self.given["dropout_rate"])))
        return following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.view(x.size(0), -1))


class Encoder(nn.Module):
    """`transformer.py`, its standard architecture."""

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__()
        width, length = int(given["embedding_size"]), int(given["seq_length"])
        self.embedding = nn.Embedding(int(given["input_size"]), width)
        self.positional_encoding = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width, int(given["num_heads"]), int(given["ff_hidden_size"]), float(given["dropout_rate"]), batch_first=True
        )
        self.model = nn.TransformerEncoder(layer, int(given["num_layers"]), enable_nested_tensor=False)
        self.fc_out = nn.Linear(width, int(given["num_classes"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.positional_encoding
        x = self.model(x)
        x = x.mean(dim=1)
        return self.fc_out(x)


class ConvBlock(nn.Module):
    """`cnn.py`'s block."""

    def __init__(self, channels: int, filters: int, given: dict[str, str], kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, filters, kernel, stride, kernel // 2)]
        if given["batchnorm"] == "True":
            layers.append(nn.BatchNorm2d(filters))
        layers.append(ACTIVATIONS[given["act"]]())
        if given["dropout"] == "True":
            layers.append(nn.Dropout(float(given["dropout_rate"])))
        self.block = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int, given: dict[str, str]) -> None:
        super().__init__()
        self.conv1 = ConvBlock(channels, filters, given, stride=stride)
        self.conv2 = ConvBlock(filters, filters, given)
        norm = nn.BatchNorm2d(filters) if given["batchnorm"] == "True" else nn.Identity()
        same = channels == filters and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(channels, filters, 1, stride), norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.shortcut(x)
        x = self.conv1(x)
        x = self.conv2(x)
        return x + residual


class CNN(nn.Module):
    """`cnn.py` without pooling layers, which its launcher does not ask for."""

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__()
        self.given = given
        self.size = int(given["input_size"])
        channels = int(given["input_channels"])
        self.blocks = nn.ModuleList()
        channels = self.residual(channels) if given["arch"] == "residual" else self.plain(channels)
        self.global_avg_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, int(given["num_classes"]))
        self.final_activation = nn.Softmax(dim=1)

    @property
    def depth(self) -> int:
        return int(self.given["depth"])

    @property
    def base(self) -> int:
        return int(self.given["base_filters"])

    def residual(self, channels: int) -> int:
        growth = (MOST_FILTERS / self.base) ** (1 / self.depth)
        for number in range(self.depth // 2):
            filters = min(int(self.base * growth**number), MOST_FILTERS)
            stride = 2 if number % 2 == 1 and self.size > 7 else 1
            self.blocks.append(ResidualBlock(channels, filters, stride, self.given))
            channels = filters
            self.size //= stride
            if self.size <= 7:
                break
        return channels

    def plain(self, channels: int) -> int:
        for number in range(self.depth):
            filters = self.filters(number)
            self.blocks.append(ConvBlock(channels, filters, self.given))
            channels = filters
        return channels

    def filters(self, number: int) -> int:
        depth, base, arch = self.depth, self.base, self.given["arch"]
        ratio = MOST_FILTERS / base
        if arch == "pyramid":
            return min(int(base * ratio ** (number / depth)), MOST_FILTERS)
        if arch == "reverse_pyramid":
            return max(int(base / (ratio ** (1 / depth)) ** number), 1)
        if arch == "bottleneck":
            growth = 2.0 if depth <= 2 else ratio ** (1 / (depth - 1))
            return base * 2 if number == 0 else min(int(base * growth ** (number - 1)), MOST_FILTERS)
        if arch == "gradual":
            return min(int(base * (ratio ** (1 / (2 * depth))) ** number), MOST_FILTERS)
        if arch == "hourglass":
            half = depth // 2
            if number < half:
                return min(int(base * (ratio ** (1 / half)) ** number), MOST_FILTERS)
            return max(int(base * (ratio ** (1 / (depth - half))) ** (depth - number - 1)), base)
        if arch == "uniform":
            return base
        raise ValueError(f"GPUMemNet has no architecture {arch!r}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.global_avg_pool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return self.final_activation(x)
