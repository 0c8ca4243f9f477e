"""The traffic of a server: the access log, and figures for Prometheus."""

from __future__ import annotations

import contextlib
import contextvars
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Message, Scope, Send

from hardpoint.builtin_plugins.server.access.counts import Counts, held, key_of

from .ignored_fields import IGNORED, IgnoredFieldLog, IgnoredFields

Headers = Sequence[tuple[bytes, bytes]]

_OPEN = held("requests open")
_CONNECTIONS = held("connections"), held("connections of administrators")
_ANSWERED, _REJECTED = "answered ", "rejected "
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_CLIENT_GONE = 499
_SWITCHING = 101
_LONGEST_TEXT = 512
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SPECIAL = {ord('"'): '\\"', ord("\\"): "\\\\"}
_CURRENT: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "hardpoint_exchange", default=None
)


class TokenCounter(Protocol):
    """Counts of the tokens of a request while it generates."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of its completions so far."""

    @property
    def finish_reasons(self) -> list[str]:
        """Of the completions that ended."""


def current_request_id() -> str:
    """Return the id of the request that is being answered, for the log; "-" outside of any."""
    exchange = _CURRENT.get()
    return "-" if exchange is None else exchange.state["request_id"]


def current_key() -> str:
    """Return the name of the current request's key; empty without a key."""
    exchange = _CURRENT.get()
    return "" if exchange is None else key_of(exchange.state)


def request_id_of(scope: Scope) -> str:
    """Return the id that a request has, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(request_id):
                return request_id
    return f"req-{secrets.token_hex(12)}"


def count_tokens_of(counts: TokenCounter) -> None:
    """Record the counts of the current request for the access log."""
    if (exchange := _CURRENT.get()) is not None:
        exchange.counts = counts


class AccessEntry(msgspec.Struct, omit_defaults=True):
    """A line of the access log; without headers, bodies and keys.

    Attributes:
        time: time of the request, in UTC.
        client: name of the key's owner.
        address: address of the client.
        admin: whether it came to the admin address.
        path: without the query.
        status: 499 if the client went before the answer.
        bytes: size of the answer's body.
        seconds: until the end of the answer.
        first_byte_seconds: until the first byte of its body.
        prompt_tokens, completion_tokens: numbers of tokens, for routes that generate.
        finish_reasons: finish reasons of their completions, each once.
        reason: why the request was refused.
    """

    time: str
    address: str
    method: str
    path: str
    status: int
    bytes: int
    seconds: float
    first_byte_seconds: float | None = None
    request_id: str | None = None
    client: str | None = None
    admin: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] | None = None
    reason: str | None = None


class Exchange:
    """One request and its answer."""

    __slots__ = ("_headers", "_send", "bytes", "counts", "first_byte", "started", "state", "status")

    def __init__(self, scope: Scope, send: Send, headers: Headers) -> None:
        """Begin; add the headers to the headers of the answer."""
        self._send = send
        self._headers = headers
        self.state: dict[str, Any] = scope["state"]
        self.started = time.perf_counter()
        self.first_byte = 0.0
        self.bytes = 0
        self.status = 0
        self.counts: TokenCounter | None = None

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the answer, unless the answer has started."""
        self._headers = [*self._headers, (name, value)]

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        kind = message["type"].removeprefix("websocket.")
        if kind in ("http.response.start", "accept"):
            self.status = message.get("status", _SWITCHING)
            self.state["is_answered"] = True
            message["headers"] = [*message.get("headers", ()), *self._headers]
        else:
            if not self.first_byte:
                self.first_byte = time.perf_counter()
            self.bytes += len(message.get("body", b"")) + len(message.get("text") or "")
            if kind == "http.response.body" and not message.get("more_body"):
                self.state["is_complete"] = True
        await self._send(message)


class TrafficRecorder:
    """Counts and logs the requests of a server.

    Attributes:
        counts: counts of all that is below; those of several workers are sums.
        closes: whether clients are asked to close their connections.
        write: takes lines of the access log.
    """

    def __init__(
        self,
        access_log: Literal["text", "json", "off"] = "off",
        write: Callable[[str], object] | None = None,
        counts: Counts | None = None,
        *,
        of_admin: bool = False,
    ) -> None:
        """Start without requests.

        Args:
            access_log: form of the log.
            write: takes its lines; None writes them to standard error.
            counts: None are those of this process alone.
            of_admin: whether other processes serve the users.
        """
        self.counts = counts or Counts()
        self._connections = _CONNECTIONS[of_admin]
        self._running: set[Exchange] = set()
        self.closes = False
        self._format = {"text": as_text, "json": as_json}.get(access_log)
        self.write = write or _write_error
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Figures(self))
        self._ignored_fields = IgnoredFieldLog(self.counts)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return sum(map(self.counts.total, _CONNECTIONS))

    @property
    def connections_elsewhere(self) -> int:
        """The connections that other processes have at the same address."""
        return self.counts.elsewhere(self._connections)

    @property
    def open(self) -> int:
        """The number of requests that are being answered."""
        return self.counts.total(_OPEN)

    @property
    def num_own(self) -> int:
        """The number of this process's requests, without probes and WebSockets."""
        return len(self._running)

    @property
    def requests(self) -> Counter[tuple[str, int]]:
        """The requests that were answered so far, by route and status."""
        counters = ((name.rpartition(" "), number) for name, number in self.counts.items(_ANSWERED))
        return Counter({(route, int(status)): number for (route, _, status), number in counters})

    @property
    def rejected(self) -> Counter[str]:
        """The requests and connections that were refused so far, by reason."""
        return Counter(dict(self.counts.items(_REJECTED)))

    @property
    def ignored_fields(self) -> Counter[str]:
        """The requests with ignored fields so far, by field."""
        return Counter(dict(self.counts.items(IGNORED)))

    def ignored(self, fields: IgnoredFields) -> None:
        """Log and count the ignored fields of a request, and list them in its answer."""
        self._ignored_fields.record(fields)
        if (exchange := _CURRENT.get()) is not None:
            exchange.add_header(*fields.header())

    def connected(self, change: int) -> None:
        """Count a connection that is open now, or with -1 no more."""
        self.counts.add(self._connections, change)

    def begin(self, scope: Scope, send: Send, headers: Headers = ()) -> Exchange:
        """Return a request that is being answered; its `send` sends the answer.

        Args:
            headers: further ones of the answer.
        """
        self.counts.add(_OPEN)
        if self.closes:
            headers = [*headers, (b"connection", b"close")]
        exchange = Exchange(scope, send, headers)
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            self._running.add(exchange)
        _CURRENT.set(exchange)
        return exchange

    def end(self, exchange: Exchange, scope: Scope, *, admin: bool) -> None:
        """Count and log a request after its answer."""
        self.counts.add(_OPEN, -1)
        self._running.discard(exchange)
        status = exchange.status or _CLIENT_GONE
        state = exchange.state
        self.counts.add(f"{_ANSWERED}{state.get('route', 'none')} {status}")
        reason = state.get("refused")
        if reason is not None:
            self.counts.add(_REJECTED + reason)
        if self._format is None or (scope["path"] in _PROBES and status < 400):
            return
        client, counts = state.get("client"), exchange.counts
        entry = AccessEntry(
            time=_now(),
            address=_address(scope.get("client")),
            method=scope["method"],
            path=scope["path"][:_LONGEST_TEXT],
            status=status,
            bytes=exchange.bytes,
            seconds=round(time.perf_counter() - exchange.started, 6),
            request_id=state["request_id"],
            client=None if client is None else client.name,
            admin=admin,
            reason=reason,
        )
        if exchange.first_byte:
            entry.first_byte_seconds = round(exchange.first_byte - exchange.started, 6)
        if counts is not None:
            entry.prompt_tokens = counts.prompt_tokens
            entry.completion_tokens = counts.completion_tokens
            entry.finish_reasons = sorted(set(counts.finish_reasons)) or None
        self.write(self._format(entry))

    def refused(
        self,
        address: tuple[str, int] | None,
        status: int | None,
        reason: str,
        request_id: str | None = None,
    ) -> None:
        """Count and log a connection that ends before it has a request.

        Args:
            status: status of the answer; None if it got no answer.
            request_id: id of the refused request, if one has come.
        """
        self.counts.add(_REJECTED + reason)
        if self._format is not None:
            entry = AccessEntry(
                time=_now(),
                address=_address(address),
                method="-",
                path="-",
                status=status or _CLIENT_GONE,
                bytes=0,
                seconds=0.0,
                request_id=request_id,
                reason=reason,
            )
            self.write(self._format(entry))

    def metrics(self) -> str:
        """Return the figures in Prometheus's text format."""
        return generate_latest(self._registry).decode()


class _Figures(Collector):
    """The figures as metrics."""

    def __init__(self, traffic: TrafficRecorder) -> None:
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        traffic = self._traffic
        requests = CounterMetricFamily(
            "hardpoint:http_requests",
            "Requests that were answered, by route and status.",
            labels=("route", "status"),
        )
        for (route, status), count in traffic.requests.items():
            requests.add_metric((route, str(status)), count)
        rejected = CounterMetricFamily(
            "hardpoint:http_rejected",
            "Requests and connections that were refused, by reason.",
            labels=("reason",),
        )
        for reason, count in traffic.rejected.items():
            rejected.add_metric((reason,), count)
        ignored = CounterMetricFamily(
            "hardpoint:http_ignored_fields",
            "Requests with an unknown field that was ignored, by field.",
            labels=("field",),
        )
        for name, count in traffic.ignored_fields.items():
            ignored.add_metric((name,), count)
        yield requests
        yield rejected
        yield ignored
        yield GaugeMetricFamily(
            "hardpoint:http_requests_open", "Requests that are being answered.", traffic.open
        )
        yield GaugeMetricFamily(
            "hardpoint:http_connections_open", "Connections that are open.", traffic.connections
        )


def as_json(entry: AccessEntry) -> str:
    """Return an entry as a line of JSON."""
    return msgspec.json.encode(entry).decode()


def as_text(entry: AccessEntry) -> str:
    """Return an entry as a line of text."""
    where = "admin " if entry.admin else ""
    parts = [
        f"{entry.time} {entry.address} {_escaped(entry.client or '-')} "
        f'{where}"{entry.method} {_escaped(entry.path)}" {entry.status} {entry.bytes} B '
        f"{entry.seconds:.3f} s"
    ]
    if entry.first_byte_seconds is not None:
        parts.append(f"first byte {entry.first_byte_seconds:.3f} s")
    if entry.request_id is not None:
        parts.append(_escaped(entry.request_id))
    if entry.prompt_tokens is not None:
        parts.append(f"{entry.prompt_tokens} + {entry.completion_tokens} tokens")
    if entry.finish_reasons:
        parts.append(",".join(entry.finish_reasons))
    if entry.reason is not None:
        parts.append(entry.reason)
    return " ".join(parts)


def _escaped(text: str) -> str:
    """Return a text without characters that a terminal or a parser of lines would obey."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return text
    quoted = text.translate(_SPECIAL)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in quoted)


def _address(client: Any) -> str:
    if not client:
        return "unix"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _now() -> str:
    now = time.time()
    whole = int(now)
    if whole != _second[0]:
        _second[:] = whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    return f"{_second[1]}.{int((now - whole) * 1000):03d}Z"


_second: list[Any] = [0, ""]
"""The latest second as number and as text."""


def _write_error(line: str) -> None:
    """Write a line to standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
