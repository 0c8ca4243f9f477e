"""Starts `hardpoint serve` in a process, and looks at what a process holds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 180.0
_STOP_S = 30.0
MIB = 1 << 20


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class ServerProcess:
    """A server that this program started.

    Attributes:
        url: its address.
        pid: process id of the server.
    """

    def __init__(
        self, model: str, settings: Mapping[str, str], python: str = sys.executable
    ) -> None:
        """Start it, and wait until it is ready.

        Args:
            model: as `hardpoint serve` takes it.
            settings: settings of the configuration, path to TOML value.
            python: the interpreter.

        Raises:
            SystemExit: it ended, or is not ready in time.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        command = [python, "-m", "hardpoint", "serve", model, "--port", str(port)]
        for path, value in settings.items():
            command += ["--set", f"{path}={value}"]
        here = str(Path(__file__).parents[1])  # plugins of these benchmarks are imported from it
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.pid = self._process.pid
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended early:\n{self.log()}")
            if time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"the server is not ready after {START_S:g} s:\n{self.log()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log(self) -> str:
        """Return the end of what it wrote."""
        self._log.seek(0)
        return self._log.read()[-3000:]

    def stop(self) -> None:
        """End it, kindly at first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, without its children.

    It is the sum over the threads that live, in nanoseconds where Linux has it so.
    """
    folder = Path(f"/proc/{pid}/task")
    if not folder.exists():
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return sum(int((task / "schedstat").read_text().split()[0]) for task in folder.iterdir()) / 1e9


@dataclass(frozen=True)
class Holdings:
    """The resources that a server's process and its children hold.

    Attributes:
        processes, descriptors, threads: numbers of them.
        memory_mib: resident.
    """

    processes: int
    descriptors: int
    threads: int
    memory_mib: float

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Return the resources that a process and its children hold now."""
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return cls(
            len(family),
            sum(member.num_fds() for member in family),
            sum(member.num_threads() for member in family),
            sum(member.memory_info().rss for member in family) / MIB,
        )

    def leaks(self, before: Holdings, memory_mib: float) -> list[str]:
        """Return the resources that grew, in plain sentences.

        Args:
            before: the same process before the load.
            memory_mib: how much its memory may have grown by.
        """
        found = []
        for name in ("processes", "descriptors", "threads"):
            old, new = getattr(before, name), getattr(self, name)
            if new > old:
                found.append(f"{name}: {old} before the load, {new} after it")
        if self.memory_mib > before.memory_mib + memory_mib:
            grown = self.memory_mib - before.memory_mib
            found.append(f"memory: grew by {grown:.0f} MiB, more than {memory_mib:g}")
        return found
