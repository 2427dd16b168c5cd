"""The target of a plan: a device, how many of them, and how they are joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.errors import InputError
from memfit.hardware.device import Device, Link
from memfit.hardware.load import load_device, load_link
from memfit.units import display_bytes, parse_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`ranks` devices, `ranks_per_node` to a node, joined by one link inside a node and one between nodes."""

    device: Device
    ranks: int
    ranks_per_node: int
    intra_node_link: Link
    inter_node_link: Link

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

    @classmethod
    def parse(
        cls,
        target: str | torch.device | Device | Target,
        *,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        intra_node_link: str | Link | None = None,
        inter_node_link: str | Link | None = None,
    ) -> Target:
        """Parse a target from a device name, device file, torch.device, Device or Target; what is given here wins.

        Without them: one rank, the usual number to a node (fewer if need be), the device's own links.
        """
        intra, inter = _link(intra_node_link), _link(inter_node_link)
        if isinstance(target, Target):
            return cls(
                device=target.device,
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
    def usable_bytes(self) -> int:
        """Bytes of one rank's device that are left for tensors after context and library workspaces."""
        return self.device.usable_bytes

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


def _usual_per_node(device: Device, ranks: int) -> int:
    usual = device.ranks_per_node
    if not isinstance(ranks, int) or ranks <= usual:
        return usual
    return next(n for n in range(usual, 0, -1) if ranks % n == 0)


def _link(link: str | Link | None) -> Link | None:
    return load_link(link) if isinstance(link, str) else link
