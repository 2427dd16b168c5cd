"""What every op does with flat DTensors: on the local tensors, over the ranks, or refused.

Note [Flat DTensors] of `flat_dtensor.py` has the kinds of ops that there are. A rule is found for an op when it is
first called, by its tags and name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from memfit.errors import StateError
from memfit.sharded.flat_reductions import is_flat, reduce_all, reduce_norms
from memfit.torch_private.dispatch import schema_of

if TYPE_CHECKING:
    from memfit.sharded.flat_dtensor import FlatDTensor, FlatSpec

_aten = torch.ops.aten

Rule = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def find_rule(func: Any) -> Rule:
    """Return how an op runs on flat DTensors; the result is kept for the next time."""
    rule = _RULES.get(func)
    if rule is None:
        rule = _RULES[func] = _choose_rule(func)
    return rule


def _choose_rule(func: Any) -> Rule:
    name = schema_of(func).name.partition("::")[2]
    if name in _REDUCTIONS:
        return _reduced
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _drawn if name in _DRAWS else _refused  # others read the values, too
    if func in _ALIKE:
        return _like
    if _is_on_lists(name):
        arguments = schema_of(func).arguments
        written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
        return partial(_on_lists, [each.name for each in arguments], frozenset(written))
    if torch.Tag.pointwise in func.tags or name.rstrip("_") in _ELEMENTWISE:
        return _in_place if name.endswith("_") else _elementwise
    return _refused


def _is_on_lists(name: str) -> bool:
    """Return whether an op works on lists of tensors element by element."""
    if name.startswith("_foreach_"):
        single = name.removeprefix("_foreach_").rstrip("_")
        op = getattr(_aten, single, None)
        tagged = op is not None and any(torch.Tag.pointwise in getattr(op, each).tags for each in op.overloads())
        return single not in _REDUCTIONS and (tagged or single in ("copy", "zero", "clone"))
    return name.rstrip("_") in _FUSED_OPTIMIZERS


def _refused(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    first = next(_flats((args, tuple(kwargs.values()))))
    raise StateError(
        f"{func} would see the elements of this rank only: {first!r}. Gather first: value.full_tensor(), "
        "memfit.sharded.full_state_dict(model), `with full_parameters(model):`, or for a method of a module "
        "memfit.sharded.register_forward_method(module, name)"
    )


def _flats(values: Any) -> Iterator[FlatDTensor]:
    for each in values:
        if is_flat(each):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _flats(each)


def _like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatDTensor:
    first = args[0]
    return first.flat_spec.wrap(func(first.local, *args[1:], **kwargs))


def _in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that changes its first argument, and most of what an optimizer does, on the local tensors."""
    first = args[0]
    if not is_flat(first):
        _refused(func, args, kwargs)  # a whole tensor would be changed where this rank has elements, and only there
    spec = first.flat_spec
    func(
        *[each.local if is_flat(each) and each.flat_spec is spec else _local(func, each, spec) for each in args],
        **({name: _local(func, each, spec) for name, each in kwargs.items()} if kwargs else kwargs),
    )
    return first


def _elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the local tensors."""
    if schema_of(func).is_mutable:
        return _elementwise_out(func, args, kwargs)
    spec = next(_flats((args, tuple(kwargs.values())))).flat_spec
    local = [_local(func, each, spec) for each in args]
    result = func(*local, **{name: _local(func, each, spec) for name, each in kwargs.items()})
    return spec.wrap(result) if isinstance(result, torch.Tensor) else tuple(spec.wrap(each) for each in result)


def _elementwise_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatDTensor:
    """Run an op with `out=`, a tensor that is sharded as an argument is: Adam keeps the largest of its squares so."""
    out = kwargs.get("out")
    if not is_flat(out) or not any(each.flat_spec.alike(out.flat_spec) for each in _flats(args)):
        _refused(func, args, kwargs)
    func(*[_local(func, each, out.flat_spec) for each in args], **{**kwargs, "out": out.local})
    return out


def _local(func: Any, value: Any, spec: FlatSpec) -> Any:
    """Return what an op on the local tensors is given for one of its arguments."""
    if is_flat(value) and value.flat_spec.alike(spec):
        return value.local
    if isinstance(value, DTensor):
        if spec.inner is not None and spec.inner.same_as(value):
            return spec.own(value)
        value = value.full_tensor().to(value.device)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape == spec.shape:
        return spec.own(value)
    if value.numel() == 1 and value.dim() <= len(spec.shape):
        return value.reshape(())
    raise StateError(
        f"{func} of {spec.slot.names[0]!r} and a tensor of shape {tuple(value.shape)}: the parameter is sharded, and "
        f"its elements here have no rows and columns; give a tensor of shape {spec.shape}, or one number"
    )


def _on_lists(
    names: Sequence[str], written: frozenset[str], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an op on lists of tensors on the local tensors: those with one number belong together.

    `names` are those of the op's arguments, `written` of those that it changes: a whole tensor would be changed where
    this rank has elements, and only there.
    """
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    specs: dict[int, FlatSpec] = {}
    for each in given.values():
        for number, value in enumerate(each) if isinstance(each, (list, tuple)) else ():
            if number not in specs and is_flat(value):
                specs[number] = value.flat_spec
    for name in written:
        changed = given.get(name)
        for number, value in enumerate(changed) if isinstance(changed, (list, tuple)) else ():
            if number in specs and not is_flat(value) and value.dim():
                _refused(func, args, kwargs)

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [
                each.local
                if is_flat(each) and each.flat_spec is specs[number]
                else _local(func, each, specs[number])
                if number in specs
                else each
                for number, each in enumerate(value)
            ]
        return value.full_tensor() if isinstance(value, DTensor) else value

    result = func(*[local(each) for each in args], **{name: local(each) for name, each in kwargs.items()})
    if not isinstance(result, (list, tuple)):
        return result
    return [specs[number].wrap(each) if number in specs else each for number, each in enumerate(result)]


def _drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw random numbers of the whole tensor, and keep this rank's."""
    first = args[0]
    if not is_flat(first) or any(True for _ in _flats(args[1:])):
        _refused(func, args, kwargs)
    spec = first.flat_spec
    whole = torch.empty(spec.shape, dtype=first.dtype, device=first.device)
    drawn = spec.own(func(whole, *args[1:], **kwargs)).clone()
    for number, placement in enumerate(spec.placements):
        if type(placement) is Replicate:  # replicas that were seeded differently must not part
            sent = drawn.to(spec.device)
            dist.broadcast(sent, group_src=0, group=spec.mesh.get_group(number))
            drawn.copy_(sent)
    if schema_of(func).is_mutable:
        first.local.copy_(drawn)
        return first
    return first.flat_spec.wrap(drawn)


def _copied(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value, source = args[0], args[1]
    if not is_flat(value):
        _refused(func, args, kwargs)
    value.local.copy_(_local(func, source, value.flat_spec), *args[2:])
    return value


def _viewed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Allow views that change nothing."""
    if tuple(args[1]) != tuple(args[0].shape):
        _refused(func, args, kwargs)
    return args[0].flat_spec.wrap(args[0].local.detach())


def _made_new(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a tensor of the same shape, as the stagers of `torch.distributed.checkpoint.async_save` do."""
    value, size = args[0], args[1]
    if tuple(size) != tuple(value.shape):
        _refused(func, args, kwargs)
    return value.flat_spec.wrap(func(value.local, value.local.shape, *args[2:], **kwargs))


def _on_local(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


def _to_number(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(args[0].full_tensor())


def _compared(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    spec = next(_flats(args)).flat_spec
    first, second = (_local(func, each, spec) for each in args)
    same = torch.tensor(float(not torch.equal(first, second)), device=spec.device)
    for link in spec.links:
        link.all_reduce(same, f"comparison of {spec.slot.names[0]!r}", largest=True).wait()
    return not same.item()


# -- reductions over all elements

_REDUCTIONS = {
    "sum", "mean", "max", "min", "amax", "amin", "any", "all", "linalg_vector_norm", "norm", "count_nonzero",
}  # fmt: skip


def _reduced(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    value = args[0]
    name = schema_of(func).name.partition("::")[2]
    given = dict(zip((each.name for each in schema_of(func).arguments), args, strict=False)) | dict(kwargs)
    dimensions = given.get("dim")
    dims = len(value.flat_spec.shape)
    whole = (
        dimensions is None
        or dimensions == []
        or (isinstance(dimensions, (list, tuple)) and sorted(each % dims for each in dimensions) == [*range(dims)])
    )
    if not whole or "other" in given or schema_of(func).is_mutable:
        _refused(func, args, kwargs)
    found = reduce_all(name, value, given)
    return found.reshape((1,) * value.dim()) if given.get("keepdim") else found


def _norms(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return reduce_norms(args[0], float(order), dtype)


def _unscaled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients; what one rank finds infinite, every rank does."""
    gradients, found_inf, inverse = args
    func([each.local if is_flat(each) else each for each in gradients], found_inf, inverse)
    for link, spec in {link: each.flat_spec for each in _flats(gradients) for link in each.flat_spec.links}.items():
        shared = found_inf.to(spec.device)
        link.all_reduce(shared, "all-reduce of what gradients are finite", largest=True).wait()
        found_inf.copy_(shared)


_FUSED_OPTIMIZERS = ("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd")
_DRAWS = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "rand_like", "randint_like", "randn_like",
}  # fmt: skip
_ALIKE = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
}
_ELEMENTWISE = {"zero", "fill", "masked_fill"}
"""Ops that are elementwise and not tagged so, with or without a last underscore."""
_RULES: dict[Any, Rule] = {
    _aten.copy_.default: _copied,
    _aten.view.default: _viewed,
    _aten._unsafe_view.default: _viewed,
    _aten.expand.default: _viewed,
    _aten.new_empty.default: _made_new,
    _aten.new_full.default: _made_new,
    _aten.new_ones.default: _made_new,
    _aten.new_zeros.default: _made_new,
    _aten.equal.default: _compared,
    _aten._local_scalar_dense.default: _to_number,
    _aten.is_pinned.default: _on_local,
    _aten.record_stream.default: _on_local,
    _aten._foreach_norm.Scalar: _norms,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}
