"""Starts `hardpoint serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Annotated, NamedTuple

from msgspec import Meta

from hardpoint.plugins import HardpointError
from hardpoint.typed import Strict

_ANNOUNCED = re.compile(r"^Serving .* at (http\S+)$", re.MULTILINE)
_POLL_S = 0.05
_STOP_S = 30.0
_KEPT = 2000  # characters of the log in a message


class ServerStart(Strict):
    """A server to start.

    Attributes:
        model: its model; None is that of the configuration.
        config: path of the configuration; None is the usual one.
        settings: settings, such as "scheduler.policy=fair"; later ones win.
        seconds: within which it has to be ready.
    """

    model: str | None = None
    config: str | None = None
    settings: list[str] = []
    seconds: Annotated[float, Meta(gt=0, le=86_400)] = 1800.0

    def command(self, python: str = sys.executable) -> list[str]:
        """Return the command line; the server chooses a port of 127.0.0.1."""
        found = [python, "-m", "hardpoint", "serve", "--port", "0"]
        if self.model is not None:
            found.append(f"--model={self.model}")
        if self.config is not None:
            found.append(f"--config={self.config}")
        return [*found, *(f"--set={one}" for one in ("server.access_log=off", *self.settings))]


class RunningServer(NamedTuple):
    """A server that this program started.

    Attributes:
        url: its address.
        pid: process id of the server.
        seconds: from its start until it was ready.
    """

    url: str
    pid: int
    seconds: float


@contextlib.contextmanager
def running_server(
    start: ServerStart, *, python: str = sys.executable, environment: Mapping[str, str] = os.environ
) -> Iterator[RunningServer]:
    """Run a server for the body, which begins once it is ready.

    Raises:
        HardpointError: it ended, or is not ready in time; with the end of its log.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # In a session of its own, an interrupt ends the load and not the server.
        process = subprocess.Popen(
            start.command(python),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            url = _wait_until_ready(process, log, start.seconds)
            yield RunningServer(url, process.pid, time.perf_counter() - began)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: IO[str], seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        has_ended = process.poll() is not None
        log.seek(0)
        text = log.read()
        if found := _ANNOUNCED.search(text):
            return found[1]
        if has_ended:
            raise HardpointError(
                f"the server ended before it was ready, with exit code {process.returncode}: "
                f"{_end_of(text)}"
            )
        if time.monotonic() > deadline:
            raise HardpointError(f"the server is not ready after {seconds:g} s: {_end_of(text)}")
        time.sleep(_POLL_S)


def _end_of(log: str) -> str:
    """Return the last error of a log, or its end."""
    lines = log.strip().splitlines()
    errors = [line for line in lines if line.startswith("hardpoint: error: ")]
    return errors[-1].removeprefix("hardpoint: error: ") if errors else log.strip()[-_KEPT:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it, kindly at first."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
