"""Autograd: which node runs, hooks for saved tensors, version counters, views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
"""The number of the backward that runs on this thread, -1 outside of one (torch/csrc/autograd/init.cpp)."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward runs (torch/csrc/autograd/init.cpp): the capture knows ops of the backward by it."""

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function at the end of the running backward (torch/autograd/variable.py), as FSDP2 does."""

set_version_counters = torch._C._autograd._unsafe_set_version_counter
"""Puts version counters back (torch/csrc/autograd/init.cpp): gathering into a parameter is no write of the user's."""

increment_versions: Callable[[Sequence[Tensor]], None] = torch._C._increment_version
"""Counts a write of tensors (torch/csrc/autograd/init.cpp): `torch.autograd.graph.increment_version` less its checks,
which every op of an optimizer would pay for."""

preserve_version_counters = torch.autograd._unsafe_preserve_version_counter
"""A block whose writes are not counted (torch/autograd/grad_mode.py): `verify` restores values in place."""

checkpoint_checks: dict[str, Callable[[Tensor], Any]] = torch.utils.checkpoint._allowed_determinism_checks_to_fns
"""What `torch.utils.checkpoint` compares between its two runs (torch/utils/checkpoint.py)."""

_hooks: Any = torch._C._autograd


def in_backward() -> bool:
    """Return whether a backward runs on this thread."""
    return current_graph_task_id() != -1


def next_sequence_number() -> int:
    """Return the number that autograd gives to the next node (`_get_sequence_nr`, torch/csrc/autograd/init.cpp).

    The capture joins ops of forward and backward by it.
    """
    return torch.autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """Return the number of a node (`_sequence_nr`, torch/csrc/autograd/python_cpp_function.cpp)."""
    return node._sequence_nr()


def top_saved_tensor_hooks() -> Any:
    """Return the innermost hooks for saved tensors, or None (torch/csrc/autograd/init.cpp)."""
    return _hooks._top_saved_tensors_default_hooks(True)


def pop_saved_tensor_hooks() -> None:
    """Pop the innermost hooks for saved tensors (torch/csrc/autograd/init.cpp)."""
    _hooks._pop_saved_tensors_default_hooks()


def push_saved_tensor_hooks(*hooks: Any) -> None:
    """Push hooks for saved tensors (torch/csrc/autograd/init.cpp)."""
    _hooks._push_saved_tensors_default_hooks(*hooks)


def saved_tensor_hooks_enabled() -> bool:
    """Return whether hooks for saved tensors are allowed here (torch/csrc/autograd/init.cpp)."""
    return _hooks._saved_tensors_hooks_is_enabled()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to (`Tensor._version`, torch/csrc/autograd/python_variable.cpp)."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of (`Tensor._base`, torch/csrc/autograd/python_variable.cpp)."""
    return tensor._base


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd takes a tensor for a view (`Tensor._is_view`, torch/_C/__init__.pyi)."""
    return tensor._is_view()


def tensor_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the table of a tensor's gradient hooks (`Tensor._backward_hooks`, torch/_tensor.py)."""
    return tensor._backward_hooks


def optimizers_in_backward(parameter: torch.Tensor) -> Sequence[torch.optim.Optimizer]:
    """Return what `_apply_optimizer_in_backward` (torch/distributed/optim/apply_optimizer_in_backward.py) left.

    It registers its hook with the node that accumulates the gradient, which a sharded parameter has none of.
    """
    return getattr(parameter, "_in_backward_optimizers", ())


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the table of hooks that run when a gradient has been accumulated, None where there are none.

    `Tensor._post_accumulate_grad_hooks` (torch/_tensor.py), which not every subclass has.
    """
    return getattr(tensor, "_post_accumulate_grad_hooks", None)
