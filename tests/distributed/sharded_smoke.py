from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_models import GPT
from torch.nn.parallel import DistributedDataParallel

from memfit.sharded import shard


def losses(kind: str) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    trained = DistributedDataParallel(model) if kind == "ddp" else shard(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(3):
        tokens = torch.randint(0, 67, (2, 8))
        loss = F.cross_entropy(trained(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
