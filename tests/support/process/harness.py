"""Real engine processes in tests: opening them, looking at them, and outliving them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from hardpoint import LLM, SamplingParams, typed
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import EngineDeadError
from hardpoint.plugins import EngineConfig
from hardpoint.testing import scripted_config
from support.engines import build_engine
from support.process.fork_server import STARTS
from support.process.forked_python import forked_python
from support.processes import ROOT
from support.shared_memory import our_shared_memory
from support.waiting import PATIENCE_S, alive, wait_until

OWN_PROCESS = {"in_process": False}
QUICK_S = 30.0
"""Much longer than what is to be quick takes on a busy machine; what hangs in tests takes 60 s."""
PATH = [str(ROOT / "tests")]
GRPC_POOL = ("event_engine", "lifeguard")
"""Names of the threads that gRPC begins and ends by its load, at any time after a use of Ray."""


def process_config(folder: Path, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of a scripted model in a process of its own."""
    extra = dict(extra or {})
    return scripted_config(folder, extra | {"engine": OWN_PROCESS | extra.get("engine", {})})


def open_engine(folder: Path, extra: Mapping[str, Any] | None = None) -> LLMEngine:
    """Open an engine in a process of its own, to be stepped by hand."""
    return build_engine(typed.convert(process_config(folder, extra), EngineConfig, path=""))


class Opened:
    """Engines that a test opened."""

    def __init__(self) -> None:
        self._llms: list[LLM] = []
        self._pids: list[int] = []

    def __call__(self, folder: Path, extra: Mapping[str, Any] | None = None) -> LLM:
        llm = LLM(config=process_config(folder, extra))
        self._llms.append(llm)
        self._pids.append(pid_of(llm))
        return llm

    def close(self) -> list[int]:
        """Close them all; return the ids of their processes."""
        for llm in self._llms:
            llm.close()
        return self._pids


def pid_of(llm: LLM) -> int:
    """The process id of an engine."""
    return llm.llm_engine.parts.client.pid


def hangs(begun: Path) -> SamplingParams:
    """Parameters of a request with hanging steps, with the plugin `slow`; the path shows the begin.

    A request and a call that are sent together may be answered together: who wants the engine to
    be in a step waits for the path (see `in_step`).
    """
    arguments = {"seconds": 60, "begun": str(begun)}
    return SamplingParams(temperature=0.0, max_tokens=1, plugin_args={"slow": arguments})


def in_step(begun: Path) -> None:
    """Wait until the step of a request that `hangs` has begun."""
    wait_until(begun.exists, PATIENCE_S, "the step")


def drains(ask: Callable[[], object]) -> bool:
    """Whether an engine is draining, so that it rejects the request of `ask`."""
    try:
        ask()
    except EngineDeadError as error:
        return str(error) == "the engine is shutting down"
    return False


def gone(pid: int, limit_s: float = PATIENCE_S) -> float:
    """Wait for the end of a process; return the seconds it took."""
    return wait_until(lambda: not alive(pid), limit_s, f"the end of process {pid}")


def assert_quick(name: str, seconds: float) -> None:
    """Print a measured time; fail if it indicates a hang, or an awaited time limit."""
    print(f"\n[measured] {name}: {seconds:.3f} s")
    assert seconds < QUICK_S, f"{name}: {seconds:.3f} s, expected less than {QUICK_S:g} s"


def holdings() -> Counter:
    """Resources of this program besides its memory: descriptors, threads, children, files."""
    gc.collect()
    STARTS.start_server()  # else the first engine process would leave it behind
    held: Counter = Counter()
    held.update(f"descriptor {link.split(':[')[0]}" for link in _open_files())
    held.update(f"thread {thread.name}" for thread in threading.enumerate())
    held["native threads"] = sum(name not in GRPC_POOL for name in _native_threads())
    held.update(f"child {child.pid}" for child in psutil.Process().children(recursive=True))
    held.update(f"shared memory {name}" for name in our_shared_memory())
    folder = Path(tempfile.gettempdir())
    held.update(f"folder {path}" for path in folder.glob("hardpoint-*"))
    return held


def _native_threads() -> list[str]:
    """The names that libraries and the system gave to the threads of this program."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended at the same time
            names.append((task / "comm").read_text().strip())
    return names


def _open_files() -> Iterator[str]:
    """The objects that the descriptors of this program stand for."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, and what closes at the same time
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def nothing_left(before: Counter, limit_s: float = PATIENCE_S) -> float:
    """Wait until nothing is held that was not held before; return the seconds it took."""
    began = time.monotonic()
    while left := holdings() - before:
        assert time.monotonic() - began < limit_s, (
            f"left behind: {dict(left)}; native threads now: {Counter(_native_threads())}"
        )
        time.sleep(0.02)
    return time.monotonic() - began


class Program:
    """A Python program that a test started; it prints JSON, one value per line."""

    def __init__(
        self,
        source: str,
        *,
        folder: Path,
        how: str = "file",
        cwd: Path | None = None,
        path: list[str] | None = None,
        forked: bool = False,
    ) -> None:
        """Start it.

        Args:
            source: its text, indented as you like.
            folder: where its file is written.
            how: "file", "-c" or "stdin".
            cwd: where it is started; None is `folder`.
            path: put before PYTHONPATH; None lets it import what these tests import.
            forked: whether it may be a fork of an interpreter, and its engine process one of it.
        """
        text = textwrap.dedent(source)
        script = folder / "user_script.py"
        script.write_text(text)
        command = {"file": [str(script)], "-c": ["-c", text], "stdin": ["-"]}[how]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HARDPOINT__")}
        known = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        environment["PYTHONPATH"] = os.pathsep.join((PATH if path is None else path) + known)
        environment["OMP_NUM_THREADS"] = "1"
        start = forked_python().popen if forked else _started
        self.popen = start(
            command,
            cwd=cwd or folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if how == "stdin":
            self.popen.stdin.write(text)
            self.popen.stdin.close()
            self.popen.stdin = None

    @property
    def pid(self) -> int:
        return self.popen.pid

    def next_value(self) -> Any:
        """Wait for the next line that is JSON and return its value."""
        for line in self.popen.stdout:
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise AssertionError(f"it ended without a word:\n{self.popen.stderr.read()}")

    def finish(self, timeout_s: float = 90.0) -> tuple[list[Any], str]:
        """Wait for its end, which must be a good one; return its values, and stderr."""
        out, err = self.popen.communicate(timeout=timeout_s)
        assert self.popen.returncode == 0, f"exit code {self.popen.returncode}\n{out}\n{err}"
        values = []
        for line in out.splitlines():
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
        return values, err

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


def _started(arguments: list[str], **options: Any) -> subprocess.Popen:
    """Start an interpreter."""
    return subprocess.Popen([sys.executable, *arguments], **options)


def run_program(source: str, **options: Any) -> list[Any]:
    """Run a program to its end; return its values."""
    with Program(source, **options) as program:
        return program.finish()[0]
