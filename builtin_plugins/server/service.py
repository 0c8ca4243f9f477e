"""The state that the routes share: the engine, the limits, and whether requests are admitted."""

from __future__ import annotations

import contextlib
import difflib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import LoRARequest, RequestError
from hardpoint.plugins.server import AsyncGenerator as Engine
from hardpoint.plugins.server import Call, Route
from hardpoint.typed import shown

from .access.counts import ANYBODY, Counts
from .config import ServerConfig
from .errors import (
    AnswerError,
    answer_error,
    for_log,
    quotes_a_library,
    trace_for_log,
    unavailable,
)
from .extensions import Transforms
from .faults import Owned, ServerFaults
from .operations.adapters import ServedAdapters
from .operations.load import InFlightRequests
from .operations.traffic import TrafficRecorder, current_key, current_request_id
from .receiving import BodyReceiver
from .requests.options import RequestOptionsBuilder
from .requests.reading import RequestReader
from .streaming import COMMENT, EventStream, while_connected

_log = logging.getLogger("hardpoint")

ENGINE_RESTARTING = "engine_restarting"
"""Code of the answers while no engine serves and none is known to be dead for good."""

T = TypeVar("T")
_CHARACTERS_PER_TOKEN = 32
_PAUSED, _DRAIN, _LEVEL = "paused", "drain", "level of "


_LISTED_ADAPTERS, _COMPARED_ADAPTERS, _COMPARED_CHARACTERS = 8, 1000, 100


def _nearest_first(name: str, known: Sequence[str]) -> str:
    """Return the known names that are most similar to a name, for a message."""
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(name[:_COMPARED_CHARACTERS])

    def similarity(other: str) -> float:
        matcher.set_seq1(other[:_COMPARED_CHARACTERS])
        return matcher.ratio()

    nearest = sorted(known[:_COMPARED_ADAPTERS], key=similarity, reverse=True)[:_LISTED_ADAPTERS]
    more = len(known) - len(nearest)
    listed = ", ".join(shown(other, 100) for other in nearest)
    return f"{listed} and {more} more" if more else listed


class ServerPhase(Enum):
    """The phases of a server, by how it treats requests.

    Attributes:
        SERVING: it answers them.
        LEAVING: it answers them, and `/ready` answers 503, so that balancers send no more.
        REFUSING: it answers those that it has, and refuses further ones.
    """

    SERVING = "serving"
    LEAVING = "leaving"
    REFUSING = "refusing"


class Service:
    """The state that the routes of a server share.

    Attributes:
        engine: the engine that is served.
        settings: the table `server` of the configuration.
        names: names of the model; the first one is in answers to requests that name another one.
        version: version of Hardpoint.
        phase: phase of the server's end.
        load: load of the routes that generate.
        faults: fault counts of extensions.
        transforms: transforms of plugins.
        response_store: the store of responses; None without one.
        background: work of plugins that goes on while requests are answered.
        routes: routes of the users' address, those of plugins too.
        has_keys: whether routes need a client.
        counts: counts of requests and the like, of all workers of the server.
        traffic: traffic of all routes.
        requests: reader of the users' requests.
        adapters: adapters that requests may name as their model.
    """

    def __init__(
        self,
        engine: Engine,
        version: str,
        faults: ServerFaults,
        counts: Counts | None = None,
        *,
        of_admin: bool = False,
    ) -> None:
        """Serve an engine, without transforms yet.

        Args:
            counts: None are those of this process alone.
            of_admin: whether other processes serve the users.
        """
        self.counts = counts or Counts()
        self._levels_of: object = None
        self._has_supervisor = self.counts.num_processes > 1 and not of_admin  # which drains it
        self.engine = engine
        self.faults = faults
        self.has_keys = False
        self.settings = engine.config.table(ServerConfig)
        self.names = self.settings.served_names or [engine.config.model]
        folders = self.settings.adapter_folders
        self.adapters = ServedAdapters(engine, self.names, folders, self.counts)
        self.version = version
        self.transforms = Transforms()
        self.response_store: Owned | None = None
        self.background: Sequence[Owned] = ()
        self.routes: Sequence[Route] = ()
        self.started = int(time.time())
        self.phase = ServerPhase.SERVING
        image_bytes = engine.config.images.max_total_bytes if engine.model.takes_images else 0
        self.traffic = TrafficRecorder(
            self.settings.access_log, counts=self.counts, of_admin=of_admin
        )
        self.requests = RequestReader(
            self.settings,
            BodyReceiver(self.settings, image_bytes),
            self.traffic,
            lambda: self.transforms,
            lambda: self.engine.tokenizer.chat_template,
        )
        self._options = RequestOptionsBuilder(
            self.settings, has_kv_connector=engine.config.kv_connector.use is not None
        )
        running = engine.config.scheduler.max_num_seqs
        limits = self.settings.limits
        self.load = InFlightRequests(
            limits.requests,
            running,
            counts=self.counts,
            limit_of_key=limits.requests_per_key,
            current_key=current_key,
        )

    @property
    def paused(self) -> str | None:
        """Why requests are refused although the engine runs; None if they are not."""
        return self.counts.notes.get(_PAUSED)

    @paused.setter
    def paused(self, reason: str | None) -> None:
        if reason != self.paused:
            self.counts.note(_PAUSED, reason)

    @property
    def drain_asked(self) -> bool:
        """Whether an administrator has asked for the server's end."""
        return not self._has_supervisor and _DRAIN in self.counts.notes

    def note_level(self, logger: str, level: str) -> None:
        """Let all processes of the server have a level of a logger, see `follow_levels`."""
        self.counts.note(_LEVEL + logger, level)

    def follow_levels(self) -> None:
        """Set the levels of loggers that another process of the server has noted."""
        notes = self.counts.notes
        if notes is self._levels_of:
            return
        self._levels_of = notes
        for name, text in notes.items():
            if name.startswith(_LEVEL):
                logging.getLogger(name.removeprefix(_LEVEL)).setLevel(text)

    def ask_to_drain(self) -> None:
        """End the server as SIGTERM does."""
        self.counts.note(_DRAIN, "asked")

    async def model(self, name: str | None) -> tuple[str, LoRARequest | None]:
        """Return the name of the model for the answer, and the adapter if it is the name of one.

        Raises:
            AnswerError: there is no such model.
            HardpointError: an adapter of that name cannot be found or loaded.
        """
        if name is None or name in self.names:
            return self.base_model(name), None
        self.check_admission()
        if (adapter := await self.adapters.find(name)) is not None:
            return name, adapter
        raise await self.no_model_or_adapter(name)

    def base_model(self, name: str | None) -> str:
        """Return the name of the model for an answer that no adapter takes part in.

        Raises:
            AnswerError: there is no such model.
        """
        if name is None or name in self.names:
            return name or self.names[0]
        raise self.no_model(name)

    async def no_model_or_adapter(self, name: str) -> AnswerError:
        """Return the answer to a name that is none of the model's, nor of an adapter."""
        loaded = await self.adapters.listed()
        return self.no_model(name, [adapter.request.name for adapter in loaded])

    def no_model(self, name: str, adapters: Sequence[str] = ()) -> AnswerError:
        """Return the answer to a name that is none of the model's.

        Args:
            name: the name.
            adapters: names that are possible, too; the message has the nearest ones.
        """
        names = " or ".join(map(repr, self.names))
        if adapters:
            names += f" or an adapter ({_nearest_first(name, adapters)})"
        return AnswerError(
            404,
            f"model: expected {names}, got {shown(name, 200)}",
            param="model",
            code="model_not_found",
        )

    def check_admission(self) -> None:
        """Refuse a request that the engine cannot run now.

        Raises:
            AnswerError: it is dead, restarting or paused, or the server is ending.
        """
        if self.engine.dead_error is not None:
            self.check_engine()  # first: the server ends for that reason
        self._check_phase()
        if self.paused is not None:
            raise unavailable(self.paused, code="paused")
        self.check_engine()

    def _check_phase(self) -> None:
        if self.phase is ServerPhase.REFUSING:
            raise unavailable(
                "the server is shutting down; send the request to another one", code="draining"
            )

    def check_engine(self) -> None:
        """Raise an error if the engine does not run.

        Raises:
            AnswerError: it is dead, or restarting.
        """
        if self.engine.is_running:
            return
        if self.engine.dead_error is not None:
            raise unavailable(
                "the engine has ended; send the request again later", code="engine_ended"
            )
        raise _restarting()

    def owner_of(self, call: Call) -> str:
        """Return the owner of the images of a call: its key; empty without one."""
        has_owner = self.engine.model.takes_images and call.client != ANYBODY
        return call.client.name if has_owner else ""

    def check_prompt(self, *parts: Any, name: str = "prompt") -> None:
        """Check the sizes of a prompt and its tools, before anything is made of them.

        Args:
            parts: texts, messages and tools.
            name: name of the field that has them.

        Raises:
            RequestError: they have more characters than the server allows.
        """
        config = self.engine.config
        limit = self.settings.limits.prompt_characters
        if limit is None:
            length = config.max_model_len if isinstance(config.max_model_len, int) else 1 << 17
            limit = _CHARACTERS_PER_TOKEN * length
        if (size := sum(map(_characters, parts))) > limit:
            raise RequestError(
                f"{name}: expected at most {limit} characters on this server, got {size}"
            )

    def extras(self, call: Call, body: Any, adapter: LoRARequest | None = None) -> dict[str, Any]:
        """Return a request's options; see `RequestOptionsBuilder.build`."""
        return self._options.build(call, body, adapter)

    async def answer(
        self, request: Request, call: Call, work: Callable[[], Awaitable[Any]]
    ) -> Response:
        """Return the result of work as JSON; end the work if the client goes.

        Raises:
            ClientGoneError: the client is gone.
            Exception: raised by the work.
        """

        body = msgspec.json.encode(await while_connected(request, self.counted(work)))
        if self.transforms.changes_responses:
            body = await self.transforms.response(call, msgspec.json.decode(body))
        return Response(body, media_type="application/json")

    async def counted(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of work that generates, which counts as a request being answered.

        Raises:
            AnswerError: there are too many requests, or the engine cannot run it now.
            Exception: raised by the work.
        """
        with self.load.one_more():
            self.check_admission()
            return await work()

    async def run(self, request: Request, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of work that is no generating, such as counting tokens.

        It counts as a request that is being answered, and ends if the client goes.

        Raises:
            AnswerError: there are too many requests, or the server is ending.
            ClientGoneError: the client is gone.
            Exception: raised by the work.
        """

        async def counted() -> T:
            with self.load.one_more(generates=False):
                self._check_phase()
                return await work()

        return await while_connected(request, counted())

    def stream(
        self,
        call: Call,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[AnswerError], bytes],
        heartbeat: bytes = COMMENT,
    ) -> EventStream:
        """Return a streamed answer of blocks, each with one or several events.

        Args:
            failed: returns the last events of a stream that an error ends.
            heartbeat: the sign that the stream lives.
        """

        async def admitted() -> AsyncGenerator[bytes, None]:
            with self.load.one_more():
                self.check_admission()
                async with contextlib.aclosing(events):
                    async for event in events:
                        yield event

        counted = admitted()
        if self.transforms.changes_events:
            counted = self.transforms.events(call, counted)
        return EventStream(
            counted,
            heartbeat_seconds=self.settings.heartbeat_seconds,
            failed=lambda error: failed(self._failed(call, error)),
            heartbeat=heartbeat,
        )

    def _failed(self, call: Call, error: BaseException) -> AnswerError:
        self.transforms.fail(call)
        return self.failure(error)

    def failure(self, error: BaseException) -> AnswerError:
        """Return the answer to a failed request, and log server errors."""
        if isinstance(error, EngineDeadError) and self.engine.dead_error is None:
            answer = _restarting()
        else:
            answer = answer_error(error, self.load.retry_after())
        if isinstance(error, AnswerError):
            return answer
        message = str(error)  # may hold texts of the client
        if answer.status == 500:
            name = current_request_id()
            _log.error("request %s failed: %s\n%s", name, for_log(message), trace_for_log(error))
            return answer
        if isinstance(error, RequestError):
            is_reported = not quotes_a_library(message)
        else:
            is_reported = isinstance(error, HTTPException) or answer.detail.message == message
        if not is_reported:
            name = current_request_id()
            _log.warning(
                "request %s was answered with %d: %s", name, answer.status, for_log(message)
            )
        return answer


def _restarting() -> AnswerError:
    return unavailable(
        "the engine is being restarted; send the request again", 2, code=ENGINE_RESTARTING
    )


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.keys())) + sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
