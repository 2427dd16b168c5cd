"""Behaviours of PyTorch's FSDP tests about groups of modules, precision by unit, ignored modules and inner modules.

Each function runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import InputError
from memfit.sharded import FlatDTensor, Precision, Schedule, full_state_dict, get_runtime, no_sync, shard
from tests.distributed.sharded_behaviour import Trained, average, check_gradients, gathers, loss_of, watched
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_parity import check_equal, check_freed, whole_gradients
from tests.distributed.sharded_ported_setup import behaviours, same_training
from tests.distributed.sharded_subclasses import built as subclass_model
from tests.distributed.tensor_subclasses import PairWeight

BF16 = torch.bfloat16
_WIDTH = 8


def _layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))


def _input(number: int = 0) -> torch.Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def _whole(model: nn.Module) -> set[str]:
    """The names of the parameters that are not sharded."""
    return {name for name, each in model.named_parameters() if not isinstance(each, FlatDTensor)}


# -- groups of modules -------------------------------------------------------------------------------------------------


def a_group_has_the_parameters_of_all_its_modules() -> None:
    model = shard(_layers(5), units=[["0", "1"], ["2", "3"]])
    units = get_runtime(model).units
    assert [unit.names for unit in units] == [("",), ("0", "1"), ("2", "3")]
    names = [[slot.names[0] for flat in unit.flats for slot in flat.layout.slots] for unit in units]
    assert names == [
        [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")] for layers in ([4], [0, 1], [2, 3])
    ]
    assert get_runtime(model).units[1].modules == (model[0], model[1])  # type: ignore[index]


def groups_are_gathered_ahead_in_the_backward() -> None:
    model: Any = shard(_layers(6), units=[["0", "1"], "2", ["3", "4"]])
    model(_input()).sum().backward()  # the first pass records the order
    with watched(model) as seen:
        for at, layer in enumerate(model):
            layer.register_full_backward_hook(lambda *_, at=at: seen.append(f"done {at}"))
        model(_input(1).requires_grad_()).sum().backward()
    assert [each for each in gathers(seen, "forward") if "unit" not in each] == ["0' to '1", "2", "3' to '4"]
    assert gathers(seen, "backward") == ["3' to '4", "2", "0' to '1"]
    assert seen.index("gather of unit '2' in backward") < seen.index("done 4")
    assert seen.index("done 3") < seen.index("gather of unit '0' to '1' in backward") < seen.index("done 2")
    check_freed(model)


class _Language(nn.Module):
    """Blocks and a norm; the head is called by the training loop, on one chunk of the output after another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = _layers(2)
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 5)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))

    def chunked(self, number: int, chunks: int = 2) -> None:
        """Run the backward of the head chunk by chunk, then that of the rest."""
        hidden = self(_input(number))
        detached = hidden.detach().requires_grad_()
        for chunk in detached.chunk(chunks):
            self.head(chunk).float().square().sum().backward()
        assert detached.grad is not None
        hidden.backward(detached.grad)


_GROUPED: dict[str, Any] = {"units": ["body", ["norm", "head"]]}


def a_module_of_a_group_may_be_called_on_its_own_after_the_forward() -> None:
    ours, plain = shard(_Language(), **_GROUPED), _Language()
    for number in range(2):
        for model in (ours, plain):
            model.zero_grad()
            model.chunked(number)  # type: ignore[operator]
        average(plain)
        check_equal("gradient", whole_gradients(ours), whole_gradients(plain), exact=False)
        check_freed(ours)


def chunks_of_a_group_are_accumulated_also_without_communication() -> None:
    ours, plain = shard(_Language(), **_GROUPED), _Language()
    with no_sync(ours):
        ours.chunked(0, 4)  # type: ignore[operator]
    assert all(each.grad is None for each in ours.parameters())
    for number in (1, 2):
        ours.chunked(number)  # type: ignore[operator]
    for number, chunks in ((0, 4), (1, 2), (2, 2)):
        plain.chunked(number, chunks)
    average(plain)
    check_equal("gradient", whole_gradients(ours), whole_gradients(plain), exact=False)


def a_group_may_be_kept_and_freed_in_turn() -> None:
    ours, plain = shard(_Language(), **_GROUPED), _Language()
    for number, reshards in enumerate((False, True, False)):
        ours.norm.set_reshard_after_forward(reshards)  # type: ignore[operator, union-attr]
        for model in (ours, plain):
            model.zero_grad()
            model.chunked(number)  # type: ignore[operator]
        average(plain)
        check_equal("gradient", whole_gradients(ours), whole_gradients(plain), exact=False)
        check_freed(ours)


def every_module_of_a_group_has_its_inputs_cast() -> None:
    model: Any = _Language()
    seen: dict[str, torch.dtype] = {}
    for name in ("norm", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: args[0].dtype})
        )
    shard(model, mp_policy=MixedPrecisionPolicy(BF16, torch.float32), **_GROUPED)
    model.chunked(0)  # the head is given float32 by the loop
    assert seen == {"norm": BF16, "head": BF16}


def a_list_of_modules_is_no_model() -> None:
    model = _layers(2)
    with pytest.raises(InputError, match=r"shard takes a model, an nn\.Module, not a list"):
        shard([model[0], model[1]])  # type: ignore[arg-type]
    assert len(_whole(model)) == 4


# -- precision by unit -------------------------------------------------------------------------------------------------


class _Notes(nn.Module):
    """Notes the dtype of its input, which it may cast to that of its weight."""

    def __init__(self, *, casts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.casts = casts
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        self.seen += [x.dtype] if other is None else [x.dtype, other.dtype]
        return self.linear(x.to(self.linear.weight.dtype) if self.casts else x)


class _Two(nn.Module):
    """Two modules in a row; `outside` gives the second one a tensor that the model makes itself."""

    def __init__(self, *, casts: bool = False, outside: bool = False) -> None:
        super().__init__()
        self.first, self.second = _Notes(casts=casts), _Notes(casts=casts)
        self.outside = outside
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        x = self.first(x)
        return self.second(x, torch.ones(2)) if self.outside else self.second(x)


def _dtypes(precision: dict[str, Precision], **options: bool) -> tuple[torch.dtype, ...]:
    """The dtypes that the model and its two modules get, in a step."""
    model = shard(_Two(**options), units=["first", "second"], precision=precision)  # type: ignore[arg-type]
    model(_input()).float().sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    return tuple(dtype for module in (model, model.first, model.second) for dtype in module.seen)  # type: ignore


def one_unit_computes_in_low_precision() -> None:
    low, full = Precision(param_dtype=BF16), Precision(param_dtype=torch.float32)
    every = torch.float32
    assert _dtypes({"second": low}) == (every, every, BF16)
    assert _dtypes({"": full, "second": low}) == (every, every, BF16)


def inputs_of_one_unit_may_be_left_as_they_are() -> None:
    low = Precision(param_dtype=BF16, cast_inputs="none")
    assert _dtypes({"second": low}, casts=True) == (torch.float32,) * 3
    with pytest.raises(RuntimeError, match="same dtype"):
        _dtypes({"second": low})


def units_of_other_precisions_follow_each_other() -> None:
    low, full = Precision(param_dtype=BF16), Precision(param_dtype=torch.float32)
    assert _dtypes({"": full, "first": low, "second": full}) == (torch.float32, BF16, torch.float32)
    quiet = Precision(param_dtype=torch.float32, cast_inputs="none")
    with pytest.raises(RuntimeError, match="same dtype"):
        _dtypes({"": full, "first": low, "second": quiet})


def inputs_that_come_from_outside_are_cast_by_their_unit() -> None:
    """As with FSDP2; where only the root casts, as with FSDP1, they stay as they are."""
    low = Precision(param_dtype=BF16)
    assert _dtypes({"": low, "first": low, "second": low}, outside=True) == (BF16,) * 4
    root = Precision(param_dtype=BF16, cast_inputs="root")
    assert _dtypes({"": root, "first": root, "second": root}, outside=True) == (BF16, BF16, BF16, torch.float32)


def batch_norms_may_stay_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.Linear(_WIDTH, _WIDTH))
    low = Precision(param_dtype=BF16, buffer_dtype=BF16)
    full = Precision(param_dtype=torch.float32, output_dtype=BF16, cast_outputs="units")
    model.register_buffer("other", torch.ones(3))
    seen: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    shard(model, units=[nn.BatchNorm1d], precision={"": low, nn.BatchNorm1d: full})
    model(_input()).float().sum().backward()
    assert seen == [BF16, torch.float32, BF16]
    assert model.other.dtype is BF16 and model[1].running_mean.dtype is torch.float32
    assert model[1].running_mean.any()


def ignored_modules_keep_their_dtype() -> None:
    torch.manual_seed(0)
    model = shard(_layers(3), units=[], ignored=["1"], precision=Precision(param_dtype=BF16))
    assert model[1].weight.dtype is torch.float32  # type: ignore[index]
    with pytest.raises(RuntimeError, match="same dtype"):
        model(_input())
    check_freed(model)


# -- ignored modules ---------------------------------------------------------------------------------------------------


def ignored_modules_with_tied_parameters() -> None:
    """A parameter that an ignored module shares with another is whole in both."""
    torch.manual_seed(0)
    model: Any = GPT(tied=True)
    shard(model, ignored=[model.blocks[1], model.embedding])
    assert _whole(model) == {
        "embedding.weight",
        *(name for name, _ in model.named_parameters() if name.startswith("blocks.1.")),
    }
    assert model.head.weight is model.embedding.weight
    plain = Trained(lambda: GPT(tied=True), plain=True)
    for each in (model, plain.model):
        loss_of(each, 0).backward()
    for name, parameter in model.named_parameters():
        if name in _whole(model):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    average(plain.model)
    check_gradients(model, plain.model)


def an_ignored_module_may_hold_what_was_sharded_before() -> None:
    model: Any = nn.Sequential(_layers(2), _layers(3), nn.Linear(_WIDTH, 2))
    shard(model[1][1])
    shard(model, ignored=[model[1]])
    assert _whole(model) == {f"1.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    model(_input()).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def what_an_inner_call_ignored_stays_whole() -> None:
    for again in (False, True):
        model: Any = nn.Sequential(_layers(2), nn.Linear(_WIDTH, 2))
        shard(model[0], ignored=[model[0][1]])
        shard(model, ignored=[model[0][1]] if again else [])
        assert _whole(model) == {"0.1.weight", "0.1.bias"}
        model(_input()).sum().backward()
        assert all(each.grad.shape == each.shape for each in model.parameters())
        assert set(full_state_dict(model)["model"]) == {name for name, _ in model.named_parameters()}


def ignored_parameters_may_belong_to_another_part() -> None:
    """One set of `ignored_params` goes to several calls, as with `fully_shard`."""
    model: Any = nn.Sequential(_layers(2), _layers(2))
    ignored = set(model[0][1].parameters())
    for part in model:
        shard(part, ignored_params=ignored)
    assert _whole(model) == {"0.1.weight", "0.1.bias"}
    model(_input()).sum().backward()
    with pytest.raises(InputError, match="not the model's"):
        shard(_layers(2), ignored=list(model[0][1].parameters()))
    with pytest.raises(InputError, match="ignored"):
        shard(_layers(2), ignored_params=[nn.Linear(2, 2)])  # type: ignore[list-item]


def ignored_modules_on_meta_stay_there() -> None:
    for init in (None, lambda module: module.reset_parameters()):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        shard(model, ignored=[model[0]], init=init)
        assert model[0].weight.is_meta and not model[1].weight.is_meta
        assert torch.isfinite(model[1].weight.full_tensor()).all()  # type: ignore[operator]


def modules_that_would_be_units_may_be_ignored() -> None:
    chosen: tuple[Any, ...] = (nn.Linear, lambda path, module: isinstance(module, nn.Linear))
    for units in chosen:
        model: Any = _layers(4)
        shard(model, units=units, ignored=[model[1], model[3]], schedule=Schedule(bucket_cap_bytes=0))
        assert _whole(model) == {f"{layer}.{kind}" for layer in (1, 3) for kind in ("weight", "bias")}
        with watched(model) as seen:
            model(_input()).sum().backward()
        assert [each for each in gathers(seen, "forward") if each] == ["0", "2"]


class _Around(nn.Module):
    """A model that DDP has, but for a part that is sharded, of which DDP has a part again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(_WIDTH, _WIDTH)
        self.part = _layers(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.before(x)).square().mean()


def ddp_has_what_is_not_sharded() -> None:
    ours, plain = _Around(), _Around()
    shard(ours.part, ignored_params=set(ours.part[1].parameters()))
    sharded = [name for name, each in ours.named_parameters() if isinstance(each, FlatDTensor)]
    assert len(sharded) == 4
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ours, sharded)
    models = [DistributedDataParallel(each, broadcast_buffers=False) for each in (ours, plain)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in models]
    for number in range(3):
        losses = []
        for each, optimizer in zip(models, optimizers, strict=True):
            losses.append(each(_input(number)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*losses)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, FlatDTensor) else one, other)


# -- inner modules first, dimensions and subclasses --------------------------------------------------------------------


def a_child_that_ran_before_its_root_is_taken_in() -> None:
    """FSDP2 refuses it: there the first forward decides which module is the root."""
    ours, plain = _layers(3), _layers(3)
    shard(ours[0])
    for model in (ours, plain):
        model[0](_input()).sum().backward()
        model.zero_grad()
    shard(ours)
    for model in (ours, plain):
        model[0](_input(1)).sum().backward()  # the child before the root, again
        model(_input(2)).sum().backward()
    average(plain)
    check_equal("gradient", whole_gradients(ours), whole_gradients(plain), exact=False)
    check_freed(ours)


def layers_may_be_sharded_one_by_one() -> None:
    def layer_by_layer(model: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
                shard(module)
        return shard(model)

    torch.manual_seed(0)
    ours = Trained()
    ours.model = layer_by_layer(GPT())
    ours.model.load_state_dict(Trained().model.state_dict())
    ours.optimizer = torch.optim.AdamW(ours.model.parameters(), lr=1e-2, eps=1e-4)
    same_training(ours, Trained(plain=True))


def any_dimension_may_be_asked_for_uneven_ones_too() -> None:
    """Parameters and gradients are contiguous, whatever dimension was asked for."""

    def largest(parameter: nn.Parameter) -> Shard:
        return Shard(max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))

    chosen: tuple[Callable[[nn.Parameter], Shard], ...] = (largest, lambda parameter: Shard(parameter.dim() - 1))
    for choose in chosen:
        ours, theirs = (Trained(lambda: GPT(vocabulary=67, width=30), **options) for options in (
            {"shard_placement_fn": choose}, {"plain": True}
        ))  # fmt: skip
        seen: list[bool] = []
        ours.model.blocks[0].up.register_forward_pre_hook(  # type: ignore[index, union-attr]
            lambda module, args, seen=seen: seen.append(module.weight.is_contiguous())
        )
        same_training(ours, theirs)
        loss_of(ours.model, 3).backward()
        assert seen == [True] * 3
        assert all(each.is_contiguous() and each.grad.is_contiguous() for each in ours.model.parameters())
        assert all(each.grad.to_local().is_contiguous() for each in ours.model.parameters())


def subclasses_on_meta_are_filled_and_train() -> None:
    with torch.device("meta"):
        model: Any = subclass_model(PairWeight.of)
    shard(model, units=list(model), mp_policy=MixedPrecisionPolicy())
    assert not any(each.is_meta for each in model.parameters())
    before = [each.full_tensor() for each in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(2):
        model(_input(number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model[0][1].weight
    assert isinstance(weight.to_local(), PairWeight)
    for name, one, parameter in zip(
        [name for name, _ in model.named_parameters()], before, model.parameters(), strict=True
    ):
        values = [each.value() if isinstance(each, PairWeight) else each for each in (one, parameter.full_tensor())]
        assert all(torch.isfinite(each).all() for each in values), name


CASES = behaviours(globals())
