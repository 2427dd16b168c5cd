"""The target of a plan: a device, how many of them, and how they are joined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError
from memfit.hardware.device import Device, Link
from memfit.hardware.load import load_device, load_link
from memfit.hardware.nccl import nccl_range
from memfit.hardware.rank_memory import ByteRange, RankMemory, check_margin
from memfit.units import display_bytes, parse_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`ranks` devices, `ranks_per_node` to a node, joined by one link inside a node and one between nodes.

    `context_bytes`, `nccl_bytes` and `margin` are for those who know better than the figures of the device (Note [What
    a rank has]): the memory of a process outside the allocator, that of NCCL, and how much more than predicted the
    allocator may reserve, as a part of that.
    """

    device: Device
    ranks: int
    ranks_per_node: int
    intra_node_link: Link
    inter_node_link: Link
    context_bytes: int | None = None
    nccl_bytes: int | None = None
    margin: float | None = None
    host_memory_bytes: int | None = None
    """What units of one rank may take of the host's memory for what they offload; None where nobody said."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; write a whole number of at least 1")
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise InputError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}; "
                "give a multiple, or another ranks_per_node"
            )
        if self.margin is not None:
            check_margin(self.margin)
        for name in ("context_bytes", "nccl_bytes"):
            value, total = getattr(self, name), self.device.memory_total_bytes
            if value is not None and not 0 <= value < total:
                raise InputError(
                    f"{name} is {value!r}; write bytes of {self.device.name}, which has {display_bytes(total)}"
                )

    @classmethod
    def parse(
        cls,
        target: str | torch.device | Device | Target,
        *,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        intra_node_link: str | Link | None = None,
        inter_node_link: str | Link | None = None,
        context: str | int | None = None,
        nccl: str | int | None = None,
        margin: str | float | None = None,
        expandable_segments: bool | None = None,
        host_memory: str | int | None = None,
    ) -> Target:
        """Parse a target from a device name, device file, torch.device, Device or Target; what is given here wins.

        Without them: one rank, the usual number to a node (fewer if need be), the device's own links, what is known of
        the context, of NCCL's memory and of how far predictions were off, and the allocator's default segments.
        `host_memory` is what one rank may take of its host for what units offload.
        """
        found = cls._parse(target, ranks, ranks_per_node, intra_node_link, inter_node_link)
        changes: dict[str, Any] = {
            "context_bytes": None if context is None else parse_bytes(context),
            "nccl_bytes": None if nccl is None else parse_bytes(nccl),
            "margin": None if margin is None else check_margin(margin),
            "host_memory_bytes": None if host_memory is None else parse_bytes(host_memory),
        }
        if expandable_segments is not None and found.device.allocator.caches:
            changes["device"] = found.device.with_expandable_segments(expandable_segments)
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(found, **given) if given else found

    @classmethod
    def _parse(
        cls,
        target: str | torch.device | Device | Target,
        ranks: int | None,
        ranks_per_node: int | None,
        intra_node_link: str | Link | None,
        inter_node_link: str | Link | None,
    ) -> Target:
        if isinstance(target, Target):
            intra, inter = (_link(each, target.device) for each in (intra_node_link, inter_node_link))
            return replace(
                target,
                ranks=target.ranks if ranks is None else ranks,
                ranks_per_node=target.ranks_per_node if ranks_per_node is None else ranks_per_node,
                intra_node_link=intra or target.intra_node_link,
                inter_node_link=inter or target.inter_node_link,
            )
        import torch  # here, so that a look at the devices does not wait for it

        device = load_device(str(target)) if isinstance(target, str | torch.device) else target
        if not isinstance(device, Device):
            raise InputError(f"a target cannot be {target!r}; give a device name such as 'h100-sxm', or a Device")
        ranks = 1 if ranks is None else ranks
        intra, inter = (_link(each, device) for each in (intra_node_link, inter_node_link))
        return cls(
            device=device,
            ranks=ranks,
            ranks_per_node=_usual_per_node(device, ranks) if ranks_per_node is None else ranks_per_node,
            intra_node_link=intra or device.intra_node_link,
            inter_node_link=inter or device.inter_node_link,
        )

    @property
    def nodes(self) -> int:
        """How many nodes the ranks fill."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def rank_memory(self) -> RankMemory:
        """What one rank has of its device (Note [What a rank has])."""
        usual = self.device.rank_memory
        nccl = nccl_range(self.ranks) if self.device.type == "cuda" else usual.nccl
        return replace(
            usual,
            context=usual.context if self.context_bytes is None else ByteRange.exactly(self.context_bytes),
            nccl=nccl if self.nccl_bytes is None else ByteRange.exactly(self.nccl_bytes),
            margin=usual.margin if self.margin is None else self.margin,
        )

    @property
    def available_bytes(self) -> int:
        """What the allocator of one rank may reserve: the device less context and NCCL."""
        return self.rank_memory.available_bytes

    @property
    def usable_bytes(self) -> int:
        """What a plan may have one rank reserve: what is available, less the margin."""
        return self.rank_memory.usable_bytes

    def budget_bytes(self, budget: str | int | float | None = None) -> int:
        """Return one rank's budget in bytes: an int is bytes, a fraction is of the device's total, None all usable."""
        if budget is None:
            return self.usable_bytes
        total = self.device.memory_total_bytes
        n = parse_bytes(budget, total_bytes=total)
        if not 0 < n <= total:
            raise InputError(
                f"a budget of {budget!r} does not fit {self.device.name}, which has {display_bytes(total)}; "
                "give more than nothing and at most that, or another target"
            )
        return n

    def allowed_bytes(self, budget: str | int | float | None = None) -> int:
        """Return the budget of one rank, lowered to what there is; the margin is for budgets that are not given."""
        return self.usable_bytes if budget is None else min(self.budget_bytes(budget), self.available_bytes)


def _usual_per_node(device: Device, ranks: int) -> int:
    usual = device.ranks_per_node
    if not isinstance(ranks, int) or ranks <= usual:
        return usual
    return next(n for n in range(usual, 0, -1) if ranks % n == 0)


def _link(link: str | Link | None, device: Device) -> Link | None:
    """Return the link of this name; one that a device file has itself is known to that device only."""
    own = {each.name: each for each in (device.host_link, device.intra_node_link, device.inter_node_link)}
    return own.get(link) or load_link(link) if isinstance(link, str) else link
