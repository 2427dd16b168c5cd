"""The cases in which the sharded runtime must train as its peers do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from memfit.sharded import Precision, UnitOptions
from tests.distributed.sharded_models import (
    CNN,
    GPT,
    T5,
    VOCABULARY,
    Chain,
    Dangling,
    Dropped,
    MoE,
    Odd,
    Often,
    Recompute,
    Recurrent,
)
from tests.distributed.sharded_parity import Case, compare, language_loss

BF16 = {"precision": Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
T5_UNITS = ("encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1")
GPT_UNITS = ("blocks.0", "blocks.1", "blocks.2")


def _frozen(*names: str) -> nn.Module:
    model = GPT()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return model


def _tied_inside() -> nn.Module:
    model = GPT(tied=True)
    for block in model.blocks:
        block.norm_2.weight = block.norm.weight
    return model


def _tied_across() -> nn.Module:
    model = GPT()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def _shared_module() -> nn.Module:
    model = GPT(layers=2)
    model.blocks.append(model.blocks[0])
    return model


def _odd() -> nn.Module:
    return Chain(Odd(16, dist.get_rank()), Odd(16, dist.get_rank()))


def _dropped() -> nn.Module:
    rank = dist.get_rank()
    return Chain(*(Dropped(16, left_out=number % 2 == rank) for number in range(3)))


def _hugging_face_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )


def hugging_face_loss(model: nn.Module, number: int) -> torch.Tensor:
    """The loss that the model works out, in an object that is a dataclass and a dict."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def _part_loss(model: Any, number: int) -> torch.Tensor:
    """Runs a part of the model alone, and now and then the whole of it."""
    loss = model.blocks[1](torch.full((2, 4, 32), 0.1 * (number + dist.get_rank()))).pow(2).mean()
    return loss + language_loss(model, number) if number % 2 else loss


def _autocast_loss(model: nn.Module, number: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return language_loss(model, number)


def _two_forwards_loss(model: nn.Module, number: int) -> torch.Tensor:
    return language_loss(model, 2 * number) + language_loss(model, 2 * number + 1)


def _penalty_loss(model: Any, number: int) -> torch.Tensor:
    """Goes through the model's graph twice."""
    loss = language_loss(model, number)
    loss.backward(retain_graph=True)
    return F.relu(loss)


MODELS = {
    "gpt": Case(model=GPT, steps=10),
    "t5": Case(model=T5, units=T5_UNITS, steps=10),
    "cnn": Case(model=CNN, steps=10, peers=("ddp",)),
    "moe": Case(model=MoE, steps=10, peers=("ddp unused",)),
    "moe where every expert runs": Case(model=partial(MoE, every=True), steps=10),
}

TWO_RANKS = {
    **{f"{name}, full shard": case for name, case in MODELS.items()},
    **{f"{name}, gradients only": replace(case, options={"keep": True}, steps=3) for name, case in MODELS.items()},
    **{f"{name}, no shard": replace(case, mesh=(2, 1), steps=3, peers=case.peers[:1]) for name, case in MODELS.items()},
    **{
        f"recompute {where}{', reentrant' if reentrant else ''}": Case(
            model=partial(GPT, layers=4, dropout=0.2, recompute=Recompute(where, reentrant=reentrant)),
            options={"keep": where == "inside"},
        )
        for where in ("units", "inside", "several")
        for reentrant in (False, True)
    },
    "cnn, recompute": Case(model=partial(CNN, recompute=Recompute("units")), peers=("ddp",)),
    "accumulation": Case(model=GPT, micro_batches=2, peers=("fsdp2",)),
    "accumulation without communication": Case(model=GPT, micro_batches=3, quiet=True),
    "accumulation without communication, gradients only": Case(
        model=GPT, micro_batches=2, quiet=True, options={"keep": True}, peers=("ddp",)
    ),
    "accumulation without communication, moe": Case(model=MoE, micro_batches=2, quiet=True, peers=("ddp unused",)),
    "accumulation without communication, recompute": Case(
        model=partial(GPT, recompute=Recompute("units")), micro_batches=2, quiet=True, peers=("ddp",)
    ),
    "bf16": Case(model=GPT, options=BF16, policy=BF16_POLICY, peers=("fsdp2",), steps=10),
    "bf16, t5": Case(model=T5, units=T5_UNITS, options=BF16, policy=BF16_POLICY, peers=("fsdp2",)),
    "bf16, accumulation without communication": Case(
        model=GPT, options=BF16, policy=BF16_POLICY, peers=("fsdp2",), micro_batches=2, quiet=True
    ),
    "bf16, recompute": Case(
        model=partial(GPT, recompute=Recompute("units")), options=BF16, policy=BF16_POLICY, peers=("fsdp2",)
    ),
    "autocast": Case(model=GPT, loss=_autocast_loss),
    "frozen units": Case(model=partial(_frozen, "embedding", "blocks.0", "blocks.2")),
    "frozen parameters": Case(model=partial(_frozen, "norm", "bias")),
    "frozen, recompute": Case(
        model=partial(_frozen, "embedding", "blocks.0", "up"), options={"keep": True}, peers=("ddp",)
    ),
    "tied inside of units": Case(model=_tied_inside),
    "tied across units": Case(model=_tied_across, peers=("ddp",)),
    "a shared module": Case(model=_shared_module, units=("blocks.0", "blocks.1"), peers=("ddp",)),
    "several dtypes, scalars, unused": Case(model=_odd, peers=("ddp unused",)),
    "units in units": Case(model=GPT, units=("blocks.0", "blocks.0.up", "blocks.1.down", "blocks.2")),
    "called twice in a row": Case(
        model=lambda: Chain(Often(16, "in a row")), units=("blocks.0.block",), peers=("ddp",)
    ),
    "called twice side by side": Case(
        model=lambda: Chain(Often(16, "side by side")), units=("blocks.0.block",), peers=("ddp",)
    ),
    "left out by one rank": Case(model=_dropped, peers=("ddp unused",)),
    "left out by one rank, two forwards": Case(model=_dropped, peers=("plain",), loss=_two_forwards_loss),
    "an output that nobody uses": Case(model=Dangling, peers=("ddp unused",)),
    "experts as units": Case(
        model=partial(MoE, every=True),
        units=tuple(f"blocks.{block}.experts.{expert}" for block in range(2) for expert in range(5)),
        peers=("ddp",),
    ),
    "lstm": Case(model=lambda: Chain(Recurrent(16), Recurrent(16))),
    "part of the model alone": Case(model=GPT, peers=("plain",), loss=_part_loss, steps=4),
    "two forwards, one backward": Case(model=GPT, peers=("plain",), loss=_two_forwards_loss),
    "two backwards of one forward": Case(model=GPT, peers=("plain",), loss=_penalty_loss),
}

FOUR_RANKS = {
    **{f"{name}, full shard": case for name, case in MODELS.items()},
    **{
        f"{name}, hybrid": replace(MODELS[name], mesh=(2, 2), peers=MODELS[name].peers[:1])
        for name in ("gpt", "t5", "cnn", "moe")
    },
    "no shard": Case(model=GPT, mesh=(4, 1), peers=("ddp",)),
    "resharded to two ranks": Case(
        model=GPT, units={name: UnitOptions(reshard_ranks=2) for name in GPT_UNITS}, peers=("ddp",)
    ),
    "resharded to two ranks, recompute": Case(
        model=partial(GPT, recompute=Recompute("several")),
        units={name: UnitOptions(reshard_ranks=2) for name in GPT_UNITS},
        peers=("ddp",),
    ),
    "resharded to two ranks, two forwards": Case(
        model=GPT,
        units={name: UnitOptions(reshard_ranks=2) for name in GPT_UNITS},
        peers=("plain",),
        loss=_two_forwards_loss,
    ),
    "hybrid, accumulation without communication": Case(
        model=GPT, mesh=(2, 2), micro_batches=2, quiet=True, peers=("ddp",)
    ),
    "hybrid, bf16": Case(model=GPT, mesh=(2, 2), options=BF16, policy=BF16_POLICY, peers=("fsdp2",), exact=False),
    "several dtypes, scalars, unused": Case(model=_odd, mesh=(2, 2), peers=("ddp unused",)),
    "recompute": Case(model=partial(GPT, recompute=Recompute("units")), peers=("ddp",)),
}

HUGGING_FACE_T5 = Case(
    model=_hugging_face_t5,
    units=("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"),
    peers=("fsdp2",),
    steps=10,
    loss=hugging_face_loss,
)


def compare_case(cases: str, name: str) -> None:
    """Compare one of the cases above."""
    compare({"two": TWO_RANKS, "four": FOUR_RANKS}[cases][name])


def compare_hugging_face() -> None:
    """Compare transformers' T5: bit by bit with FSDP2; DDP sums the gradients of what many units read otherwise."""
    compare(HUGGING_FACE_T5)
    compare(replace(HUGGING_FACE_T5, peers=("ddp",), exact=False))
