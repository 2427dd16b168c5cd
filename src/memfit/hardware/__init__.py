"""Devices and links as data with source and date, and the Target made of them."""

from memfit.hardware.device import AllocatorRules, Device, Link, Provenance, Rates, Sustained
from memfit.hardware.efficiency import Efficiency, Family, FamilyEfficiency, HostTimes
from memfit.hardware.kernels import KernelFigures, TileModel, kernel_figures
from memfit.hardware.load import list_devices, list_links, load_device, load_link
from memfit.hardware.target import Target

__all__ = [
    "AllocatorRules",
    "Device",
    "Efficiency",
    "Family",
    "FamilyEfficiency",
    "HostTimes",
    "KernelFigures",
    "Link",
    "Provenance",
    "Rates",
    "Sustained",
    "Target",
    "TileModel",
    "kernel_figures",
    "list_devices",
    "list_links",
    "load_device",
    "load_link",
]
