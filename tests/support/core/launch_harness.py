"""Programs that start engine processes, and the processes' actions in their tests."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from hardpoint.plugins import HardpointError
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.launch import Launch

LIMIT_S = 60.0
"""For what comes soon, where the machine has nothing else to do."""
AT_ONCE_S = 30.0
"""What ends at once takes less, and a child that nobody ends takes much longer."""

ENTRY = PluginEntry(
    kind="logits_processors", name="dry", value="__main__:Dry", distribution="d", version="1"
)


MANIFEST = Manifest(hardpoint="1", entries=(ENTRY,), generation=3)


def launch(**fields) -> Launch:
    return Launch(**{"address": "ipc:///tmp/x", "manifest": MANIFEST, "config": {}} | fields)


PARENT = """
import os, sys, time
sys.path.insert(0, {lib!r})
from pathlib import Path
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.launch import Launch
from hardpoint.process.child_processes.launch import main_objects
from hardpoint.plugins.component.manifest import Manifest

class Dry:
    NAME = "from main"

def go():
    launch = Launch(
        address="a",
        manifest=Manifest(hardpoint="1", entries=()),
        config={{}},
        main_objects=main_objects(["__main__:Dry.NAME", "json:dumps"]),
    )
    return EngineProcess.start(launch, program=Path({program!r}))
"""


CHILD = """
import beside, importlib
say([beside.NAME, importlib.import_module("__main__").Dry.NAME, sys.flags.dev_mode, sys.warnoptions,
     sys.flags.isolated, sys.flags.optimize, "pct" in sys._xoptions, sys.argv])
"""


CHECK = "if code := go().wait(60): sys.exit(code)\n"


def write_child(folder: Path, body: str) -> Path:
    program = folder / "child_program.py"
    program.write_text(
        "import json, os, signal, sys, threading, time\n"
        "from pathlib import Path\n"
        "from hardpoint.process.child_processes.__main__ import main\n"
        "from hardpoint.process.child_processes.launch import decode_launch\n"
        "from hardpoint.process.launch import Launch\n"
        "from hardpoint.plugins import *\n"
        "from hardpoint.errors import *\n"
        f"OUT = Path({str(folder / 'out')!r})\n"
        "def say(value):\n"
        "    OUT.with_suffix('.new').write_text(json.dumps(value))\n"
        "    OUT.with_suffix('.new').rename(OUT)\n"
        "def run(launch, watch):\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\nmain(run)\n"
    )
    return program


def output_of(folder: Path, limit_s: float = LIMIT_S):
    until = time.monotonic() + limit_s
    while not (folder / "out").exists():
        assert time.monotonic() < until, "the child said nothing"
        time.sleep(0.01)
    answer = json.loads((folder / "out").read_text())
    (folder / "out").unlink()
    return answer


def failure_of(process: EngineProcess) -> HardpointError:
    """Wait like a client, on the sentinels, for the error."""
    poller = select.poll()
    for descriptor in process.sentinels:
        poller.register(descriptor, select.POLLIN)
    until = time.monotonic() + LIMIT_S
    while (failure := process.failure()) is None:
        assert time.monotonic() < until
        poller.poll(LIMIT_S * 1000)
    return failure


def gone(pid: int, limit_s: float = LIMIT_S) -> bool:
    """Whether a process ends, or has ended, within a time."""
    until = time.monotonic() + limit_s
    while (state := state_of(pid)) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.01)
    return state in ("", "Z")


def state_of(pid: int) -> str:
    """The system's letter for the state of a process; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done
