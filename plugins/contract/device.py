"""Values of the host on a device, without making the host wait for the device."""

from .process.device import to_device

__all__ = ["to_device"]
