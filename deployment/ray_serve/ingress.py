"""The deployment of the HTTP application, which parses, tokenises, chooses engines and streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from hardpoint.async_llm import open_resolved
from hardpoint.configuration.loading import config_from
from hardpoint.host.registry.discovery import installed_version
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.server.commands import MakeApplication

from .group import opener


class _Disconnecting:
    """Notifies an ASGI application of a client that is gone, where Ray cancels its waiting."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            try:
                return await receive()
            except RayError:
                return {"type": f"{scope['type']}.disconnect", "code": _GOING_AWAY}

        await self._application(scope, received, send)


_GOING_AWAY = 1001


@dataclass(frozen=True)
class IngressSettings:
    """Parameters of the application.

    Attributes:
        config: the configuration as plain data.
        config_sources: by dotted path, where its values came from.
        application: makes the ASGI application.
        drain_seconds: as of RayServeOptions.
        log_level: level of the logger "hardpoint".
    """

    config: Mapping[str, Any]
    config_sources: Mapping[str, str]
    application: MakeApplication
    drain_seconds: float
    log_level: str


@serve.ingress()
class Ingress:
    """Serves the engines of a handle over HTTP."""

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, engines: DeploymentHandle, settings: IngressSettings
    ) -> None:
        """Read the tokenizer, and wait until the first engine is ready."""
        logging.getLogger("hardpoint").setLevel(settings.log_level)
        config, _ = config_from(settings.config, caller="ray_serve")
        sources = ConfigSources(dict(settings.config_sources))
        open_client = opener(engines, settings.drain_seconds)
        self._llm = await asyncio.to_thread(open_resolved, config, sources, open_client=open_client)
        self._application = _Disconnecting(settings.application(self._llm, installed_version()))

    def __serve_build_asgi_app__(self) -> Any:
        return self._application

    async def pids(self) -> dict[int, int]:
        """Return the process ids of the engines that serve, by rank, each on its node.

        For callers of the deployment's handle.
        """
        pids = {engine.rank: engine.pid for engine in self._llm.engines}
        return {rank: pid for rank, pid in pids.items() if pid is not None}

    async def check_health(self) -> None:
        """Check that the client of the engines lives, for Serve.

        Raises:
            EngineDeadError: it does not.
        """
        if (dead := self._llm.dead_error) is not None:
            raise dead

    async def __del__(self) -> None:
        """End all requests; Serve calls this when none is left, or the time is up."""
        if (llm := getattr(self, "_llm", None)) is not None:
            await llm.aclose()
