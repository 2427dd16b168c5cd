"""The partitioner of torch.compile: where a function of memfit's takes its place, and how it is told what to save.

A torch without one of these names cannot plan a compiled model: `missing_names` lists them, and
`memfit.compiled.compile` refuses before anything is compiled. They are looked up when they are used, because the
compiler takes longer to load than all of memfit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

CUSTOM_PARTITIONER = "custom_partitioner_fn"
"""The option of torch.compile that takes a partitioner (torch/_inductor/config.py; in torch 2.8 and later)."""

_NEEDED = (
    ("torch._inductor.config", CUSTOM_PARTITIONER),
    ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
    ("torch._functorch.config", "activation_memory_budget"),
    ("torch._functorch.config", "activation_memory_budget_solver"),
    ("functorch.compile", "min_cut_rematerialization_partition"),
    ("torch._dynamo.exc", "Unsupported"),
)
_RULES = ("ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains", "ban_recompute_materialized_backward")
_RULES = (*_RULES, "ban_recompute_not_in_allowlist", "ban_recompute_reductions")
"""What keeps torch from recomputing without tags (torch/_functorch/config.py)."""
_TAG = "recompute"
"""Where a node of the joint graph says whether it is recomputed (torch/_functorch/partitioners.py, `must_recompute`);
torch.utils.checkpoint sets it in compiled models."""


def missing_names() -> tuple[str, ...]:
    """Return the names that this torch does not have, in full."""
    return tuple(f"{place}.{name}" for place, name in _NEEDED if _find(place, name) is None)


def _find(place: str, name: str) -> Any:
    try:
        module = importlib.import_module(place)
    except ImportError:
        return None
    missing = object()
    found = getattr(module, name, missing)
    return None if found is missing else (found, "an option may be None")


@functools.cache
def _partitioner_class() -> type:
    base: Any = importlib.import_module("torch._inductor.custom_graph_pass").CustomPartitionerFn

    class Partitioner(base):
        """Hands a joint graph to a function; Inductor's caches take what follows by the two graphs themselves."""

        def __init__(self, split: Callable[..., Any]) -> None:
            self._split = split
            self._token = uuid.uuid4().hex

        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            kwargs.pop("compiler", None)
            return self._split(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "memfit"

        def __reduce__(self) -> tuple[Any, ...]:
            """Stand in a cache's key as no other partitioner: what was split for another budget is not for this one."""
            return str, (self._token,)

    return Partitioner


def make_partitioner(split: Callable[..., Any]) -> Any:
    """Wrap `split(joint, inputs, num_fwd_outputs=..., ...)` as a partitioner (torch/_inductor/custom_graph_pass.py)."""
    return _partitioner_class()(split)


def partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split a joint graph into forward and backward as torch does (torch/_functorch/partitioners.py)."""
    return importlib.import_module("functorch.compile").min_cut_rematerialization_partition(joint, inputs, **kwargs)


def partition_as_tagged(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split a joint graph by its tags alone: nothing else is kept from being recomputed."""
    config: Any = importlib.import_module("torch._functorch.config")
    rules = {rule: False for rule in _RULES if hasattr(config, rule)}
    with config.patch(activation_memory_budget=1.0, **rules):
        return partition(joint, inputs, **kwargs)


def partition_with_budget(
    joint: torch.fx.GraphModule, inputs: Any, fraction: float, solver: str, **kwargs: Any
) -> tuple[Any, Any]:
    """Split a copy of a joint graph with torch's own fraction of saved activations (torch/_functorch/config.py)."""
    config: Any = importlib.import_module("torch._functorch.config")
    with config.patch(activation_memory_budget=fraction, activation_memory_budget_solver=solver):
        return partition(_copy(joint), inputs, **kwargs)


def _copy(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    returned: Any = graph.graph_copy(joint.graph, {})
    output = graph.output(returned)
    output.meta = dict(joint.graph.output_node().meta)
    return torch.fx.GraphModule(joint, graph)


def tag_saved(node: torch.fx.Node) -> None:
    """Have the partitioner save a node where the backward needs it."""
    node.meta[_TAG] = CheckpointPolicy.MUST_SAVE


def tag_recomputed(node: torch.fx.Node) -> None:
    """Have the partitioner compute a node in the backward."""
    node.meta[_TAG] = CheckpointPolicy.MUST_RECOMPUTE


def is_tagged(node: torch.fx.Node) -> bool:
    """Return whether the user's own checkpointing has decided about a node."""
    return node.meta.get(_TAG) is not None


def has_cpp_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler (torch/_inductor/cpp_builder.py); True where it cannot be asked."""
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    find = getattr(builder, "get_cpp_compiler", None)
    try:
        return find is None or bool(find())
    except RuntimeError:
        return False


@contextlib.contextmanager
def unlimited_recompiles() -> Iterator[None]:
    """Let one model be compiled for one budget after another in the block (torch/_dynamo/config.py).

    Torch counts these as recompilations of the same code and gives up at the eighth; without the option it does.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    limits = [name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    with config.patch(**dict.fromkeys(limits, 10_000)):
        yield


def recompiles_of_its_own() -> dict[str, Any]:
    """Return the argument of torch.compile with which a call counts its own recompilations only (torch/__init__.py).

    Models that were compiled for other budgets would use up the limit of the one that is returned. Older versions of
    torch have no such argument: there they do.
    """
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def graph_break_errors() -> tuple[type[Exception], ...]:
    """Return the errors of `fullgraph=True` where a model is not one graph (torch/_dynamo/exc.py)."""
    return (importlib.import_module("torch._dynamo.exc").Unsupported,)
