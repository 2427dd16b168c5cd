"""The distributions that torch's random ops draw from, and their values at a quantile.

Extremes are the ends of a distribution, or for one without ends what lies six standard deviations away. A tensor has
the same value everywhere at the extremes and in the middle; at other quantiles its elements are spread evenly over the
distribution, beginning with the quantile, so that the place of the largest (`argmax`, `argsort`) changes with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_private.dispatch import schema_of

_FEW = 8
_FARTHEST = 6.0
_EVEN = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What an op draws from."""

    at: Callable[[float], torch.Tensor]
    """Return values at a quantile, in the result's shape."""
    count: int | None = None
    """How many values each element can have, when these are few."""

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> Distribution | None:
        """Return the distribution of a call; None when its op's is not known or it has no values to choose from."""
        schema = schema_of(func)
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        make = _DISTRIBUTIONS.get(schema.name.partition("::")[2])
        return None if make is None or result.numel() == 0 else make(named, result)


def _fractions(quantile: float, result: torch.Tensor) -> torch.Tensor:
    n = result.numel()
    if quantile in _EVEN:
        return torch.full(result.shape, quantile, dtype=torch.float64)
    return ((torch.arange(n, dtype=torch.float64) / n + quantile) % 1).view(result.shape)


def _normal_fractions(quantile: float, result: torch.Tensor) -> torch.Tensor:
    """Standard normal values."""
    z = math.sqrt(2) * torch.erfinv(2 * _fractions(quantile, result) - 1)
    return z.clamp(-_FARTHEST, _FARTHEST)


def _uniform(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    below_one = 1 - torch.finfo(result.dtype).eps / 2
    return Distribution(lambda q: low + (high - low) * below_one * _fractions(q, result))


def _normal(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    return Distribution(lambda q: mean + std * _normal_fractions(q, result))


def _log_normal(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    mean, std = named.get("mean", 1.0), named.get("std", 2.0)
    return Distribution(lambda q: (mean + std * _normal_fractions(q, result)).exp())


def _exponential(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    rate, least = named.get("lambd", 1.0), torch.finfo(result.dtype).eps
    return Distribution(lambda q: -torch.log1p(-_fractions(q, result).clamp(least, 1 - 1e-12)) / rate)


def _cauchy(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    median, sigma = named.get("median", 0.0), named.get("sigma", 1.0)
    return Distribution(
        lambda q: median + sigma * torch.tan(math.pi * (_fractions(q, result).clamp(1e-6, 1 - 1e-6) - 0.5))
    )


def _geometric(named: dict[str, Any], result: torch.Tensor) -> Distribution | None:
    p = named["p"]
    if not 0 < p < 1:
        return None
    return Distribution(
        lambda q: 1 + (torch.log1p(-_fractions(q, result).clamp(0, 1 - 1e-12)) / math.log1p(-p)).floor()
    )


def _integers(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    low, high = named.get("low", named.get("from")) or 0, named.get("high", named.get("to"))
    if high is None:
        whole = not result.is_floating_point() and result.dtype is not torch.bool
        high = torch.iinfo(result.dtype).max if whole else 2 if result.dtype is torch.bool else 1 << 11
    span = min(high - low, 1 << 53)  # above, not every integer is a float64
    return Distribution(lambda q: low + _index(_fractions(q, result), span), span if span <= _FEW else None)


def _index(fractions: torch.Tensor, count: int) -> torch.Tensor:
    return (fractions * count).long().clamp(max=count - 1)


def _coin(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    p = named["p"] if "p" in named else named["self"]
    p = p.double() if isinstance(p, torch.Tensor) else torch.tensor(float(p), dtype=torch.float64)
    sure = bool(((p <= 0) | (p >= 1)).all())
    return Distribution(lambda q: (_fractions(q, result) >= 1 - p) & (p > 0), 1 if sure else 2)


def _coin_in_place(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    return _coin({"p": 0.5, **named}, result)


def _binomial(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    count, p = named["count"].double(), named["prob"].double()
    spread = (count * p * (1 - p)).sqrt()

    def at(quantile: float) -> torch.Tensor:
        if quantile in (0.0, 1.0):
            return (count * quantile).where((p > 0) & (p < 1), count * p)
        return (count * p + spread * _normal_fractions(quantile, result)).round().clamp(min=0).minimum(count)

    return Distribution(at)


def _poisson(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    rate = named["self"].double()
    return Distribution(lambda q: (rate + rate.sqrt() * _normal_fractions(q, result)).round().clamp(min=0))


def _permutation(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    n = result.numel()

    def at(quantile: float) -> torch.Tensor:
        places = torch.arange(n)
        return places.flip(0) if quantile == 1 else places.roll(-int(quantile * n))

    return Distribution(at, 1 if n == 1 else None)


def _multinomial(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    weights = named["self"].reshape(-1, named["self"].size(-1))
    possible = [row.nonzero().flatten() for row in weights]
    again = named.get("replacement", False)
    samples = result.size(-1)

    def at(quantile: float) -> torch.Tensor:
        rows = []
        for places in possible:
            first = min(int(quantile * len(places)), len(places) - 1)
            rows.append(places[first].expand(samples) if again else places.roll(-first)[:samples])
        return torch.stack(rows).view(result.shape)

    most = max(map(len, possible))
    return Distribution(at, most if most <= _FEW else None)


_DISTRIBUTIONS: dict[str, Callable[[dict[str, Any], torch.Tensor], Distribution | None]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "normal_functional"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random", "random_"), _integers),
    "bernoulli": _coin,
    "bernoulli_": _coin_in_place,
    **dict.fromkeys(("exponential", "exponential_"), _exponential),
    **dict.fromkeys(("log_normal", "log_normal_"), _log_normal),
    **dict.fromkeys(("cauchy", "cauchy_"), _cauchy),
    **dict.fromkeys(("geometric", "geometric_"), _geometric),
    "binomial": _binomial,
    "poisson": _poisson,
    "randperm": _permutation,
    "multinomial": _multinomial,
}
