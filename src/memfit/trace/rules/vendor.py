"""CPU kernels whose internal allocations are the vendor library's own choice: measured once on this machine."""

from __future__ import annotations

from typing import Any

from memfit.trace.probe import probe_workspace, signature
from memfit.trace.rules import RuleContext


def _probed(context: RuleContext, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """oneDNN reorders operands into layouts that depend on the instruction set (ATen/native/mkldnn)."""
    key = signature(func, args, kwargs)
    if key not in context.probed:
        context.probed[key] = probe_workspace(func, args, kwargs)
    return context.probed[key]


WORKSPACES = {
    "cpu": {
        "aten.convolution.default": _probed,
        "aten.convolution_backward.default": _probed,
        "aten.mkldnn_rnn_layer.default": _probed,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _probed,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _probed,
    }
}
