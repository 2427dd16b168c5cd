"""torch.compile's `activation_memory_budget`: its partitioner on the AOT graphs, which plain PyTorch ops then run.

The backend is `aot_eager_decomp_partition` (Inductor's decompositions) with boxed calls, so that a graph frees its
inputs when it has used them. There are no fused kernels, so its times mean nothing here: compared are the FLOPs that
run again and the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from memfit import Step
from memfit.capture.rules.flops import FLOPS


class Compiled:
    """A step whose model is compiled at a budget between 0 (everything that may be runs again) and 1 (nothing must)."""

    def __init__(self, step: Step, budget: float) -> None:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._inductor.compile_fx import select_decomp_table

        self.recomputed_flops = 0
        self._found: list[int] = []

        def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            self._found.append(_recomputed_flops(forward, backward))
            return forward, backward

        backend = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            decompositions=select_decomp_table(),
            partition_fn=partition,
        )
        assert isinstance(step.model, nn.Module)
        self._step, self._budget = step, budget
        self.optimizer = step.build_optimizer(step.model)
        torch._dynamo.reset()
        step.model.forward = torch.compile(step.model.forward, backend=backend, dynamic=False)  # type: ignore[method-assign]

    def run(self) -> None:
        """One step. The first compiles; where a later one does so again, its graphs are those that count."""
        import torch._functorch.config as config

        model = self._step.model
        assert isinstance(model, nn.Module)
        with config.patch(activation_memory_budget=self._budget):
            self._step.execute(model, self.optimizer, "cpu")
        if self._found:
            self.recomputed_flops, self._found = sum(self._found), []


def _recomputed_flops(forward: Any, backward: Any) -> int:
    """FLOPs of the nodes that both graphs compute, which is how the partitioner itself counts them."""
    again = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    return sum(_flops(node) for node in backward.graph.nodes if node.op == "call_function" and node.name in again)


def _flops(node: Any) -> int:
    packet = getattr(node.target, "_overloadpacket", None)
    count: Callable[..., int] | None = FLOPS.get(str(packet)) or flop_registry.get(packet)
    if count is None:
        return 0
    values = tree_map_only(torch.fx.Node, lambda each: each.meta.get("val"), (node.args, node.kwargs))
    return int(count(*values[0], **values[1], out_val=node.meta.get("val")))
