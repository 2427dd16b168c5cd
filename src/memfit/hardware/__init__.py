"""Devices and links as data with source and date, and the Target made of them."""

from memfit.hardware.context import MeasuredContext, measure_context
from memfit.hardware.device import (
    RATE_NAMES,
    AllocatorRules,
    CollectiveRate,
    Device,
    DeviceType,
    Link,
    OffloadLink,
    Provenance,
    Rates,
    Sustained,
)
from memfit.hardware.efficiency import HALF_BYTES, Efficiency, EngineTimes, Family, FamilyEfficiency, HostTimes
from memfit.hardware.kernels import ConvolutionFigures, KernelFigures, TileModel, kernel_figures
from memfit.hardware.load import list_devices, list_links, load_device, load_link, user_device_paths
from memfit.hardware.nccl import nccl_range
from memfit.hardware.prices import Price, check_price, find_price, list_prices
from memfit.hardware.rank_memory import ByteRange, RankMemory
from memfit.hardware.schema import Figure, Reader, Source
from memfit.hardware.target import Target

__all__ = [
    "HALF_BYTES",
    "RATE_NAMES",
    "AllocatorRules",
    "ByteRange",
    "CollectiveRate",
    "ConvolutionFigures",
    "Device",
    "DeviceType",
    "Efficiency",
    "EngineTimes",
    "Family",
    "FamilyEfficiency",
    "Figure",
    "HostTimes",
    "KernelFigures",
    "Link",
    "MeasuredContext",
    "OffloadLink",
    "Price",
    "Provenance",
    "RankMemory",
    "Rates",
    "Reader",
    "Source",
    "Sustained",
    "Target",
    "TileModel",
    "check_price",
    "find_price",
    "kernel_figures",
    "list_devices",
    "list_links",
    "list_prices",
    "load_device",
    "load_link",
    "measure_context",
    "nccl_range",
    "user_device_paths",
]
