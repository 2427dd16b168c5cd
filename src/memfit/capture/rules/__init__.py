"""Rules: where the target runs something else than meta tensors do, one small function each.

One file a subject, CPU and CUDA side by side; each says which ops it covers and which of torch's sources define them.
A file of rules has up to three tables, each by device type and then by name:

`FUNCTIONS`   torch functions whose composition differs. Called with the context and the function's arguments, a rule
              makes the calls that the target would make, or returns `NotImplemented` to let the function run as it is.
`KERNELS`     aten ops whose results have other sizes on the target than their meta kernel says. Called with the
              context, the op and its arguments, a rule returns the results as meta tensors.
`WORKSPACES`  aten ops that allocate and free memory inside themselves. Called with the context, the op, its arguments
              and its results, a rule returns the bytes held at the highest point beyond the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture.rules.base import Rule, RuleContext
from memfit.capture.rules.measured_kernels import DECOMPOSITIONS, is_decomposition

__all__ = ["Rule", "RuleContext", "Rules", "rules_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one device type."""

    functions: dict[str, Rule]
    kernels: dict[str, Rule]
    workspaces: dict[str, Rule]
    decomposition: Rule

    def unlisted(self, name: str) -> Rule | None:
        """Return the rule of an op without one of its own, if it is a decomposition or transform."""
        return self.decomposition if is_decomposition(name) else None


def rules_for(device_type: str) -> Rules:
    """Return every rule of a device type."""
    # Imported here, because their tables ask torch for hundreds of ops: 0.1 s that what captures nothing need not wait.
    from memfit.capture.rules import (
        attention,
        convolution_pooling,
        efficient_attention,
        elementwise,
        flash_attention,
        flex_attention,
        foreach,
        indexing,
        linear_cross_entropy,
        measured_kernels,
        normalization,
        products,
        recurrent,
        reductions,
        softmax_losses,
    )

    attentions = (attention, flash_attention, efficient_attention, flex_attention)
    layers = (convolution_pooling, linear_cross_entropy, normalization, products, recurrent, softmax_losses)
    modules = (*attentions, *layers, elementwise, foreach, indexing, measured_kernels, reductions)
    functions, kernels, workspaces = (
        {name: rule for module in modules for name, rule in getattr(module, table, {}).get(device_type, {}).items()}
        for table in ("FUNCTIONS", "KERNELS", "WORKSPACES")
    )
    return Rules(
        functions=functions,
        kernels=kernels,
        workspaces=workspaces,
        decomposition=DECOMPOSITIONS[device_type],
    )
