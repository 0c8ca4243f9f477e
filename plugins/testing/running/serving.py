"""A server for tests: `hardpoint serve` in a process of its own, on the scripted model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.testing.scripted import scripted_config, write_scripted_model

_START_SECONDS = 120.0
_END_SECONDS = 20.0
_ANSWER_SECONDS = 60.0
_URL = re.compile(r" at (http://\S+)$")


@dataclass(frozen=True)
class ServerAnswer:
    """An answer of a server.

    Attributes:
        status: HTTP status.
        headers: by lower-case name.
        body: as it came; of a stream, all of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the decoded events of a stream, without the end marker."""
        lines = [line for line in self.body.decode().splitlines() if line.startswith("data: ")]
        texts = [line.removeprefix("data: ") for line in lines]
        return [json.loads(text) for text in texts if text != "[DONE]"]


class TestServer:
    """A server that runs.

    Attributes:
        url: URL of the server, without a slash at the end, for clients of your own.
    """

    __test__ = False  # pytest would take it for tests

    def __init__(self, url: str, log: list[str]) -> None:
        self.url = url
        self._log = log

    @property
    def log(self) -> str:
        """The output of the server so far."""
        return "".join(self._log)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ServerAnswer:
        """Return the answer to a request, of any status.

        Args:
            path: such as "/acme/usage".
            body: sent as JSON; None sends none.
            method: POST with a body and GET without one, by default.
            headers: further ones.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        if data is not None:
            request.add_header("content-type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        # Without a proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            answer = opener.open(request, timeout=_ANSWER_SECONDS)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            lower = {name.lower(): value for name, value in answer.headers.items()}
            return ServerAnswer(answer.status, lower, answer.read())


@contextlib.contextmanager
def serve(
    config: Mapping[str, Any] | None = None,
    *,
    replies: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[TestServer]:
    """Run `hardpoint serve` on the scripted model while the body runs.

    It imports the same modules as this process.

    Args:
        config: further configuration, such as `{"plugins": {"enable": ["acme_server"]}}`. Without
            a table `stats` there are no stat sinks.
        replies: prompt text to the text that follows it, as `write_scripted_model` takes them.
        environment: further variables of the server's environment.

    Raises:
        RuntimeError: the server did not start; the message is its output.
    """
    with tempfile.TemporaryDirectory(prefix="hardpoint-serve-") as folder:
        model = write_scripted_model(Path(folder) / "model", replies)
        settings = scripted_config(model, {"stats": {"sinks": []}, **(config or {})})
        settings["server"] = {"port": 0, **settings.get("server", {})}
        file = Path(folder) / "hardpoint.toml"
        file.write_text(_toml(settings), encoding="utf-8")
        command = [sys.executable, "-m", "hardpoint", "serve", "--config", str(file)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": _import_path(), **(environment or {})},
        )
        log: list[str] = []
        try:
            yield TestServer(_wait(process, log), log)
        finally:
            _end(process)


def _import_path() -> str:
    return os.pathsep.join([*sys.path, str(Path(__file__).parents[3])])


def _wait(process: subprocess.Popen[str], log: list[str]) -> str:
    """Return the URL that a server prints when it is ready; continue to collect its output."""
    urls: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            if match := _URL.search(line.rstrip()):
                urls.append(match[1])
                is_ready.set()
        is_ready.set()

    threading.Thread(target=read, daemon=True).start()
    is_ready.wait(_START_SECONDS)
    if not urls:
        raise RuntimeError(f"the server did not start; it wrote:\n{''.join(log)}")
    _connect(urls[0], process, log)
    return urls[0]


def _connect(url: str, process: subprocess.Popen[str], log: list[str]) -> None:
    address = urllib.parse.urlsplit(url)
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError):
            socket.create_connection((address.hostname, address.port), timeout=5).close()
            return
        time.sleep(0.02)
    raise RuntimeError(f"the server did not start; it wrote:\n{''.join(log)}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _toml(tables: Mapping[str, Any]) -> str:
    return "".join(f"{json.dumps(name)} = {_value(value)}\n" for name, value in tables.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        members = (f"{json.dumps(name)} = {_value(item)}" for name, item in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)
