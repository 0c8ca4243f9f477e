"""`hardpoint serve` as a program of its own, with the scripted model."""

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import httpx
import psutil

import support.http_clients  # noqa: F401 - shares the certificates of clients
from support.process.forked_python import forked_python
from support.scripted_folder import write_config
from support.waiting import PATIENCE_S

KEYS = {name: f"{name}-0123456789abcdef" for name in ("single", "alice", "bob")}
"""Of the server that tests share."""
TESTS = str(Path(__file__).parents[1])


def enabling(*plugins):
    """Return arguments of `serving` that enable the scripted model and plugins of tests.

    Args:
        plugins: TOML of entries of `plugins.enable`.
    """
    model = '{use="hardpoint.testing:ScriptedModel",name="ScriptedForCausalLM"}'
    options = ("--set", f"plugins.enable=[{','.join((model, *plugins))}]")
    return {"options": options, "environment": {"PYTHONPATH": TESTS}}


class ServeProgram:
    """A server that runs.

    Attributes:
        url: where it answers.
        client: an httpx client with the server's URL as its base.
    """

    def __init__(self, process, url, output, **client):
        self.process, self.url, self._output = process, url, output
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S, **client)

    @property
    def output(self):
        """All that it wrote so far, to standard output and error."""
        return self._output.read_text()

    def processes(self):
        """Return its process and all below."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


@contextlib.contextmanager
def serving(folder, scripted, *settings, options=(), environment=None, **client):
    """Run a server while the body runs.

    Args:
        folder: its working directory.
        settings: lines of its configuration.
        options: further ones of the command.
        environment: further variables.
        client: arguments of httpx.
    """
    write_config(folder, scripted, "server.port = 0", "stats.sinks = []", *settings)
    output = folder / "output.txt"
    with output.open("w") as file:
        process = forked_python().popen(
            ["-m", "hardpoint", "serve", *options],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            is_torn_down=False,
        )
    try:
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not (match := re.search(r"Serving .* at (https?://\S+)", output.read_text())):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        server = ServeProgram(process, match[1], output, **client)
        with server.client:
            yield server
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
