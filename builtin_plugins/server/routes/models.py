"""`/v1/models` and the state of the server: `/health`, `/ready`, `/version`, `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.access.counts import ANYBODY
from hardpoint.builtin_plugins.server.errors import AnswerError, for_clients, no_route
from hardpoint.builtin_plugins.server.service import ServerPhase, Service
from hardpoint.plugins import HardpointError
from hardpoint.plugins.server import LoadReport, Route

_LONGEST_WAIT = 1.0
"""Seconds that `/health` waits for the engine; probes wait little longer."""


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class ImageLimits(msgspec.Struct):
    """Limits of the images of a conversation.

    Attributes:
        max_items: how many there may be.
        max_bytes: size of an encoded one.
        max_total_bytes: size of all encoded ones together.
        max_pixels: width times height of one.
        max_body_bytes: size of a request, which has images as base64.
    """

    max_items: int
    max_bytes: int
    max_total_bytes: int
    max_pixels: int
    max_body_bytes: int


class ModelCard(msgspec.Struct):
    """A model that requests may name.

    Attributes:
        root: the model as configured; of an adapter, the path of its files.
        parent: name of the model that an adapter is of; None for the model itself.
        default_sampling: sampling parameters of requests that give none.
        weight_version: version of the weights, see `AsyncLLM.weights.update`.
        input_modalities: "text", and "image" if conversations may have images.
        images: limits of images; None without them.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    default_sampling: dict[str, float]
    weight_version: str
    input_modalities: list[str]
    images: ImageLimits | None = None


class ModelList(msgspec.Struct):
    """The models of a server."""

    object: str
    data: list[ModelCard]


class EngineHealth(msgspec.Struct, omit_defaults=True):
    """The health of the engine and of plugins.

    Attributes:
        status: "ok", "degraded" or "unavailable".
        reason: why it is unavailable.
        busy: whether the engine did not answer at once; the rest is its last report.
        quarantined: reasons, by plugin.
        faults: how many, by plugin.
        fallbacks: what runs instead of a plugin, and why.
        slow: plugins that take long.
        restarts: number of restarts of the engine.
        paused: why no requests are taken.
    """

    status: str
    reason: str | None = None
    busy: bool = False
    quarantined: dict[str, str] = {}
    faults: dict[str, int] = {}
    fallbacks: dict[str, str] = {}
    slow: dict[str, str] = {}
    restarts: int = 0
    paused: str | None = None


class Readiness(msgspec.Struct, omit_defaults=True):
    """Whether requests should be sent here.

    Attributes:
        status: "ready", "leaving" or "unavailable".
        reason: why not, such as an engine that is being restarted.
    """

    status: str
    reason: str | None = None


class ServerLoad(msgspec.Struct, omit_defaults=True):
    """How much there is to do.

    Attributes:
        server_load: requests that are being answered.
        load: what the engines have to do; left out if the only one has ended, or does not answer.
    """

    server_load: int
    load: LoadReport | None = None


class Version(msgspec.Struct, omit_defaults=True):
    """The version of Hardpoint.

    Attributes:
        live_view: URL of the live view, where the admin address is one that browsers open; its
            host is "*" where that is any of the machine.
    """

    version: str
    live_view: str | None = None


class StatusRoutes:
    """The routes about the server itself."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_ok = True
        self._details: dict[str, Any] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            _uncounted(
                "/v1/models",
                self.models,
                "List the model under its names, and its adapters.",
                ModelList,
            ),
            _uncounted(
                "/v1/models/{model:path}", self.model, "Describe the model of a name.", ModelCard
            ),
            _uncounted("/health", self.health, "Return whether the engine runs.", EngineHealth),
            _uncounted("/ready", self.ready, "Return whether to send requests.", Readiness),
            _uncounted(
                "/ping",
                self.health,
                "Return the same as /health.",
                EngineHealth,
                methods=("GET", "POST"),
            ),
            _uncounted(
                "/load",
                self.load,
                "Return what there is to do, by engine, for balancers and autoscalers.",
                ServerLoad,
            ),
            _uncounted("/version", self.version, "Return the version.", Version),
            _uncounted("/metrics", self.metrics, "Return figures for Prometheus."),
        ]

    async def _models(self) -> list[ModelCard]:
        config = self._service.engine.config
        length = config.max_model_len if isinstance(config.max_model_len, int) else None
        defaults = self._service.engine.model.default_sampling_params()
        sampling = {name: getattr(defaults, name) for name in _SAMPLING}
        started = self._service.started
        names = self._service.names
        images = self._images()
        takes = ["text"] if images is None else ["text", "image"]
        adapters = await self._service.adapters.listed() if self._service.engine.is_running else []
        return [
            *(
                ModelCard(
                    name, "model", started, "hardpoint", config.model, None, length, sampling,
                    config.load.version, takes, images,
                )
                for name in names
            ),
            *(
                ModelCard(
                    loaded.request.name, "model", loaded.since, "hardpoint", loaded.request.path,
                    names[0], length, sampling, config.load.version, takes, images,
                )
                for loaded in adapters
            ),
        ]  # fmt: skip

    def _images(self) -> ImageLimits | None:
        engine = self._service.engine
        if not engine.model.takes_images:
            return None
        limits = engine.config.images
        return ImageLimits(
            limits.max_items,
            limits.max_bytes,
            limits.max_total_bytes,
            limits.max_pixels,
            self._service.requests.receiver.max_bytes,
        )

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        """List the model under its names, and its adapters."""
        return json_response(ModelList("list", await self._models()))

    async def model(self, request: Request) -> Response:
        """Describe the model of a name."""
        name = request.path_params["model"]
        if not name:
            raise no_route(request.url.path, ["/v1/models"])
        models = {model.id: model for model in await self._models()}
        served = models.get(name) or models.get(name.rstrip("/"))
        if served is None:
            raise await self._service.no_model_or_adapter(name)
        return json_response(served)

    async def health(self, request: Request) -> Response:
        """Return the health of the engine and of plugins.

        An engine in a long step answers late; until then, its last report counts.
        """
        with_details = not self._service.has_keys or request.state.client is not ANYBODY
        try:
            self._service.check_engine()
            is_busy = await self._ask_engine()
        except (AnswerError, HardpointError) as error:
            answer = self._service.failure(error)
            reason = answer.detail.message if with_details else None
            return json_response(EngineHealth("unavailable", reason=reason), 503, answer.headers)
        body = EngineHealth("ok" if self._is_ok else "degraded", busy=is_busy)
        if with_details:
            faults = dict(self._details.get("faults", {}))
            for plugin, count in self._service.faults.counts.items():
                faults[plugin] = faults.get(plugin, 0) + count
            for name, value in self._details.items():
                setattr(body, name, value)
            body.faults = faults
            slow = {n: for_clients(why) for n, why in self._service.faults.slow.items()}
            body.slow = {**body.slow, **slow}
            body.paused = self._service.paused
        return json_response(body)

    async def _ask_engine(self) -> bool:
        """Ask the engine for its health; return whether it is too busy to answer.

        Raises:
            HardpointError: it is dead.
        """
        try:
            async with asyncio.timeout(_LONGEST_WAIT):
                health = await self._service.engine.plugins.health()
        except TimeoutError:
            return True
        self._is_ok = health.ok
        self._details = {
            "quarantined": {n: for_clients(why) for n, why in health.quarantined.items()},
            "faults": health.faults,
            "fallbacks": {n: for_clients(f.message) for n, f in health.fallbacks.items()},
            "slow": {name: for_clients(fault.message) for name, fault in health.slow.items()},
            "restarts": health.restarts,
        }
        return False

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """Return whether requests should be sent here."""
        if self._service.phase is not ServerPhase.SERVING:
            return json_response(Readiness("leaving"), 503)
        try:
            self._service.check_admission()
        except AnswerError as error:
            body = Readiness("unavailable", error.detail.message)
            return json_response(body, 503, error.headers)
        return json_response(Readiness("ready"))

    async def load(self, request: Request) -> Response:  # noqa: ARG002
        """Return the numbers of requests in progress and the work of each engine."""
        report: LoadReport | None = None
        with contextlib.suppress(HardpointError, TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT):
                report = await self._service.engine.engines.load()
        return json_response(ServerLoad(self._service.load.open, report))

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """Return the version."""
        return json_response(Version(self._service.version, self._live_view()))

    def _live_view(self) -> str | None:
        admin, tls = self._service.settings.admin, self._service.settings.tls_certificate
        if admin is None or admin.startswith("unix:"):
            return None
        host, _, port = admin.rpartition(":")
        if host in ("0.0.0.0", "[::]", "::"):
            host = "*"
        return f"{'http' if tls is None else 'https'}://{host}:{port}/"

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Return figures for Prometheus."""
        text = await self._service.engine.metrics() + self._service.traffic.metrics()
        return Response(text, media_type="text/plain; version=0.0.4")


def _uncounted(
    path: str,
    endpoint: Callable[[Request], Awaitable[Response]],
    summary: str,
    response_type: type[msgspec.Struct] | None = None,
    *,
    methods: Sequence[str] = ("GET",),
) -> Route:
    return Route(
        path=path,
        endpoint=endpoint,
        methods=methods,
        summary=summary,
        response_type=response_type,
        is_counted=False,
    )


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
