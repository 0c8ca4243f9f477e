"""The options of requests besides prompt and parameters, within the bounds of their clients."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.access.counts import ANYBODY
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.plugins import LoRARequest, RequestError
from hardpoint.plugins.server import Call, Client
from hardpoint.toolkit.trace import TRACE

_TENANT = "tenant"
"""The tag by which the policy `fair` shares the engine; a request cannot name another key's."""

_RANK = "x-data-parallel-rank"
_TRACE = ("traceparent", "tracestate")
"""Headers of W3C's Trace Context, which name the trace that a request belongs to."""


class RequestOptionsBuilder:
    """Builds the options of requests for the engine."""

    def __init__(self, settings: ServerConfig, *, has_kv_connector: bool) -> None:
        self._settings, self._has_kv_connector = settings, has_kv_connector

    def build(self, call: Call, body: Any, adapter: LoRARequest | None = None) -> dict[str, Any]:
        """Return a request's options besides prompt and parameters, within the client's bounds.

        Args:
            body: with fields of the same names, or without.
            adapter: adapter of the request.

        Raises:
            AnswerError: it has kv_transfer_params or asks for a trace, and its key may not.
            RequestError: it has some, and there is no KV connector; or priority or timeout are out
                of bounds; or it scales an adapter and has none.
        """
        client = call.client
        priority = client.min_priority if client.min_priority > 0 else 0
        if (priority_field := getattr(body, "priority", None)) is not None:
            priority = priority_field
        if not client.min_priority <= priority <= client.max_priority:
            raise RequestError(
                f"priority: expected {client.min_priority} to {client.max_priority} for this key, "
                f"got {priority}"
            )
        transfer = getattr(body, "kv_transfer_params", None)
        if transfer is not None:
            self._check_kv_transfer(client)
        self._check_trace(client, body)
        tags = dict(getattr(body, "tags", None) or {})
        if client != ANYBODY:
            tags[_TENANT] = client.name
        tags |= client.tags
        last = getattr(body, "truncate_prompt_tokens", None)
        retained = {name: getattr(body, name, None) for name in ("session", "retain_seconds")}
        adapter = _scaled(adapter, getattr(body, "lora_scale", None))
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
            "timeout": self._timeout(client, getattr(body, "timeout", None)),
            "tags": tags or None,
            "cache_salt": _salt(client.cache_salt, getattr(body, "cache_salt", None)),
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
        if not self._has_kv_connector:
            raise RequestError(
                f"{path}: expected none, because this server has no KV connector (kv_connector.use)"
            )

    def _check_trace(self, client: Client, body: Any) -> None:
        if client.trace or self._settings.trace:
            return
        for fields in (body, getattr(body, "sampling_params", None)):
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

    def _timeout(self, client: Client, seconds: float | None) -> float | None:
        limits = (client.max_timeout, self._settings.limits.timeout_seconds)
        longest = min((limit for limit in limits if limit is not None), default=None)
        if seconds is not None and longest is not None and seconds > longest:
            raise RequestError(
                f"timeout: expected at most {longest:g} s on this server, got {seconds:g}"
            )
        return longest if seconds is None else seconds


def _scaled(adapter: LoRARequest | None, scale: float | None) -> LoRARequest | None:
    if scale is None:
        return adapter
    if adapter is None:
        raise RequestError(
            f"lora_scale: expected none, as the model of the request is no adapter, got {scale}"
        )
    return msgspec.structs.replace(adapter, scale=scale)


def _salt(of_client: str, request_salt: str | None) -> str | None:
    """Return the salt of a request, hashed together with the salt of its client."""
    if not of_client:
        return request_salt
    both = msgspec.msgpack.encode((of_client, request_salt))
    return hashlib.sha256(both).hexdigest()


def _named_rank(call: Call) -> int | None:
    if (text := call.headers.get(_RANK)) is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 4:
        raise RequestError(f"X-data-parallel-rank: expected the number of an engine, got {text!r}")
    return int(text)
