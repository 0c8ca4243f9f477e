"""The state that the routes share: the engine, the limits, and whether requests are admitted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import LoRARequest, RequestError
from hardpoint.plugins.server import AsyncGenerator as Engine
from hardpoint.plugins.server import Call, Client, Route
from hardpoint.toolkit.trace import TRACE
from hardpoint.typed import shown

from .access.counts import ANYBODY, Counts
from .bodies import check_lengths, convert_body, decode_object, without_ignored
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
from .operations.ignored_fields import IgnoredFields
from .operations.load import InFlightRequests
from .operations.traffic import TrafficRecorder, current_key, current_request_id
from .receiving import SMALL_BYTES, BodyReceiver
from .streaming import COMMENT, EventStream, while_connected

_log = logging.getLogger("hardpoint")

T = TypeVar("T")
R = TypeVar("R")
_TENANT = "tenant"
"""The tag by which the policy `fair` shares the engine; a request cannot name another key's."""

_CHARACTERS_PER_TOKEN = 32
_PAUSED, _DRAIN, _LEVEL = "paused", "drain", "level of "
_RANK = "x-data-parallel-rank"
_TRACE = ("traceparent", "tracestate")
"""Headers of W3C's Trace Context, which name the trace that a request belongs to."""


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
        receiver: receiver of the users' bodies.
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
        self.receiver = BodyReceiver(self.settings, image_bytes)
        self._converting = asyncio.Lock()
        self._converting_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.traffic = TrafficRecorder(
            self.settings.access_log, counts=self.counts, of_admin=of_admin
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

    async def read(self, request: Request, type_: type[T]) -> tuple[Call, T]:
        """Return who calls, and the checked body of a request that generates.

        Raises:
            AnswerError, RequestError: the request is wrong.
        """
        call = call_of(request)
        self.transforms.begin(request.scope, call)
        async with self.receiver.body(request) as body:
            if not self.transforms.changes_requests:
                return call, await self._large(body, self._plain, body, type_)
            fields = await self._large(body, self._decoded, body)
            fields = await self.transforms.request(call, fields)
            try:
                return call, await self._large(body, self._converted, fields, type_)
            except RequestError as wrong:
                try:
                    await self._large(body, self._plain, body, type_)
                except RequestError:
                    raise wrong from None
                raise self.transforms.blame_request() from wrong

    async def read_message(self, call: Call, message: bytes) -> dict[str, Any]:
        """Return the fields of a message of a WebSocket, as transforms leave them.

        Raises:
            AnswerError, RequestError: it is no JSON object, or a transform refuses it.
        """
        fields = await self._large(message, self._decoded, message)
        if self.transforms.changes_requests:
            fields = await self.transforms.request(call, fields)
        return fields

    async def checked(self, message: bytes, fields: dict[str, Any], type_: type[T]) -> T:
        """Return the fields of a message of a WebSocket as its type.

        Unknown fields are errors even if requests may have some, because a message has no answer
        with headers that could list them.

        Raises:
            RequestError: one is wrong.
        """
        return await self._large(message, self._converted, fields, type_, is_message=True)

    async def read_plain(self, request: Request, type_: type[T]) -> T:
        """Return the checked body of a request to a route of a plugin.

        Raises:
            AnswerError, RequestError: the request is wrong.
        """
        async with self.receiver.body(request) as body:
            return await self._large(body, self._plain, body, type_, is_shaped=False)

    async def _large(self, body: bytes, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Return a function's result; for a large body, call it where others' streams go on.

        One at a time: several at once would take turns with the event loop. A body waits for at
        most one of each other key.
        """
        if len(body) <= SMALL_BYTES:
            return function(*args, **kwargs)
        own = self._converting_of.setdefault(current_key(), asyncio.Lock())
        async with own, self._converting:
            return await asyncio.to_thread(function, *args, **kwargs)

    def _decoded(self, body: bytes) -> dict[str, Any]:
        return decode_object(body, self.settings.limits)

    def _plain(self, body: bytes, type_: type[T], *, is_shaped: bool = True) -> T:
        return self._converted(self._decoded(body), type_, is_shaped=is_shaped)

    def _converted(
        self,
        fields: dict[str, Any],
        type_: type[T],
        *,
        is_shaped: bool = True,
        is_message: bool = False,
    ) -> T:
        """Return a decoded body, checked.

        Args:
            is_shaped: whether its lists have the names and limits of the generating routes.
            is_message: whether it is a message of a WebSocket, whose unknown fields are errors.
        """
        lenient = self.settings.unknown_fields == "warn" and not is_message
        ignored = IgnoredFields()
        hosted = getattr(type_, "without_hosted_tools", None)
        if hosted is not None and self.settings.hosted_tools == "ignore":
            fields, paths = hosted(fields)
            for path in paths:
                ignored.add(path)
        unenforced = getattr(type_, "unenforced", None)
        for path in () if unenforced is None else unenforced(fields):
            ignored.add(path)
        fields = without_ignored(fields, type_)
        if is_shaped:
            check_lengths(fields, self.settings.limits)
        if (prepared := getattr(type_, "prepared", None)) is not None:
            fields = prepared(fields)
        body = convert_body(fields, type_, lenient=lenient, ignored=ignored)
        if lenient and (without_thinking := getattr(body, "without_thinking", None)) is not None:
            body, names = without_thinking(lambda: self.engine.tokenizer.chat_template)
            for name in names:
                ignored.add(name)
        if ignored.paths:
            self.traffic.ignored(ignored)
        return body

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
        raise self.no_model(name)

    def base_model(self, name: str | None) -> str:
        """Return the name of the model for an answer that no adapter takes part in.

        Raises:
            AnswerError: there is no such model.
        """
        if name is None or name in self.names:
            return name or self.names[0]
        raise self.no_model(name)

    def no_model(self, name: str) -> AnswerError:
        """Return the answer to a name that is none of the model's, nor of an adapter."""
        return AnswerError(
            404,
            f"model: expected {' or '.join(map(repr, self.names))}, got {shown(name, 200)}",
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

    def extras(self, call: Call, asked: Any, adapter: LoRARequest | None = None) -> dict[str, Any]:
        """Return a request's options besides prompt and parameters, within the client's bounds.

        Args:
            asked: with fields of the same names, or without.
            adapter: adapter of the request.

        Raises:
            AnswerError: it has kv_transfer_params or asks for a trace, and its key may not.
            RequestError: it has some, and there is no KV connector; or priority or timeout are out
                of bounds; or it scales an adapter and has none.
        """
        client = call.client
        priority = client.min_priority if client.min_priority > 0 else 0
        if (given := getattr(asked, "priority", None)) is not None:
            priority = given
        if not client.min_priority <= priority <= client.max_priority:
            raise RequestError(
                f"priority: expected {client.min_priority} to {client.max_priority} for this key, "
                f"got {priority}"
            )
        transfer = getattr(asked, "kv_transfer_params", None)
        if transfer is not None:
            self._check_kv_transfer(client)
        self._check_trace(client, asked)
        tags = dict(getattr(asked, "tags", None) or {})
        if client != ANYBODY:
            tags[_TENANT] = client.name
        tags |= client.tags
        last = getattr(asked, "truncate_prompt_tokens", None)
        retained = {name: getattr(asked, name, None) for name in ("session", "retain_seconds")}
        adapter = _scaled(adapter, getattr(asked, "lora_scale", None))
        trace = {name: call.headers[name] for name in _TRACE if name in call.headers}
        rank = _named_rank(call)
        return {
            **({} if transfer is None else {"kv_transfer_params": transfer}),
            **({} if rank is None else {"data_parallel_rank": rank}),
            **({"trace_headers": trace} if trace else {}),
            **({} if adapter is None else {"lora_request": adapter}),
            **({} if last is None else {"truncate_prompt_tokens": last}),
            **{name: value for name, value in retained.items() if value is not None},
            "priority": priority,
            "timeout": self._timeout(client, getattr(asked, "timeout", None)),
            "tags": tags or None,
            "cache_salt": _salt(client.cache_salt, getattr(asked, "cache_salt", None)),
        }

    def _check_kv_transfer(self, client: Client) -> None:
        """Check that a client may give parameters to the KV connector, and that there is one.

        Raises:
            AnswerError: its key may give none.
        """
        path = "kv_transfer_params"
        if not client.kv_transfer:
            message = f"{path}: needs a key with kv_transfer = true in server.keys_file"
            raise AnswerError(403, message, param=path)
        if self.engine.config.kv_connector.use is None:
            raise RequestError(
                f"{path}: expected none, because this server has no KV connector (kv_connector.use)"
            )

    def _check_trace(self, client: Client, asked: Any) -> None:
        if client.trace or self.settings.trace:
            return
        for fields in (asked, getattr(asked, "sampling_params", None)):
            included = getattr(fields, "include", None) or ()  # or UNSET
            is_included = isinstance(included, list) and TRACE in included
            if is_included or getattr(fields, "trace", False):
                name = "include" if is_included else "trace"
                raise AnswerError(
                    403,
                    f"{name}: traces need server.trace = true, or a key with trace = true in "
                    f"server.keys_file",
                    param=name,
                )

    def _timeout(self, client: Client, asked: float | None) -> float | None:
        limits = (client.max_timeout, self.settings.limits.timeout_seconds)
        longest = min((limit for limit in limits if limit is not None), default=None)
        if asked is not None and longest is not None and asked > longest:
            raise RequestError(
                f"timeout: expected at most {longest:g} s on this server, got {asked:g}"
            )
        return longest if asked is None else asked

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
        """Return a streamed answer of events, each of which may hold several.

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
        """Return the answer to a request that failed, and log what is not the client's fault."""
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
        "the engine is being restarted; send the request again", 2, code="engine_restarting"
    )


def call_of(request: HTTPConnection) -> Call:
    """Return who makes a request."""
    headers = {
        name: value
        for name, value in request.headers.items()
        if name not in ("authorization", "x-api-key", "cookie")
    }
    return Call(
        request_id=request.state.request_id,
        path=request.scope.get("path", ""),
        client=request.state.client,
        headers=headers,
    )


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.keys())) + sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _scaled(adapter: LoRARequest | None, scale: float | None) -> LoRARequest | None:
    if scale is None:
        return adapter
    if adapter is None:
        raise RequestError(
            f"lora_scale: expected none, as the model of the request is no adapter, got {scale}"
        )
    return msgspec.structs.replace(adapter, scale=scale)


def _salt(of_client: str, asked: str | None) -> str | None:
    """Return the salt of a request: its own one hashed together with that of its client."""
    if not of_client:
        return asked
    both = msgspec.msgpack.encode((of_client, asked))
    return hashlib.sha256(both).hexdigest()


def _named_rank(call: Call) -> int | None:
    if (text := call.headers.get(_RANK)) is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 4:
        raise RequestError(f"X-data-parallel-rank: expected the number of an engine, got {text!r}")
    return int(text)
