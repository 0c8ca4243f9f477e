"""The routes of the admin address: inspection and control by operators."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.operations.adapters import LoadAdapter, UnloadAdapter
from hardpoint.builtin_plugins.server.operations.allowed_paths import allowed_path
from hardpoint.builtin_plugins.server.receiving import BodyReceiver
from hardpoint.builtin_plugins.server.requests.bodies import convert_body, decode_object
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.errors import BusyError, EngineDeadError, PluginError
from hardpoint.plugins import ConfigError, HardpointError, ModelError, RequestError
from hardpoint.plugins.server import Route
from hardpoint.typed import Strict

from .models import json_response
from .settings import (
    SetSettings,
    check_name,
    check_names,
    named_in,
    shown_settings,
    without_secrets,
)

if TYPE_CHECKING:
    from hardpoint.plugins.server.engine_set import EngineSet

_log = logging.getLogger("hardpoint")

_OF_SERVER = frozenset({"/drain", "/debug/log_level"})
"""Routes that work without an engine."""

OLD_PATHS = {
    "/stats": "/engines/stats",
    "/settings": "/engines/settings",
    "/scale": "/engines/scale",
    "/retire": "/engines/retire",
    "/update_weights": "/weights/update",
    "/policy": "/plugins/policy",
    "/log_level": "/debug/log_level",
}
"""New paths of routes by the old ones, which work until 0.3 with a header `Deprecation`."""

_DEPRECATED = "@1795737600"  # 27 November 2026, as RFC 9745 writes it

T = TypeVar("T", bound=msgspec.Struct)

_Endpoint = Callable[[Request], Awaitable[Response]]


class Nothing(Strict):
    """A body without fields."""


class AbortRequests(Strict):
    """Requests to end, by the ids that `GET /requests` lists."""

    request_ids: list[str]


class Pause(Strict):
    """A pause, see `AsyncLLM.engines.pause`."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class Sleep(Strict):
    """A sleep, see `AsyncLLM.sleep`."""

    level: Literal[0, 1, 2] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


class WakeUp(Strict):
    """The parts to wake up, see `AsyncLLM.wake_up`."""

    tags: list[str] | None = None


class ResetPrefixCache(Strict):
    """A reset of the prefix cache."""

    recompute_running: bool = False


class UpdateWeights(Strict):
    """Files of other weights, see `AsyncLLM.weights.update`."""

    path: str
    version: str | None = None
    mode: Literal["abort", "wait", "keep"] = "keep"
    recompute: bool = True


class Scale(Strict):
    """A number of engines, see `AsyncLLM.engines.scale`."""

    engines: int
    drain_seconds: float = 30.0


class Retire(Strict):
    """Engines that go, by their ranks, see `AsyncLLM.engines.retire`."""

    ranks: list[int]
    drain_seconds: float = 30.0


class SetPolicy(Strict):
    """Another scheduling policy, by its name, which has to be in `plugins.live`."""

    use: str
    options: dict[str, Any] = {}


class SetLogLevel(Strict):
    """The level of a logger of the server's processes: "hardpoint" or one below it."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    logger: str = "hardpoint"


class WorkerCall(Strict):
    """A call of a method of every worker, see `AsyncLLM.collective_rpc`."""

    method: str
    args: list[Any] = []
    timeout: float | None = None


class AdminRoutes:
    """The routes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine
        self._reported: set[str] = set()  # old paths that the log has
        self._bodies = BodyReceiver(service.settings)  # its own: users cannot fill it

    def routes(self) -> list[Route]:
        """Return the routes, including old paths."""
        routes = self._routes()
        return [
            *routes,
            *(
                self._old(old, route)
                for old, path in OLD_PATHS.items()
                for route in routes
                if route.path == path
            ),
        ]

    def _old(self, path: str, route: Route) -> Route:
        notice = f"the path {path} is deprecated, and works until hardpoint 0.3; use {route.path}"

        async def endpoint(request: Request) -> Response:
            if path not in self._reported:
                self._reported.add(path)
                _log.warning("administrator %s: %s", request.state.client.name, notice)
            response = await cast(_Endpoint, route.endpoint)(request)
            response.headers["Deprecation"] = _DEPRECATED
            response.headers["Link"] = f'<{route.path}>; rel="successor-version"'
            return response

        summary = f"Deprecated: use {route.path}."
        return dataclasses.replace(route, path=path, endpoint=endpoint, summary=summary)

    def _routes(self) -> list[Route]:
        return [
            self._get("/plugins", self.plugins, "List the plugins, their health and their cost."),
            self._get("/requests", self.requests, "List live requests, and why each waits."),
            self._get("/engines/stats", self.stats, "Return the state of the scheduler."),
            self._get("/is_paused", self.is_paused, "Return whether the engine is paused."),
            self._get("/is_sleeping", self.is_sleeping, "Return whether the engine is asleep."),
            self._post("/requests/abort", self.abort, AbortRequests, "End requests."),
            self._post("/pause", self.pause, Pause, "Stop generating."),
            self._post("/resume", self.resume, Nothing, "Continue after a pause."),
            self._post("/sleep", self.sleep, Sleep, "Release memory."),
            self._post("/wake_up", self.wake_up, WakeUp, "Take memory again, and continue."),
            self._post(
                "/reset_prefix_cache",
                self.reset_prefix_cache,
                ResetPrefixCache,
                "Clear the prefix cache.",
            ),
            self._post(
                "/reset_encoder_cache",
                self.reset_encoder_cache,
                Nothing,
                "Clear the embeddings of images and the like.",
            ),
            self._post(
                "/weights/update", self.update_weights, UpdateWeights, "Replace the weights."
            ),
            self._post("/engines/scale", self.scale, Scale, "Change the number of engines."),
            self._post("/engines/retire", self.retire, Retire, "End engines by rank."),
            self._get(
                "/engines/settings", self.settings, "Return the settings, and how each changes."
            ),
            self._post(
                "/engines/settings",
                self.set_settings,
                SetSettings,
                "Change plugins and settings.",
                "PATCH",
            ),
            self._post(
                "/plugins/policy", self.set_policy, SetPolicy, "Replace the scheduling policy."
            ),
            self._post("/start_profile", self.start_profile, Nothing, "Profile the workers."),
            self._post("/stop_profile", self.stop_profile, Nothing, "Write the profiles."),
            self._post("/debug/log_level", self.set_log_level, SetLogLevel, "Change a log level."),
            self._post("/collective_rpc", self.call_workers, WorkerCall, "Call all workers."),
            self._post(
                "/v1/load_lora_adapter", self.load_adapter, LoadAdapter, "Load an adapter (LoRA)."
            ),
            self._post(
                "/v1/unload_lora_adapter", self.unload_adapter, UnloadAdapter, "Unload an adapter."
            ),
            self._post("/drain", self.drain, Nothing, "End the server as SIGTERM does."),
        ]

    def _get(self, path: str, answer: Callable[[], Awaitable[Any]], summary: str) -> Route:
        async def endpoint(request: Request) -> Response:  # noqa: ARG001
            return await self._answered(answer)

        return Route(path=path, endpoint=endpoint, admin=True, summary=summary)

    def _post(
        self,
        path: str,
        run: Callable[..., Awaitable[Any]],
        type_: type[T],
        summary: str,
        method: str = "POST",
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            body = await self._read(request, type_)
            name = request.state.client.name
            _log.info("administrator %s: %s %s", name, method, path)
            arguments = (body, name) if isinstance(body, SetSettings | SetPolicy) else (body,)
            return await self._answered(lambda: run(*arguments), is_served=path not in _OF_SERVER)

        return Route(
            path=path,
            endpoint=endpoint,
            methods=(method,),
            admin=True,
            summary=summary,
            request_type=type_,
        )

    async def _answered(
        self, answer: Callable[[], Awaitable[Any]], *, is_served: bool = True
    ) -> Response:
        """Return an answer as JSON.

        Args:
            is_served: whether the engine has a part in it, and so has to run.

        Raises:
            AnswerError: the engine cannot do that, or not now.
        """
        if is_served:
            self._service.check_engine()
        try:
            return json_response(await answer())
        except EngineDeadError:
            raise
        except (ConfigError, PluginError) as error:
            raise AnswerError(400, str(error)) from error
        except HardpointError as error:
            if type(error) in (
                HardpointError,
                BusyError,
            ):  # of its state, such as "the engine is asleep"
                raise AnswerError(409, str(error), code="conflict") from error
            raise

    async def _read(self, request: Request, type_: type[T]) -> T:
        async with self._bodies.body(request) as body:
            fields = decode_object(body, self._service.settings.limits, type_) if body else {}
            return convert_body(fields, type_, lenient=False)

    async def plugins(self) -> dict[str, Any]:
        """List the plugins, their health and their cost."""
        manifest = self._engine.plugins.manifest
        health = await self._engine.plugins.health()
        return {
            "hardpoint": manifest.hardpoint,
            "generation": manifest.generation,
            "hash": manifest.hash,
            "plugins": [
                {
                    "kind": entry.kind,
                    "name": entry.name,
                    "class": entry.value,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "origin": entry.origin,
                    "place": entry.place,
                    "options": without_secrets(entry.options),
                }
                for entry in manifest.tree()
            ],
            "quarantined": health.quarantined,
            "faults": health.faults,
            "server_faults": self._service.faults.counts,
            "fallbacks": health.fallbacks,
            "slow": health.slow,
            "meters": await self._engine.plugins.meters(),
            "states": {
                name: without_secrets(state)
                for name, state in (await self._engine.plugins.states()).items()
            },
        }

    async def requests(self) -> dict[str, Any]:
        """List live requests, and why each waits."""
        return {"requests": await self._engine.engines.live_requests()}

    async def load_adapter(self, body: LoadAdapter) -> dict[str, Any]:
        """Load an adapter from an allowed folder; requests may name it from now on."""
        added = await self._service.adapters.load(body)
        return {"lora_name": added.name, "lora_int_id": added.id}

    async def unload_adapter(self, body: UnloadAdapter) -> dict[str, Any]:
        """Unload an adapter; requests that name it get 404 from now on."""
        removed = await self._service.adapters.unload(body)
        return {"lora_name": removed.name, "lora_int_id": removed.id}

    async def stats(self) -> Any:
        """Return the state of the scheduler."""
        return await self._engine.engines.scheduler_stats()

    async def abort(self, body: AbortRequests) -> dict[str, Any]:
        """End requests; return which of them there were."""
        ids = set(body.request_ids)
        live = await self._engine.engines.live_requests()
        requests = {
            request.external_id
            for request in live
            if not ids.isdisjoint((request.external_id, request.request_id))
        }
        await self._engine.abort(body.request_ids)
        return {"aborted": sorted(requests)}

    async def is_paused(self) -> dict[str, bool]:
        """Return whether the engine is paused."""
        return {"is_paused": await self._engine.engines.is_paused()}

    async def is_sleeping(self) -> dict[str, bool]:
        """Return whether the engine is asleep."""
        return {"is_sleeping": await self._engine.engines.is_sleeping()}

    async def pause(self, body: Pause) -> dict[str, Any]:
        """Stop generating; requests are refused from now on."""
        self._service.paused = "the engine is paused by an administrator"
        try:
            await self._engine.engines.pause(body.mode, clear_cache=body.clear_cache)
        finally:
            state = await self._follow()
        return state

    async def resume(self, body: Nothing) -> dict[str, Any]:  # noqa: ARG002
        """Continue after a pause."""
        await self._engine.engines.resume()
        return await self._follow()

    async def sleep(self, body: Sleep) -> dict[str, Any]:
        """Release memory; requests are refused from now on."""
        self._service.paused = "the engine was put to sleep by an administrator"
        try:
            await self._engine.sleep(body.level, body.mode)
        finally:
            state = await self._follow()
        return state

    async def wake_up(self, body: WakeUp) -> dict[str, Any]:
        """Take memory again, and continue once there is all of it."""
        await self._engine.wake_up(body.tags)
        return await self._follow()

    async def _follow(self) -> dict[str, Any]:
        """Refuse requests, or not, as the engine is now; return that."""
        sleeping, paused = (
            await self._engine.engines.is_sleeping(),
            await self._engine.engines.is_paused(),
        )
        if sleeping:
            self._service.paused = "the engine was put to sleep by an administrator"
        elif paused:
            self._service.paused = "the engine is paused by an administrator"
        else:
            self._service.paused = None
        return {"is_paused": paused, "is_sleeping": sleeping}

    async def update_weights(self, body: UpdateWeights) -> dict[str, Any]:
        """Replace weights of the model by allowed files; return their version."""
        folders = self._service.settings.weight_folders
        path = allowed_path(body.path, folders, "path", "server.weight_folders")
        try:
            version = await self._engine.weights.update(
                path, version=body.version, mode=body.mode, recompute=body.recompute
            )
        except ModelError as error:
            raise AnswerError(400, str(error), param="path") from error
        return {"weight_version": version}

    async def scale(self, body: Scale) -> EngineSet:
        """Start or retire engines; return the set of engines."""
        return await self._engine.engines.scale(body.engines, drain_seconds=body.drain_seconds)

    async def retire(self, body: Retire) -> EngineSet:
        """End engines; return the remaining engines."""
        return await self._engine.engines.retire(body.ranks, drain_seconds=body.drain_seconds)

    async def reset_prefix_cache(self, body: ResetPrefixCache) -> dict[str, Any]:
        """Clear the prefix cache."""
        await self._engine.reset_prefix_cache(recompute_running=body.recompute_running)
        return {}

    async def reset_encoder_cache(self, body: Nothing) -> dict[str, Any]:  # noqa: ARG002
        """Clear the embeddings of images and the like."""
        await self._engine.engines.reset_encoder_cache()
        return {}

    async def set_policy(self, body: SetPolicy, administrator: str) -> dict[str, Any]:
        """Replace the scheduling policy."""
        for path, name in [("use", body.use), *named_in("options", body.options)]:
            check_name(path, name, self._engine.config)
        origin = f"administrator {administrator}"
        await self._engine.plugins.set_policy(body.use, body.options, origin=origin)
        return {"policy": body.use}

    async def settings(self) -> dict[str, Any]:
        """Return the settings, without secrets."""
        return shown_settings(self._engine.engines.settings())

    async def set_settings(self, body: SetSettings, administrator: str) -> dict[str, Any]:
        """Change plugins and settings; return their generation and fingerprint."""
        check_names(body, self._engine.config)
        manifest = await self._engine.plugins.change(
            **msgspec.structs.asdict(body.plugins),
            config=body.config,
            running=body.running,
            origin=f"administrator {administrator}",
        )
        fingerprint = self._engine.engines.settings().fingerprint
        return {"generation": manifest.generation, "fingerprint": fingerprint}

    async def start_profile(self, body: Nothing) -> dict[str, Any]:  # noqa: ARG002
        """Profile the workers."""
        await self._engine.debug.start_profile()
        return {}

    async def stop_profile(self, body: Nothing) -> dict[str, Any]:  # noqa: ARG002
        """Write the profiles."""
        return {"files": await self._engine.debug.stop_profile()}

    async def set_log_level(self, body: SetLogLevel) -> dict[str, Any]:
        """Change a log level; return the one before."""
        if body.logger != "hardpoint" and not body.logger.startswith("hardpoint."):
            raise RequestError(
                f'logger: expected "hardpoint" or one below it, got {body.logger[:100]!r}'
            )
        logger = logging.getLogger(body.logger)
        before = logging.getLevelName(logger.level)
        logger.setLevel(body.level)
        self._service.note_level(body.logger, body.level)
        return {"logger": body.logger, "level": body.level, "before": before}

    async def call_workers(self, body: WorkerCall) -> dict[str, Any]:
        """Call a method of all workers."""
        return {"results": await self._engine.collective_rpc(body.method, body.timeout, body.args)}

    async def drain(self, body: Nothing) -> dict[str, Any]:  # noqa: ARG002
        """End the server as SIGTERM does."""
        self._service.ask_to_drain()
        return {"open": self._service.load.open}
