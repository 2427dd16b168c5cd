"""What a capture tells the user: errors with the op, the module and the line, and advice in the trace's notes."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.errors import InputError
from memfit.paths import alike, folded


class CaptureError(InputError):
    """A step that cannot be captured: names the op, the module and the line, and what to do.

    Without an op, the step's own code raised the error that is its `__cause__`. In place of a module, `module` may say
    "the loss", "the backward" or "the optimizer's step".
    """

    def __init__(self, problem: str, *, op: str, module: str, source: str, advice: str) -> None:
        self.op = op
        self.module = module
        self.source = source
        self.advice = advice
        place = module if module.startswith("the ") else f"module {module or '(root)'}"
        where = f"{f'op {op} in ' if op else ''}{place} at {source or 'an unknown line'}"
        super().__init__(f"{problem}\n  where: {where}\n  what to do: {advice}")


CaptureError.__module__ = "memfit"


DATA_DEPENDENT = (
    "the capture has shapes and no data, so nothing may depend on a tensor's values. Give the batch as real tensors if "
    "the value comes from it alone (up to 1,048,576 elements); otherwise take the branch or the .item() out of the "
    "step, or choose an implementation with fixed shapes (for mixtures of experts: grouped matrix products)"
)
NO_META_KERNEL = (
    "register a shape function for it with torch.library.register_fake, or capture a version of the model without it"
)
NO_KERNEL = (
    "PyTorch has no kernel of this op for this dtype on the target, and the step would fail there too; convert the "
    "tensor first, for example with .float(), or choose another target"
)
SPARSE = "sparse tensors cannot be captured; give the layer dense gradients (for an embedding: sparse=False)"
MADE_IN_STEP = "make parameters and modules before the step, as parts of the model"
PACKED = "packed sequences cannot be captured; give the padded sequence and its mask"
BAD_SHAPES = "check the batch given to Step against what the model's forward expects"


RAISED_BY_STEP = (
    "the step's own code raised this. Run the step once without memfit, on the same batch; if it works there, it asks "
    "for something that a capture, with shapes and no data, cannot answer: please report it"
)


class UnsupportedError(RuntimeError):
    """Raised by a rule for something that is not modelled; becomes a `CaptureError` with this advice."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem)
        self.advice = advice


_NO_DTYPE_KERNEL = re.compile(r"not implemented for '\w+'")
"""How torch says that a kernel does not take a dtype."""


def is_of_an_op(error: Exception) -> bool:
    """Tell whether an exception is of a kind that ops raise."""
    return isinstance(error, (RuntimeError, ValueError, IndexError, TypeError))


def explain_failure(error: Exception, *, op: str, module: str, source: str) -> CaptureError:
    """Return an exception as an error about the user's step: of this op or, without one, of the step's own code."""
    said = _first_line(error)
    if op:
        usual = SPARSE if "parse" in str(error) else BAD_SHAPES
        advice = getattr(error, "advice", NO_KERNEL if "not implemented for '" in said else usual)
        problem = said or type(error).__name__
    else:
        problem, advice = f"{type(error).__name__}{f': {said}' if said else ''}", RAISED_BY_STEP
    return CaptureError(problem, op=op, module=module, source=source, advice=advice)


def refusal_of(func: Any, error: Exception) -> tuple[str, str] | None:
    """Return why a meta kernel failed, and what to do, where the reason is plain."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return "the step depends on the values of a tensor", DATA_DEPENDENT
    if isinstance(error, NotImplementedError) and not _NO_DTYPE_KERNEL.search(str(error)):
        return "this op has no meta kernel", NO_META_KERNEL
    return None


def _first_line(error: Exception) -> str:
    try:
        return str(error).strip().split("\n")[0]
    except Exception:  # an exception of the user's own may not be able to say itself
        return ""


# -- What a step does about its memory by itself, and what to do instead: said in the notes of its trace --------------


@dataclass(slots=True)
class Advice:
    """Filled while the step runs. Modules are paths; a line is `file:line function`."""

    checkpointing: dict[str, None] = field(default_factory=dict)
    recomputed: dict[str, None] = field(default_factory=dict)
    retaining: dict[str, None] = field(default_factory=dict)

    def checkpoint(self, module: str) -> None:
        """Note that `torch.utils.checkpoint` is called in a module."""
        self.checkpointing[module] = None

    def recompute(self, module: str) -> None:
        """Note a module that backward recomputes: what a checkpoint holds, unless it holds no modules."""
        self.recomputed[module] = None

    def retain(self, line: str) -> None:
        """Note a backward that keeps its graph."""
        self.retaining[line] = None

    def notes(self) -> list[str]:
        """Return the advice in words."""
        found = []
        if self.checkpointing:
            found.append(
                f"this model checkpoints {self._modules()} by itself (torch.utils.checkpoint), which no plan can "
                "change; turn that off (transformers: model.gradient_checkpointing_disable()) and plan again: memfit "
                "chooses better what to drop"
            )
        found += [
            f"backward(retain_graph=True) at {line} keeps everything that autograd saved while the loss lives; "
            "leave it out, unless another backward goes over the same graph"
            for line in self.retaining
        ]
        return found

    def _modules(self) -> str:
        modules = [module for module in self.recomputed or self.checkpointing if module]
        if not modules:
            return "a part of itself"
        groups: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            groups[alike(module)].append(module)
        return f"module{'s' if len(modules) > 1 else ''} {', '.join(map(folded, groups.values()))}"
