"""A model behind a server with OpenAI's API, as `hardpoint chat --url` uses it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from hardpoint.builtin_plugins.http_calls import environment_key, is_host
from hardpoint.plugins import (
    CompletionOutput,
    EngineConfig,
    HardpointError,
    RequestError,
    RequestOutput,
    SamplingParams,
)

__all__ = ["ServedModel"]

_TIMEOUT_S = 600.0  # until the next part of an answer
_UNKNOWN_LENGTH = 1 << 30
_KEYS = ("HARDPOINT_API_KEY", "OPENAI_API_KEY")
_PATH = re.compile(r"[\x21-\x7e]*")


class ServedModel:
    """A model of a running server, which renders and counts prompts itself.

    Attributes:
        name: name of the model at the server.
        config: a configuration with the model's name and its context length, if it is known.
    """

    def __init__(self, url: str, name: str | None, fields: Mapping[str, Any]) -> None:
        """Ask the server for its models.

        Args:
            url: `http://HOST:PORT`, with or without `/v1`.
            name: name of the model; None is the server's first one.
            fields: fields of each request besides model and messages.

        Raises:
            RequestError: the URL or the key is malformed, or there is no such model.
            HardpointError: the server cannot be reached, or refuses.
        """
        parts = _read_url(url)
        self._parts, self._url, self._fields = parts, url, fields
        self._key = environment_key(*_KEYS)
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        models = self._models()
        if name is None and models:
            name = next(iter(models))
        if name not in models:
            known = ", ".join(models) or "none"
            raise RequestError(f"model: expected a model of {url} ({known}), got {name!r}")
        self.name = name
        length = models[name].get("max_model_len") or _UNKNOWN_LENGTH
        self.config = EngineConfig(model=name, max_model_len=length)

    @property
    def model(self) -> ServedModel:
        """This object, which renders no prompt."""
        return self

    def default_sampling_params(self) -> SamplingParams:
        """Return the default parameters; the server fills in missing fields."""
        return SamplingParams()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the messages; the server renders and counts them."""
        return {"messages": list(messages), "prompt_token_ids": []}

    def stream(
        self,
        prompt: Mapping[str, Any],
        params: SamplingParams | None = None,  # noqa: ARG002 - the fields are what was given
    ) -> Iterator[RequestOutput]:
        """Yield the parts of an answer as they come.

        Raises:
            RequestError: the server refuses the request, or the answer ends with an error.
            HardpointError: the server cannot be reached.
        """
        body = {**self._fields, "model": self.name, "messages": prompt["messages"], "stream": True}
        with self._answer("POST", "/chat/completions", body) as response:
            for line in response:
                text = line.decode(errors="replace").strip()
                if not text.startswith("data:"):
                    continue
                data = text.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield from _outputs(_decoded(data, self._url))

    def close(self) -> None:
        """Do nothing: each request has its own connection."""

    def _models(self) -> dict[str, dict[str, Any]]:
        with self._answer("GET", "/models") as response:
            content = _decoded(response.read().decode(errors="replace"), self._url)
        data = content.get("data")
        entries = data if isinstance(data, list) else []
        return {entry["id"]: entry for entry in entries if isinstance(entry.get("id"), str)}

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        parts = self._parts
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, f"{self._base}{path}", data, headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _refusal(response, self._url)
            yield response
        except (OSError, http.client.HTTPException) as cause:
            raise HardpointError(f"--url: {self._url} cannot be reached: {cause}") from cause
        finally:
            connection.close()


def _read_url(url: str) -> SplitResult:
    """Return the parts of a URL that a request can have.

    Raises:
        RequestError: it is malformed.
    """
    problem = RequestError(f"--url: expected http://HOST:PORT or https://..., got {url!r}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise problem from None
    is_http = parts.scheme in ("http", "https") and is_host(parts.hostname or "")
    if not is_http or not _PATH.fullmatch(parts.path):
        raise problem
    return parts


def _decoded(text: str, url: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise HardpointError(f"--url: {url} sent no JSON object: {text[:100]!r}")
    return content


def _refusal(response: http.client.HTTPResponse, url: str) -> HardpointError:
    text = response.read(10_000).decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        message = text[:200] or response.reason
    if response.status in (401, 403):
        message += f" (a key is read from {' or '.join(_KEYS)})"
    return RequestError(f"{url}: {message} ({response.status})")


def _outputs(event: Mapping[str, Any]) -> Iterator[RequestOutput]:
    if (error := event.get("error")) is not None:
        raise RequestError(str(error.get("message", error) if isinstance(error, dict) else error))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        content = delta.get("content") or None
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or None
        part = CompletionOutput(
            index=0,
            text=content or "",
            token_ids=[],
            content=content,
            reasoning=reasoning,
            finish_reason=choice.get("finish_reason"),
        )
        is_last = part.finish_reason is not None
        yield RequestOutput(
            request_id="", prompt=None, prompt_token_ids=[], outputs=[part], finished=is_last
        )
