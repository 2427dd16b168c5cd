"""What the behaviour tests of the sharded runtime share: sharded and plain models, and a record of gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from memfit.sharded import shard
from memfit.sharded.comm import ShardComm
from memfit.sharded.fully_shard import get_runtime
from memfit.sharded.runtime import ShardedRuntime
from tests.distributed.sharded_models import GPT, VOCABULARY
from tests.distributed.sharded_parity import average, check_equal, check_freed, whole_gradients, whole_parameters

Built = Callable[[], nn.Module]


def tokens_of(number: int) -> torch.Tensor:
    """A batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randint(0, VOCABULARY, (2, 6), generator=generator)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """The loss of a language model on a batch."""
    tokens = tokens_of(number)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


class Trained:
    """A model with its optimizer, sharded or plain; a plain one is trained by averaging gradients."""

    def __init__(self, build: Built = GPT, *, plain: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        model = build()
        self.plain = plain
        self.model = model if plain else shard(model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)

    def step(self, number: int, loss: Callable[[nn.Module, int], torch.Tensor] = loss_of) -> float:
        """One step on a batch."""
        found = loss(self.model, number)
        found.backward()
        self.update()
        return found.item()

    def update(self, *, set_to_none: bool = True) -> None:
        """Average the gradients of a plain model, step and forget them."""
        if self.plain:
            average(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if not self.plain:
            check_freed(self.model)

    def check_equals(self, other: Trained) -> None:
        """Fail unless both have the same parameters."""
        check_equal("parameter", whole_parameters(self.model), whole_parameters(other.model))


def check_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Fail unless both have the same gradients."""
    check_equal("gradient", whole_gradients(ours), whole_gradients(theirs))


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """What a sharded model does, in order: gathers by unit and phase, and units that run."""
    runtime = get_runtime(model)
    seen: list[str] = []
    links = {
        id(link): link for link in (*runtime.links, *(unit.reshard_comm for unit in runtime.units if unit.reshard_comm))
    }
    for link in links.values():
        _spy(link, seen)
    handles = [_note(unit.module, unit.name, seen) for unit in runtime.units]
    try:
        yield seen
    finally:
        for link in links.values():
            del link.__dict__["gather"]
        for handle in handles:
            handle.remove()


def gathers(seen: Sequence[str], phase: str) -> list[str]:
    """The units that were gathered in a phase, in order."""
    found = [each.removeprefix("gather of ") for each in seen if each.endswith(f" in {phase}")]
    return [each.removesuffix(f" in {phase}").removeprefix("unit ").strip("'") for each in found]


def states(runtime: ShardedRuntime) -> set[str]:
    """The states that units are in."""
    return {unit.state.value for unit in runtime.units}


def _spy(link: ShardComm, seen: list[str]) -> None:
    gather = link.gather

    def noted(whole: torch.Tensor, tag: int, about: str) -> Any:
        if about.startswith("gather of"):
            seen.append(about)
        return gather(whole, tag, about)

    link.__dict__["gather"] = noted


def _note(module: nn.Module, name: str, seen: list[str]) -> Any:
    return module.register_forward_pre_hook(lambda *_: seen.append(f"run {name}"))
