"""A plan for DistributedDataParallel on the model that is, or will be, wrapped in it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import InputError
from memfit.plans import DdpPlan


def check_replicas(ddp: DdpPlan, model: nn.Module) -> None:
    """Refuse another number of ranks than the plan has, and a wrapper that keeps other buckets than it counts on.

    The caller wraps the model, before or after: what is not there yet cannot be looked at.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != ddp.ranks:
        ranks = dist.get_world_size()
        raise InputError(
            f"this plan replicates the model on {ddp.ranks} ranks, and here are {ranks}; start as many, or plan with "
            f"ranks={ranks}"
        )
    if not isinstance(model, DistributedDataParallel):
        return
    if ddp.gradient_as_bucket_view and not model.gradient_as_bucket_view:
        raise InputError(
            "this plan counts on gradients that are views of DDP's buckets, and the model keeps both; wrap it with "
            "DistributedDataParallel(model, gradient_as_bucket_view=True), or plan without"
        )
