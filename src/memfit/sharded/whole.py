"""The gathered parameters of a unit: views of one flat buffer whose memory comes and goes.

Note [Aliases]
Autograd keeps parameters, and views of them, between forward and backward. They share the buffer's storage object, so
that its memory can be freed and allocated again under them, as FSDP2 does. The parameters have version counters of
their own, which are raised while they are not gathered: autograd, which compares them before it reads a tensor that it
kept, then says that the tensor was modified. This happens to what leaves a unit by another way than its return value,
such as a loss kept as an attribute: its backward may begin before that of the unit. So does a change of the parameters
between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memfit.sharded.layout import Layout
from memfit.torch_private.autograd import set_version_counters, version_of


class Whole:
    """A flat buffer in one dtype and the parameters that are its views."""

    def __init__(self, layout: Layout, buffer: torch.Tensor, *, owned: bool) -> None:
        self.buffer = buffer
        self._owned = owned
        self._bytes = buffer.untyped_storage().nbytes()
        with torch.inference_mode(False), torch.no_grad():
            self.parameters = [
                nn.Parameter(buffer.data[slot.begin : slot.end].view(slot.shape), requires_grad=False)
                for slot in layout.slots
            ]
        self._tensors = tuple(self.parameters)
        self._versions = tuple(version_of(parameter) for parameter in self.parameters)
        self.changes = 0
        """How often the shards had been changed when they were gathered for a forward."""
        self.free()

    @classmethod
    def empty(cls, layout: Layout, dtype: torch.dtype, device: torch.device) -> Whole:
        """One with a buffer of its own, without memory for now."""
        with torch.inference_mode(False):
            return cls(layout, torch.empty(layout.elements, dtype=dtype, device=device), owned=True)

    @property
    def bytes(self) -> int:
        """Bytes of the buffer when it has memory; none where the parameters are views of the shard itself."""
        return self._bytes if self._owned else 0

    @property
    def allocated(self) -> bool:
        return not self._owned or self.buffer.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Give the buffer memory."""
        if not self.allocated:
            self.buffer.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Take the buffer's memory; the parameters stay valid objects."""
        if self._owned:
            self.buffer.untyped_storage().resize_(0)
            self.hide()

    def hide(self) -> None:
        """Make autograd refuse to read the parameters."""
        set_version_counters(self._tensors, tuple(version + 1 for version in self._versions))

    def reveal(self) -> None:
        """Let autograd read the parameters, which are gathered."""
        if self._owned:
            set_version_counters(self._tensors, self._versions)

    def require_gradients(self, wanted: Sequence[bool]) -> None:
        """Make the same parameters need gradients as of the shards."""
        for parameter, requires_grad in zip(self.parameters, wanted, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
