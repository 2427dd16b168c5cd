"""What a capture tells the user: errors with the op, the module and the line, and advice in the trace's notes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

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


# -- What a step does about its memory by itself, and what to do instead: said in the notes of its trace --------------


@dataclass(slots=True)
class Advice:
    """Filled while the step runs. Modules are paths; a line is `file:line function`."""

    checkpointing: dict[str, None] = field(default_factory=dict)
    run_again: dict[str, None] = field(default_factory=dict)
    retaining: dict[str, None] = field(default_factory=dict)

    def checkpoint(self, module: str) -> None:
        """Note that `torch.utils.checkpoint` is called in a module."""
        self.checkpointing[module] = None

    def again(self, module: str) -> None:
        """Note a module that backward runs again: what a checkpoint holds, unless it holds no modules."""
        self.run_again[module] = None

    def retain(self, line: str) -> None:
        """Note a backward that keeps its graph."""
        self.retaining[line] = None

    def notes(self) -> list[str]:
        """The advice in words."""
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
        modules = [module for module in self.run_again or self.checkpointing if module]
        if not modules:
            return "a part of itself"
        groups: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            groups[alike(module)].append(module)
        return f"module{'s' if len(modules) > 1 else ''} {', '.join(map(folded, groups.values()))}"
