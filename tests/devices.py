"""Devices for tests of small models."""

from __future__ import annotations

from dataclasses import replace

from memfit.hardware import Device, load_device


def without_workspaces(name: str = "h100-sxm") -> Device:
    """A device whose products need no workspace: on a small model 64 MiB of them would be nearly all there is."""
    return replace(load_device(name), blas_workspace_bytes=0, blaslt_workspace_bytes=0)
