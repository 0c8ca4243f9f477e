"""Transfers between host and device without a wait of the host for the device."""

from .process.device import to_device

__all__ = ["to_device"]
