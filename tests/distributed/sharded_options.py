"""Options under FSDP2's names, precision by unit, ignored modules, compiled blocks, collectives of the user's own.

Each function runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from memfit.errors import InputError, StateError
from memfit.sharded import (
    FlatDTensor,
    Precision,
    Reduction,
    UnitOptions,
    full_parameters,
    get_runtime,
    no_sync,
    register_forward_method,
    shard,
    unreduced_gradients,
)
from tests.distributed.sharded_behaviour import loss_of
from tests.distributed.sharded_models import GPT
from tests.distributed.sharded_recipes import adamw, assert_same, built, by_fsdp2, by_memfit, train, whole

_BF16 = torch.bfloat16


class Block(nn.Module):
    """Two linears with a norm of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Blocks and a head; the input is data, so that bits do not depend on a table."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)
        self.register_buffer("shift", torch.ones(3))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.dtypes.append(x.dtype)
        return self.head(x.to(self.head.weight.dtype)) + self.shift


def stack(change: Callable[[Any], Any] = lambda model: model) -> Any:
    torch.manual_seed(0)
    return change(Stack())


def steps(model: Any, count: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """Train, and return whole parameters by name."""
    optimizer = adamw(model.parameters(), **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        model(torch.randn(4, 8, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.full_tensor() for name, each in model.named_parameters()}


# -- precision --------------------------------------------------------------------------------------------------------


def policies_of_fsdp2() -> None:
    """`mp_policy` means what it does for `fully_shard`: compute, sums, inputs and outputs of every unit; same bits."""
    for policy in (
        MixedPrecisionPolicy(param_dtype=_BF16),  # which sums in bfloat16, too
        MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=torch.float32, output_dtype=torch.float32),
        MixedPrecisionPolicy(reduce_dtype=_BF16),
    ):

        def by_peer(model: Any, policy: MixedPrecisionPolicy = policy) -> Any:
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
            return fully_shard(model, mp_policy=policy)

        peer, model = stack(by_peer), stack(lambda model, policy=policy: shard(model, mp_policy=policy))
        assert_same(steps(peer, 2), steps(model, 2))
        assert model.dtypes == peer.dtypes
        again = stack(lambda model, policy=policy: shard(model, precision=policy))
        assert [each.precision for each in get_runtime(again).units] == [
            each.precision for each in get_runtime(model).units
        ]
    same = Precision(param_dtype=_BF16, reduce_dtype=_BF16, cast_outputs="units")
    stack(lambda model: shard(model, precision=same, mp_policy=MixedPrecisionPolicy(param_dtype=_BF16)))
    for wrong in (Precision(), {"": same}):
        with pytest.raises(InputError, match="give one of them"):
            stack(
                lambda model, wrong=wrong: shard(
                    model, precision=wrong, mp_policy=MixedPrecisionPolicy(param_dtype=_BF16)
                )
            )
    for wrong in ("bfloat16", torch.bfloat16):
        with pytest.raises(InputError, match="MixedPrecisionPolicy"):
            stack(lambda model, wrong=wrong: shard(model, precision=wrong))


def precision_by_unit() -> None:
    """Norms compute in float32 in a model that computes in bfloat16, as with FSDP2; what is no unit is refused."""
    low = MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=torch.float32)
    full = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=_BF16)

    def by_peer(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block.norm, mp_policy=full)
            fully_shard(block, mp_policy=low)
        return fully_shard(model, mp_policy=low)

    def by_class(model: Any) -> Any:
        return shard(model, units=[nn.LayerNorm, Block], precision={"": low, nn.LayerNorm: full})

    def by_path(model: Any) -> Any:
        units = [*(f"blocks.{number}.norm" for number in range(3)), *(f"blocks.{number}" for number in range(3))]
        return shard(model, units=units, precision={"": low, **dict.fromkeys(units[:3], full)})

    wanted = steps(stack(by_peer))
    assert_same(wanted, steps(stack(by_class)))
    assert_same(wanted, steps(stack(by_path)))
    model = stack(by_class)
    seen: list[torch.dtype] = []
    model.blocks[0].norm.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    model.blocks[0].up.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    model(torch.randn(2, 8))
    assert seen == [torch.float32, _BF16]
    for wrong in ("blocks.0.up", nn.Linear):
        with pytest.raises(InputError, match="which is no unit"):
            stack(lambda model, wrong=wrong: shard(model, precision={wrong: full}))


def shards_in_another_dtype() -> None:
    """A model in bfloat16 with shards in float32 trains as one in float32 that computes in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=_BF16, reduce_dtype=torch.float32)

    def by_peer(model: Any) -> Any:
        model = model.to(_BF16).float()  # the same values
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def by_memfit(model: Any) -> Any:
        kept = Precision(shard_dtype=torch.float32, param_dtype=_BF16, buffer_dtype=torch.float32)
        return shard(model.to(_BF16), precision=kept)

    model = stack(by_memfit)
    assert_same(steps(stack(by_peer)), steps(model))
    assert all(each.dtype is torch.float32 for each in model.parameters())
    own = stack(lambda model: shard(model.to(_BF16), precision=Precision(shard_dtype=torch.float32)))
    out = own(torch.randn(2, 8).to(_BF16))  # in the model's own dtype, without a cast
    assert out.dtype is _BF16


# -- the other names --------------------------------------------------------------------------------------------------


def options_of_fsdp2() -> None:
    """The names of `fully_shard` mean the same as ours, and both are refused where they differ."""
    wanted = steps(stack(lambda model: shard(model)))

    def options_of(**given: Any) -> Any:
        return get_runtime(stack(lambda model: shard(model, **given))).units[1].options

    assert options_of(reshard_after_forward=False) == options_of(keep=True) == UnitOptions(keep=True)
    assert options_of(reshard_after_forward=True) == options_of() == UnitOptions()
    assert options_of(reshard_after_forward=1) == UnitOptions(keep=True)
    assert options_of(reshard_after_forward=dist.get_world_size()) == UnitOptions()
    assert_same(wanted, steps(stack(lambda model: shard(model, reshard_after_forward=False))))
    for given in (
        {"offload_policy": CPUOffloadPolicy()},
        {"offload": CPUOffloadPolicy(pin_memory=False)},
        {"offload": True},
    ):
        assert_same(wanted, steps(stack(lambda model, given=given: shard(model, **given))))
    for given, said in (
        ({"keep": True, "reshard_after_forward": True}, "give one of them"),
        ({"reshard_after_forward": 3}, "a divisor of"),
        ({"reshard_after_forward": "no"}, "True, False or a number"),
        ({"offload": True, "offload_policy": OffloadPolicy()}, "give one of them"),
        ({"offload_policy": "cpu"}, "CPUOffloadPolicy"),
    ):
        with pytest.raises(InputError, match=said):
            options_of(**given)
    model = stack()
    shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={model.head.weight})
    assert type(model.head.weight) is nn.Parameter and isinstance(model.head.bias, FlatDTensor)


def ignored_modules() -> None:
    """A module, itself or by its path, keeps all its parameters whole; what is no part of the model is refused."""
    for given in (lambda model: [model.blocks[0].norm, model.head], lambda model: ["blocks.0.norm", "head"]):
        model = stack(lambda model, given=given: shard(model, ignored=given(model)))
        plain = {name for name, each in model.named_parameters() if not isinstance(each, FlatDTensor)}
        assert plain == {f"{name}.{kind}" for name in ("blocks.0.norm", "head") for kind in ("weight", "bias")}
        model(torch.randn(2, 8)).sum().backward()
        assert all(each.grad.shape == each.shape for each in model.parameters())
    for wrong, said in ((nn.Linear(2, 2), "no part of the model"), ("heads", "no parameter and no module")):
        with pytest.raises(InputError, match=said):
            stack(lambda model, wrong=wrong: shard(model, ignored=[wrong]))


# -- gradients that are kept, and whole ones --------------------------------------------------------------------------


def gradients_inside_no_sync() -> None:
    """`p.grad` has nothing of passes that were not sent, as with FSDP2; what is kept is this rank's own, and whole."""
    model: Any = built(by_memfit)
    plain = built(lambda model: model)
    assert unreduced_gradients(model) == {}
    with no_sync(model):
        for number in range(2):
            loss_of(model, number).backward()
            loss_of(plain, number).backward()
    assert all(each.grad is None for each in model.parameters())
    kept = unreduced_gradients(model)
    own = {name: each.grad for name, each in plain.named_parameters()}
    assert kept.keys() == own.keys()
    for name in own:
        torch.testing.assert_close(kept[name], own[name], msg=name)
    loss_of(model, 2).backward()
    assert unreduced_gradients(model) == {} and all(each.grad is not None for each in model.parameters())


def whole_gradients_and_rank_0() -> None:
    """Full parameters have whole gradients, which are written back; or only rank 0 has them, as with FSDP1."""
    model: Any = built(by_memfit)
    loss_of(model, 0).backward()
    parameters = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    gradients = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    with full_parameters(model):
        assert all(each.grad is None for each in model.parameters())
    with full_parameters(model, with_grads=True, write_back=True):
        assert_same(gradients, {name: each.grad for name, each in model.named_parameters()})
        for each in model.parameters():
            each.grad.mul_(2)
    assert_same(
        {name: each * 2 for name, each in gradients.items()},
        {name: each.grad.full_tensor() for name, each in model.named_parameters()},
    )
    assert_same(parameters, whole(model))
    with full_parameters(model, rank_0_only=True, cpu=True, with_grads=True):
        if dist.get_rank() == 0:
            assert_same(parameters, {name: each.detach() for name, each in model.named_parameters()})
            assert all(torch.equal(each.grad, gradients[name] * 2) for name, each in model.named_parameters())
        else:
            assert all(isinstance(each, FlatDTensor) for each in model.parameters())
        with pytest.raises(StateError, match="summoned"):
            loss_of(model, 0)
    with (
        pytest.raises(InputError, match="leave rank_0_only"),
        full_parameters(model, write_back=True, rank_0_only=True),
    ):
        pass
    train(model, adamw(model.parameters()), range(1))


# -- collectives of the user's own -------------------------------------------------------------------------------------


class Gather:
    """An all-gather as FSDP2 takes it, which counts."""

    def __init__(self) -> None:
        self.calls = self.allocated = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def collectives_of_the_user() -> None:
    """A unit gathers and sums by what it is given, and trains as before; what is not one is refused."""
    model: Any = built(by_memfit)
    gather, scatter = Gather(), Scatter()
    block = model.blocks[0]
    block.set_custom_all_gather(gather)
    block.set_custom_reduce_scatter(scatter)
    wanted: Any = built(by_memfit)
    for each in (model, wanted):
        train(each, adamw(each.parameters()), range(2))
    assert_same(whole(wanted), whole(model))
    flats = len(get_runtime(model).units[1].flats)
    assert (gather.calls, scatter.calls) == (2 * 2 * flats, 2 * flats)  # two steps, each with two gathers
    assert (gather.allocated, scatter.allocated) == (gather.calls, 2 * scatter.calls)
    for method in (block.set_custom_all_gather, block.set_custom_reduce_scatter):
        with pytest.raises(InputError, match="allocate"):
            method(lambda: None)
    hooked: Any = shard(GPT(), reduction=Reduction(hook=lambda whole, group: whole))
    with pytest.raises(InputError, match="would never call"):
        hooked.blocks[0].set_custom_reduce_scatter(scatter)
    block.set_force_sum_reduction_for_comms(True)
    with pytest.raises(InputError, match="comes and goes"):
        block.set_allocate_memory_from_process_group_for_comm(True)


def sums_are_hooked() -> None:
    """`set_all_reduce_hook` runs on the summed gradients of a unit, and may change them, as with FSDP2."""
    results = []
    for wrap in (by_memfit, by_fsdp2):
        model: Any = built(wrap)
        model.blocks[0].set_all_reduce_hook(lambda summed: summed.mul_(2))
        loss_of(model, 0).backward()
        results.append({name: each.grad.full_tensor() for name, each in model.named_parameters()})
    assert_same(*results)


def sums_over_replicas_are_hooked() -> None:
    """The hook comes after the sum over replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def by_peer(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    seen = []
    for wrap in (lambda model: shard(model, mesh=mesh), by_peer):
        model = stack(wrap)
        sums: list[torch.Tensor] = []
        model.blocks[0].set_all_reduce_hook(lambda summed, sums=sums: sums.append(summed.abs().sum()))
        torch.manual_seed(dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        (own,) = sums
        dist.all_reduce(own)
        seen.append(own)
    torch.testing.assert_close(*seen)


# -- compiled before sharding ------------------------------------------------------------------------------------------


def compiled_before() -> None:
    """Blocks, or the model, that were compiled before `shard` train to FSDP2's bits, in as many graphs."""
    wanted = None
    for how in ("block.compile, FSDP2", "block.compile", "torch.compile", "inner", "model.compile"):
        graphs: list[Any] = []

        def count(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        model = stack()
        if how == "model.compile":
            model.compile(backend=count)
        for number, block in enumerate(model.blocks):
            if how.startswith("block"):
                block.compile(backend=count)
            elif how in ("torch.compile", "inner"):
                model.blocks[number] = torch.compile(block, backend=count)
        if how.endswith("FSDP2"):
            by_fsdp2(model)
        else:
            shard(model, units=[Block] if how == "inner" else None)
        found = {name.replace("_orig_mod.", ""): each for name, each in steps(model, 2).items()}
        if wanted is None:
            wanted, most = found, len(graphs)
        assert_same(wanted, found)
        assert 0 < len(graphs) <= most, (how, len(graphs), most)
    torch._dynamo.reset()


# -- optimizers made before, and gathers that fail ---------------------------------------------------------------------


def optimizer_made_before_clears() -> None:
    """Gradients are cleared, clipped and unscaled by an optimizer that was made before `shard`, before it steps."""
    torch.manual_seed(0)
    model: Any = GPT()
    optimizer = adamw(model.parameters())
    given = list(model.parameters())
    shard(model)
    for clear in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)):
        loss_of(model, 0).backward()
        assert all(each.grad is not None for each in given)
        clear()
        assert all(each.grad is None or not each.grad.full_tensor().any() for each in model.parameters())
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(given, 0.1)
    optimizer.step()
    peer: Any = built(by_memfit)
    peer_optimizer = adamw(peer.parameters())
    loss_of(peer, 0).backward()
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.1))  # type: ignore[arg-type]
    peer_optimizer.step()
    assert_same(whole(peer), whole(model))
    model = GPT().to(torch.bfloat16)
    optimizer = adamw(model.parameters())
    for again in (False, True):  # state of a step in bfloat16, then shards in float32
        if again:
            shard(model, precision=Precision(shard_dtype=torch.float32))
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {each["exp_avg"].dtype for each in optimizer.state.values()} == {torch.float32}


def gathers_that_fail() -> None:
    """A forward, or a method, whose gather fails leaves nothing behind, and the next one is right."""
    model: Any = shard(stack(), units=[Block])
    block = model.blocks[0]
    register_forward_method(block, "forward")
    runtime = get_runtime(model)
    calls = block.__dict__["_memfit_hooks"]
    (unit,) = [each for each in runtime.units if each.name == "blocks.0"]

    class Failing(Gather):
        error: type[BaseException] = RuntimeError

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise self.error("no memory")

    wanted = model(torch.ones(2, 8))
    failing = Failing()
    for Failing.error in (RuntimeError, KeyboardInterrupt):
        unit.flats[0].custom_all_gather = failing
        for call in (block, block.forward, model):
            with pytest.raises(Failing.error):
                call(torch.ones(2, 8))
        unit.flats[0].custom_all_gather = None
        assert torch.equal(model(torch.ones(2, 8)), wanted)
        model(torch.ones(2, 8)).sum().backward()
        assert not calls._entered and unit.state.value == "idle"
