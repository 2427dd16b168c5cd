"""Optimizers of a model whose parameters become other objects: the same groups and state for the new ones.

`fully_shard` puts DTensors in the place of a model's parameters. An optimizer that was made before steps the old ones,
which nobody uses any more; here its groups get the new ones and its state is sharded as they are, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from memfit.errors import InputError

_COUNTER = "step"
"""The state in which torch's optimizers count their steps: one number, also of a parameter that is one number."""

Convert = Callable[[torch.Tensor, torch.Tensor, str, Any], Any]
"""Takes a parameter, the one in its place, and the name and value of a state of it; returns that of the new one."""


@dataclass(frozen=True, slots=True)
class OptimizerBefore:
    """The parameters and the state that an optimizer had, to be restored when sharding fails."""

    optimizer: torch.optim.Optimizer
    groups: list[list[torch.Tensor]]
    state: list[tuple[Any, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerBefore:
        """Note what an optimizer holds; its tensors are not copied, because sharding makes new ones."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        return cls(optimizer, groups, list(optimizer.state.items()))

    def restore(self) -> None:
        """Make the optimizer what it was."""
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"][:] = parameters
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)


def check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Refuse an optimizer whose state cannot be sharded with its parameters; nothing is changed.

    A state of the parameter's shape is sharded, one number stays. Anything else (the factors of Adafactor and Shampoo,
    the history of LBFGS) means something that only the optimizer knows.
    """
    kind = type(optimizer).__name__
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or parameter not in names:
            continue
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if not _can_be_sharded(parameter, value):
                raise InputError(
                    f"{kind} keeps {name!r} of parameter {names[parameter]!r}, {_described(value)}, which cannot be "
                    f"sharded with the parameter's {list(parameter.shape)}: apply the plan before the optimizer's "
                    "first step, or make the optimizer after apply"
                )


def shard_optimizer(
    optimizer: torch.optim.Optimizer, sharded: Mapping[torch.Tensor, nn.Parameter]
) -> OptimizerBefore | None:
    """Let an optimizer step the sharded parameters, with its state sharded as they are; None where it steps others.

    Every rank takes its own rows of what it has: nothing is sent.
    """
    return _replace(optimizer, sharded, _shard_state)


def unshard_optimizer(optimizer: torch.optim.Optimizer, whole: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Let an optimizer step whole parameters again, with its whole state; every rank must call it."""
    _replace(optimizer, whole, _unshard_state)


def shard_like(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return this rank's rows of a tensor, as those of a sharded parameter, in memory of their own."""
    found = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return DTensor.from_local(
        # A view of the whole tensor otherwise, which would stay in memory; shards may be on the host.
        found.to_local().clone().to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def unshard(value: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank; one that is not sharded is returned as it is."""
    if not isinstance(value, DTensor):
        return value
    found = value.full_tensor()
    # Rows that do not divide by the ranks are gathered with padding, of which the result may be a view.
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def _replace(
    optimizer: torch.optim.Optimizer, other: Mapping[torch.Tensor, nn.Parameter], convert: Convert
) -> OptimizerBefore | None:
    """Put parameters in the place of others, in the same groups and order."""
    if not any(parameter in other for group in optimizer.param_groups for parameter in group["params"]):
        return None
    before = OptimizerBefore.of(optimizer)
    state: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for parameter, values in before.state:
            new = other.get(parameter) if isinstance(parameter, torch.Tensor) else None
            if new is None:
                state.append((parameter, values))
            else:
                made = {name: convert(parameter, new, name, value) for name, value in values.items()}
                state.append((new, made))
    for group in optimizer.param_groups:  # in place: LR schedulers hold the groups, some optimizers the lists
        group["params"][:] = [other.get(parameter, parameter) for parameter in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)
    return before


def _shard_state(parameter: torch.Tensor, new: torch.Tensor, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or name == _COUNTER or value.shape != parameter.shape:
        return value
    assert isinstance(new, DTensor)
    return shard_like(value, new)


def _unshard_state(parameter: torch.Tensor, new: torch.Tensor, name: str, value: Any) -> Any:
    return unshard(value) if isinstance(value, torch.Tensor) else value


def _can_be_sharded(parameter: torch.Tensor, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape == parameter.shape or value.numel() == 1
    if isinstance(value, Mapping):
        return not any(isinstance(each, torch.Tensor) for each in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return not any(isinstance(each, torch.Tensor) for each in value)
    return True


def _described(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
