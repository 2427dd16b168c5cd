"""What can go wrong while a step is captured, said with the op, the module and the user's line."""

from __future__ import annotations

from memfit.errors import InputError


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
