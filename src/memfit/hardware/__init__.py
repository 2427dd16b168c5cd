"""Devices and links as data with source and date, and the Target made of them."""

from memfit.hardware.device import AllocatorRules, Device, Link, Provenance, Rates
from memfit.hardware.efficiency import Efficiency, Family, FamilyEfficiency, HostTimes
from memfit.hardware.load import list_devices, list_links, load_device, load_link
from memfit.hardware.target import Target

__all__ = [
    "AllocatorRules",
    "Device",
    "Efficiency",
    "Family",
    "FamilyEfficiency",
    "HostTimes",
    "Link",
    "Provenance",
    "Rates",
    "Target",
    "list_devices",
    "list_links",
    "load_device",
    "load_link",
]
