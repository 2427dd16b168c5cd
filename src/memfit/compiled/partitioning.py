"""Split one joint graph into forward and backward with the fastest saved set that fits the budget."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import fx

from memfit.compiled.joint_graph import JointGraph, read_joint_graph
from memfit.compiled.op_times import OpTimes
from memfit.compiled.program import Choice, Outside, SavedSetProblem
from memfit.torch_private.partitioner import (
    is_tagged,
    partition,
    partition_as_tagged,
    partition_with_budget,
    tag_recomputed,
    tag_saved,
)
from memfit.torch_private.pytree import tree_leaves

_SETTINGS = (
    *((fraction, "dp") for fraction in (1.0, 0.999, 0.75, 0.5, 0.25, 0.1, 0.0)),
    *((fraction, "ilp") for fraction in (0.75, 0.5, 0.3, 0.1) if importlib.util.find_spec("scipy")),
)
"""Fractions of saved activations, and torch's own solvers, whose sets are looked at beside the program's; 1.0 is what
torch does without a budget. `dp` rounds sizes, `ilp` does not and needs scipy."""


class Splitter:
    """A partitioner for torch.compile; afterwards it has what it chose, and what the choice was made from.

    With an `earlier` one, which has split the same graph, it takes the `wanted` choice and searches no more.
    """

    def __init__(
        self,
        outside: Outside,
        budget_bytes: int,
        times: OpTimes,
        *,
        earlier: Splitter | None = None,
        wanted: Choice | None = None,
    ) -> None:
        self.outside, self.budget_bytes, self._times = outside, budget_bytes, times
        self._earlier, self._wanted = earlier, wanted
        self.graphs = 0
        self.choice: Choice | None = None
        self.problem: SavedSetProblem | None = None
        self.others: tuple[Choice, ...] = ()
        """What torch saves by itself: first without a budget, then with fractions."""

    @property
    def own_choice(self) -> Choice:
        """What torch saves without a budget."""
        return self.others[0]

    def __call__(self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> tuple[Any, Any]:
        """Split the graph; a graph that the user's own checkpointing has decided about is split as torch does."""
        self.graphs += 1
        kwargs["num_fwd_outputs"] = num_fwd_outputs
        graph = read_joint_graph(joint, num_fwd_outputs, self._times, self._times.ms_per_byte)
        if any(map(is_tagged, joint.graph.nodes)) or not any(graph.is_backward):
            return partition(joint, inputs, **kwargs)
        earlier, wanted = self._earlier, self._wanted
        problem = SavedSetProblem(graph, self.outside)
        if earlier is not None and wanted is not None and earlier.has_split(graph):
            self.others = earlier.others
        else:
            self.others = tuple(self._by_torch(problem, joint, inputs, *setting, kwargs) for setting in _SETTINGS)
            wanted = problem.choose(self.budget_bytes, self.others)
        self.problem = problem
        if wanted.saved == self.own_choice.saved:
            forward, backward = partition(joint, inputs, **kwargs)
        else:
            tag(graph, problem.values, wanted.saved)
            forward, backward = partition_as_tagged(joint, inputs, **kwargs)
        self.choice = problem.judge(saved_by(graph, forward, num_fwd_outputs), wanted.found_by)
        return forward, backward

    def has_split(self, graph: JointGraph) -> bool:
        """Return whether a graph is the one that this has split."""
        return self.problem is not None and self.problem.graph.value_of == graph.value_of

    def _by_torch(
        self,
        problem: SavedSetProblem,
        joint: fx.GraphModule,
        inputs: Any,
        fraction: float,
        solver: str,
        kwargs: dict[str, Any],
    ) -> Choice:
        """Judge what one of torch's own solvers saves with this fraction."""
        forward, _ = partition_with_budget(joint, inputs, fraction, solver, **kwargs)
        found_by = f"torch at {fraction}" + (f" by {solver}" if solver != "dp" else "")
        return problem.judge(saved_by(problem.graph, forward, kwargs["num_fwd_outputs"]), found_by)


def tag(graph: JointGraph, values: tuple[int, ...], saved: frozenset[int]) -> None:
    """Tell torch's partitioner to save exactly these values.

    An op with several outputs is recomputed by way of them: the tag on a random op would give its generator a state of
    its own, which attention without dropout does not need.
    """
    for value in values:
        node = graph.nodes[value]
        if value in saved:
            tag_saved(node)
        else:
            for each in graph.outputs[value] or (node,):
                tag_recomputed(each)


def saved_by(graph: JointGraph, forward: fx.GraphModule, num_fwd_outputs: int) -> frozenset[int]:
    """Return the values that a forward graph hands to its backward."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    names = [node.name for node in tree_leaves(output.args)[num_fwd_outputs:] if isinstance(node, fx.Node)]
    return frozenset(graph.value_of[name] for name in names if name in graph.value_of)
