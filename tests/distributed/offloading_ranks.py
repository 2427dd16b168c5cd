"""What each rank does in the tests of plans that offload: a step with its plan and one without, on the same engine."""

from __future__ import annotations

import gc
from typing import Any

import msgspec

from memfit.plans import Plan
from tests.distributed.fsdp2_plans import PLANS, bits, built, loss_of, train
from tests.engines.offloading import store_of


def trains(document: str, engine: Any) -> tuple[bool, int, int]:
    """Whether losses and parameters are equal; how long the file became, and what of it is still taken."""
    case, plan = PLANS["nothing checkpointed"], Plan.from_json(document)
    found = []
    for each in (msgspec.structs.replace(plan, checkpoint=()), plan):
        model = built(case)
        optimizer = case.build_optimizer(model.parameters())
        each.apply(model, optimizer, engine=engine)
        losses = train(case, model, optimizer, each.loss(loss_of), steps=2)
        found.append((losses, {name: value.tolist() for name, value in bits(model).items()}))
    gc.collect()
    extents = store_of(model).extents
    return found[0] == found[1], extents.end, extents.used_bytes
