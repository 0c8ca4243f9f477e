"""How a frontend reaches an engine core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest, PluginMeter

from .engine import EngineCore

__all__ = ["EngineCoreClient", "InprocClient"]


class EngineCoreClient(Protocol):
    """What a frontend may ask of an engine core, wherever it runs."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""

    def get_output(self) -> EngineCoreOutputs:
        """Return the next batch of outputs; may be empty."""

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""

    def close(self) -> None:
        """End the engine."""


class InprocClient:
    """Calls the core directly; `get_output` runs a step."""

    def __init__(self, core: EngineCore) -> None:
        """Take over the core."""
        self._core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""
        self._core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Run one step."""
        return self._core.step()

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""
        return self._core.plugin_meters()

    def close(self) -> None:
        """Close the core and let go of it."""
        core = self._core
        del self._core
        core.close()
