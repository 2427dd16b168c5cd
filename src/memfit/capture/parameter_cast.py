"""A step captured with its parameters in another dtype than they are kept in, as a sharded engine runs it.

Note [Cast parameters]: FSDP2's `MixedPrecisionPolicy(param_dtype=...)` and memfit's runtime keep shards in the model's
own dtype and gather them in another. Unless told otherwise (`cast_forward_inputs`), they cast the floating-point inputs
of the model and of each unit before its forward. Ops then run as in a model of that dtype, which is what is captured:
stand-ins of the parameters in the other dtype, and casts before the calls. The planner scales shards and optimizer
state to the model's own dtype (`ParameterCast.kept`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from memfit.errors import InputError
from memfit.torch_private.pytree import tree_map_only


class ParameterCast(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters are computed with in `dtype` and kept in `kept`.

    Floating-point inputs of `units` are cast too; the path of the model itself is empty.
    """

    dtype: str
    units: tuple[str, ...] = ()
    kept: str = ""

    def resolve(self, model: nn.Module) -> ParameterCast | None:
        """Return the cast with the dtype that the parameters of a model have; None where they have this one already.

        Parameters of several dtypes are refused, or left as they are under autocast, which casts them for itself.
        """
        own = sorted({str(each.dtype)[6:] for each in model.parameters() if each.is_floating_point()})
        if own == [self.dtype] or (len(own) != 1 and not self.units):
            return None
        if len(own) != 1:
            raise InputError(
                f"param_dtype={self.dtype!r} is for parameters of one dtype, and the model has {' and '.join(own)}: "
                "call model.float() first, or leave it out"
            )
        return msgspec.structs.replace(self, kept=own[0])

    @contextlib.contextmanager
    def applied(self, model: nn.Module, cast_done: Callable[[], None]) -> Iterator[None]:
        """Cast the inputs of the units when they are called inside the block; say so before their forward begins."""
        dtype = getattr(torch, self.dtype)
        units = {model.get_submodule(path) for path in self.units}
        original = nn.Module.__call__

        def cast(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self in units:
                args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
                cast_done()
            return original(self, *args, **kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
