"""How much of a device's peak its kernels reach, by family of ops, and what the host needs to issue them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

HALF_BYTES = 2


class Family(str, enum.Enum):
    """Kinds of kernels that reach about the same part of a device's peak."""

    MATRIX_LARGE = "matrix_large"
    MATRIX_SMALL = "matrix_small"
    MATRIX_UNALIGNED = "matrix_unaligned"
    MATRIX_SIMT = "matrix_simt"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    TRANSCENDENTAL = "transcendental"
    OPTIMIZER = "optimizer"
    EMBEDDING = "embedding"
    INDEXING = "indexing"
    REDUCTION = "reduction"
    COPY = "copy"
    RANDOM = "random"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyEfficiency:
    """Parts of the device's peak FLOP/s and memory bandwidth, and what every kernel takes beyond them."""

    family: Family
    compute: float
    bandwidth: float
    overhead_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """What the host needs to issue an op, by phase, and to enter and leave a module.

    `view_ms` is an op that launches nothing, `second_run_ms` what each op of a unit that runs again takes beyond its
    own time: hooks around both runs, and answers for saved ops, `convolution_ms` what a library's convolution takes
    beyond another op: descriptors, the choice of a plan, the workspace. On a GPU the host runs ahead; on a CPU it takes
    turns with the kernels.
    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    view_ms: float
    call_ms: float
    second_run_ms: float = 0.0
    convolution_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """What an engine that shards takes on ranks of this device beyond the ops, measured on small sharded steps.

    Collectives take `slowdown` times as long in a step as by themselves, where sending and receiving does not compete
    with compute. `collective_ms` is what the host takes for each beyond that: hooks, buffers, the views of parameters.
    `waiting` is the part of a step's ops for which ranks wait for the slowest of them. `second_run_ms` is that of
    `HostTimes`, under this engine. `offload_s_per_byte` is what a byte that leaves and comes back takes beyond what was
    measured of the disk. `fsdp2-half` is the engine where it casts parameters to 16 bits.
    """

    engine: str
    slowdown: float
    collective_ms: float
    waiting: float
    second_run_ms: float
    offload_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The efficiency factors of a device, one for each family.

    `half` has families whose ops on 16-bit numbers were measured by themselves: a CPU may convert them on the way, or
    have units for them that only some kernels use.
    """

    families: tuple[FamilyEfficiency, ...]
    host: HostTimes
    half: tuple[FamilyEfficiency, ...] = ()

    def __getitem__(self, family: Family) -> FamilyEfficiency:
        return next(each for each in self.families if each.family is family)

    def of(self, family: Family, item_bytes: int) -> FamilyEfficiency:
        """Return the factors of a family for numbers of so many bytes."""
        own = (each for each in self.half if each.family is family) if item_bytes == HALF_BYTES else ()
        return next(iter(own), None) or self[family]
