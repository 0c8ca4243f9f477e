"""The error of a journal that cannot be used."""

from __future__ import annotations

from hardpoint.plugins import HardpointError


class JournalError(HardpointError):
    """A journal cannot be read, or not be replayed here; the message says where and why."""
