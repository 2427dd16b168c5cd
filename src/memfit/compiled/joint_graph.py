"""The joint graph of forward and backward, as AOTAutograd makes it: which values it computes, of what, for whom.

A view is no value of its own: it stands for the value that it is a view of, and so does an output of an op with
several. Parameters, buffers and inputs of the model are there all the time and are left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.errors import MissingFeatureError
from memfit.torch_private.dispatch import OpOverload, schema_of
from memfit.torch_private.pytree import tree_leaves

FUSED_NAMES = frozenset(
    {"cat", "clone", "convert_element_type", "embedding", "full", "full_like", "gather", "index", "iota", "arange"}
    | {"scalar_tensor", "zeros_like", "ones_like", "new_zeros", "constant_pad_nd", "slice_scatter", "select_scatter"}
    | {"inductor_random", "inductor_lookup_seed", "broadcast_in_dim", "_to_copy", "copy_", "copy", "lift_fresh_copy"}
    | {"mean", "sum", "amax", "amin", "var", "var_mean", "any", "all", "argmax", "prepare_softmax_online", "fma"}
)
"""Ops that Inductor fuses and that have no tag of torch's that says so."""
_FUSED_TAGS = ("pointwise", "reduction")
_VIEW_NAMES = frozenset({"_unsafe_view", "reshape", "alias", "detach", "lift_fresh"})
"""Views whose schema does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """Values of the joint graph by number, in its order.

    `nodes` are the ones that compute each value, `outputs` the other nodes of those with several outputs. `inputs` are
    numbers of earlier values. `is_backward` are values that depend on a gradient of an output. `fixed` values cannot be
    computed twice. `forward_outputs` and `backward_outputs` are kept by the caller.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    value_bytes: tuple[int, ...]
    is_extern: tuple[bool, ...]
    is_backward: tuple[bool, ...]
    is_fixed: tuple[bool, ...]
    forward_outputs: frozenset[int]
    backward_outputs: frozenset[int]
    tangents: frozenset[int]
    value_of: dict[str, int]
    """The value that each node stands for, by the node's name."""
    op_ms: tuple[float, ...]
    ms_per_byte: float
    """What it costs to read or write a buffer between kernels."""


def read_joint_graph(
    joint: fx.GraphModule, num_fwd_outputs: int, op_ms: Callable[[fx.Node, bool], float], ms_per_byte: float
) -> JointGraph:
    """Read the values of a joint graph; `op_ms` times a node, that is a kernel of its own or part of a fused one."""
    number: dict[fx.Node, int] = {}
    """What each node stands for; no number for what is there all the time."""
    nodes: list[fx.Node] = []
    outputs: list[list[fx.Node]] = []
    inputs: list[tuple[int, ...]] = []
    is_backward: list[bool] = []
    forward_outputs: set[int] = set()
    backward_outputs: set[int] = set()
    tangents: set[int] = set()
    for node in joint.graph.nodes:
        if node.op == "output":
            returned = tree_leaves(node.args)
            for place, value in enumerate(returned):
                if isinstance(value, fx.Node) and value in number:
                    (forward_outputs if place < num_fwd_outputs else backward_outputs).add(number[value])
            continue
        if node.op in ("placeholder", "get_attr"):
            if not node.name.startswith("tangents"):
                continue
            tangents.add(len(nodes))
        used = tuple(sorted({number[each] for each in node.all_input_nodes if each in number}))
        if _is_view(node):
            base = node.args[0]
            if isinstance(base, fx.Node) and base in number:
                number[node] = number[base]
                if node.target is operator.getitem and base is nodes[number[base]]:
                    outputs[number[base]].append(node)
            continue
        number[node] = len(nodes)
        nodes.append(node)
        outputs.append([])
        inputs.append(used)
        is_backward.append(node.op == "placeholder" or any(is_backward[each] for each in used))
        if _name(node) == "copy_":
            (backward_outputs if is_backward[-1] else forward_outputs).add(number[node])
    extern = [node.op == "call_function" and not _is_fused(node) for node in nodes]
    return JointGraph(
        nodes=tuple(nodes),
        outputs=tuple(map(tuple, outputs)),
        inputs=tuple(inputs),
        value_bytes=tuple(_bytes(node) for node in nodes),
        is_extern=tuple(extern),
        is_backward=tuple(is_backward),
        is_fixed=tuple(map(_is_fixed, nodes)),
        forward_outputs=frozenset(forward_outputs),
        backward_outputs=frozenset(backward_outputs),
        tangents=frozenset(tangents),
        value_of={node.name: value for node, value in number.items()},
        op_ms=tuple(
            op_ms(node, is_extern) if node.op == "call_function" else 0.0
            for node, is_extern in zip(nodes, extern, strict=True)
        ),
        ms_per_byte=ms_per_byte,
    )


def _name(node: fx.Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else str(target)


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function":
        return False
    return target is operator.getitem or bool(getattr(target, "is_view", False)) or _name(node) in _VIEW_NAMES


def _is_fused(node: fx.Node) -> bool:
    tags = {str(tag).rpartition(".")[2] for tag in getattr(node.target, "tags", ())}
    return any(tag in tags for tag in _FUSED_TAGS) or _name(node) in FUSED_NAMES


def _is_fixed(node: fx.Node) -> bool:
    """Return whether a value cannot be computed twice: random, or seen by other ranks."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    if node.target.namespace == "_c10d_functional":
        return True
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    named = {argument.name: place for place, argument in enumerate(schema_of(node.target).arguments)}
    if "dropout_p" not in named or not isinstance(node.meta.get("val"), tuple | list):
        return True
    place = named["dropout_p"]
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0))


def _bytes(node: fx.Node) -> int:
    """Return what the results of a node take."""
    total = 0
    for value in tree_leaves(node.meta.get("val")):
        if not isinstance(value, torch.Tensor):
            continue
        numel: Any = value.numel()
        if not isinstance(numel, int):
            raise MissingFeatureError(
                f"{node.name} has a size that depends on data or was marked dynamic, and its bytes are not known; "
                "compile for one shape (no torch._dynamo.mark_dynamic, no data-dependent shapes)"
            )
        total += numel * value.element_size()
    return total
