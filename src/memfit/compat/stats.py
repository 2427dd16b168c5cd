"""What is known about each module of a step, under the keys of PyTorch's `ilp_utils`.

Sizes are bytes and times milliseconds, children included. Note [Several calls]: of a module that is called
more than once, `act_fw_per_module`, `input_per_module`, `output_per_module` and the times are sums over its
calls (the sizes over those of one forward pass, the largest such sum when gradients are accumulated over
several). The four levels `grad_total`, `act_total`, `act_bw_per_module` and `act_grad_per_module` are of one
and the same call, the one at which their sum without `act_bw_per_module` is highest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypedDict


class ModOrder(TypedDict):
    """The modules in the order in which forward and backward begin and end; every call is listed."""

    fw_pre_order: list[str]
    bw_pre_order: list[str]
    fw_post_order: list[str]
    bw_post_order: list[str]


class ModRuntime(TypedDict):
    """One module's milliseconds in forward and in backward."""

    fw: float
    bw: float


class ModStats(TypedDict):
    """One module (Note [Several calls]). The levels are 0 for a module of which nothing runs in backward."""

    fqn: str
    param_per_module: int
    grad_per_module: int
    """Gradients of its parameters; frozen ones have none."""
    grad_total: int
    """Gradients of the whole model that exist when the module's backward begins."""
    act_fw_per_module: int
    """What its forward leaves for backward, without its input and output."""
    act_bw_per_module: int
    """What is left of forward, of the whole model, at the peak of the module's backward."""
    act_grad_per_module: int
    """What the module's backward has added at its peak: gradients of activations, temporaries, and the parameter
    gradients made by the innermost module that runs at that moment."""
    act_total: int
    """What forward has made and not freed when the module's forward ends: its own, its input, all before it."""
    input_per_module: int
    output_per_module: int
    fw_runtime_per_module: float
    bw_runtime_per_module: float
    is_leaf: bool
    """Whether there is nothing to choose: the module has no trade-off and cannot be checkpointed."""
    sac_runtime: float
    """The time to recompute all of it."""
    sac_memory: int
    """The bytes of all results in it that can be recomputed, also of those that autograd does not keep."""
    n_segments: int
    """The pieces of the line fitted to the trade-off; their slopes, intercepts and ends follow."""
    slopes: list[float]
    intercepts: list[float]
    breakpoints: list[float]
    tradeoff_curve: OrderedDict[float, float]
    """Share of `sac_memory` discarded to share of `sac_runtime` spent, in greedy order."""


class ModuleInfo(TypedDict):
    """The modules of a step, in forward order, and the orders they run in."""

    mod_order: ModOrder
    mod_stats: list[ModStats]
