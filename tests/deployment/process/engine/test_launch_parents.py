"""Engine processes of every kind of parent: scripts, threads, shells, and dying ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.core.launch_harness import CHECK, LIMIT_S, gone, output_of, python
from support.processes import ROOT

RAISING = """
from hardpoint.plugins import ConfigError
process = go()
while not (failure := process.failure()):
    time.sleep(0.01)
raise failure
"""


def test_failure_shows_once(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(parent("raise ConfigError('model: there is no such file')") + RAISING)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stderr.count("there is no such file") == 2  # and once in the source line above it
    assert "\nhardpoint.errors.ConfigError: model: there is no such file\nIn the engine pro" in (
        done.stderr
    )
    assert done.stderr.rstrip().endswith("raise ConfigError('model: there is no such file')")
    assert done.stdout == ""


IN_A_THREAD = """
import threading
found = []
thread = threading.Thread(target=lambda: found.append(go()))
thread.start(); thread.join()
time.sleep(0.5)
assert found[0].returncode in (None, 0)
assert found[0].wait(60) == 0
"""


IN_ASYNCIO = """
import asyncio
async def main():
    process = go()
    ended = asyncio.Event()
    for descriptor in process.sentinels:
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await asyncio.wait_for(ended.wait(), 60)
    assert process.wait(60) == 0
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "check", [CHECK, IN_A_THREAD, IN_ASYNCIO], ids=["plain", "thread", "async"]
)
def test_plain_script(parent, tmp_path, check):
    script = tmp_path / "script.py"
    script.write_text(parent() + check)
    python(str(script), "argument", cwd="/")
    assert output_of(tmp_path)[:2] == ["beside", "from main"]


def test_from_a_command_line(parent, tmp_path):
    python("-c", parent() + CHECK, "argument")
    assert output_of(tmp_path)[7] == ["-c", "argument"]


def test_from_standard_input(parent, tmp_path):
    text = parent("import beside; say([beside.NAME, sys.stdin.read()])")
    done = python("-i", "-q", input=f"{text}\n{CHECK}\nprint('still here')\n")
    assert output_of(tmp_path) == ["beside", ""]
    assert "still here" in done.stdout, "the child must not read the parent's input"


def test_flags_are_carried(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(parent() + CHECK)
    flags = ["-I", "-W", "error", "-W", "error::UserWarning", "-X", "dev", "-X", "pct=1", "-OO"]
    assert python(*flags, str(script)).stderr == ""
    _, _, dev, warnings, isolated, optimize, option, _ = output_of(tmp_path)
    assert (dev, isolated, optimize, option) == (True, 1, 2, True)
    assert warnings[-1] == "error::UserWarning"


def test_hardpoint_found_by_a_path_set_at_run_time(tmp_path):
    """Neither installed nor in PYTHONPATH, and another one where the parent stands."""
    package = tmp_path / "lib" / "hardpoint"
    link_package(package)
    (package / "process" / "engine" / "run.py").write_text(
        "import hardpoint, msgspec\n"
        "from pathlib import Path\n"
        "def run_engine(data, watch):\n"
        "    launch = msgspec.msgpack.decode(data)\n"
        "    Path(launch['config']['out']).write_text(hardpoint.__file__)\n"
    )
    (tmp_path / "hardpoint").mkdir()
    (tmp_path / "hardpoint" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(
        f"import sys; sys.path[:0] = {[str(package.parent), sysconfig.get_path('purelib')]}\n"
        "from hardpoint.process.engine_process import EngineProcess\n"
        "from hardpoint.process.launch import Launch\n"
        "from hardpoint.plugins.component.manifest import Manifest\n"
        "process = EngineProcess.start(Launch(address='a', config={'out': sys.argv[1]},\n"
        "    manifest=Manifest(hardpoint='1', entries=())))\n"
        "assert process.wait(60) == 0, process.failure()\n"
    )
    python("-S", "-I", str(script), str(tmp_path / "out"), cwd=tmp_path)
    assert (tmp_path / "out").read_text() == str(package / "__init__.py")


def link_package(package: Path) -> None:
    """Make the package `hardpoint` of this checkout at a path, as links."""
    source = ROOT / "src" / "hardpoint"
    for folder, without in ((source, "process"), (source / "process", "engine")):
        target = package if without == "process" else package / "process"
        target.mkdir(parents=True)
        for entry in folder.iterdir():
            if entry.name != without:
                (target / entry.name).symlink_to(entry.resolve())
    (package / "process" / "engine").mkdir()
    for entry in (source / "process" / "engine").iterdir():
        if entry.name != "run.py":
            (package / "process" / "engine" / entry.name).symlink_to(entry)


WAITING_CHILD = "say(os.getpid()); time.sleep(600)"


FORKING = """
others.append(os.fork())
if others[-1] == 0:
    time.sleep(600)
    os._exit(0)
"""


@pytest.mark.parametrize("before", ["", FORKING], ids=["alone", "forked"])
def test_child_ends_when_the_parent_is_killed(parent, tmp_path, before):
    """Also if another child of the parent holds its inherited descriptors."""
    script = tmp_path / "script.py"
    script.write_text(
        parent(WAITING_CHILD)
        + "process = go()\n"
        + "import subprocess; others = [subprocess.Popen(['sleep', '600']).pid]\n"
        + before
        + "print(*others, flush=True)\ntime.sleep(600)\n"
    )
    running = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = output_of(tmp_path)
    others = [int(other) for other in running.stdout.readline().split()]
    running.kill()
    running.wait()
    running.stdout.close()
    try:
        assert gone(pid)
        assert not any(gone(other, 0) for other in others)
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)


def test_child_ends_when_the_parent_exits_without_a_word(parent, tmp_path):
    python(
        "-c",
        parent(WAITING_CHILD)
        + f"process = go()\nwhile not Path({str(tmp_path / 'out')!r}).exists(): pass\n",
    )
    assert gone(output_of(tmp_path), 0)


def test_interrupt_of_the_terminal_spares_the_child(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        parent(WAITING_CHILD)
        + "process = go()\n"
        + "try:\n    print('here', flush=True)\n    time.sleep(600)\n"
        + "except KeyboardInterrupt:\n    pass\n"
        + "time.sleep(0.2)\nassert process.returncode is None\n"
    )
    running = subprocess.Popen(
        [sys.executable, str(script)], process_group=0, stdout=subprocess.PIPE, text=True
    )
    pid = output_of(tmp_path)
    assert running.stdout.readline() == "here\n"
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(LIMIT_S) == 0
    running.stdout.close()
    assert gone(pid, 0)


def test_closed_standard_descriptors(parent, tmp_path):
    """The launch socket must not become the child's standard output."""
    script = tmp_path / "script.py"
    script.write_text(
        parent("print('noise', flush=True); raise ModelError('as it should be')")
        + "for number in range(3): os.close(number)\n"
        + "process = go()\n"
        + "process.wait(60)\n"
        + f"import json; out = Path({str(tmp_path / 'out')!r})\n"
        + "out.write_text(json.dumps(str(process.failure())))\n"
    )
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0
    assert output_of(tmp_path) == "as it should be"


def test_streams_that_were_closed_at_start_are_no_other_files_in_the_child(parent, tmp_path):
    """Files have the descriptors 0, 1 and 2 in the parent; the child must not write into them."""
    script = tmp_path / "script.py"
    script.write_text(
        parent("print('noise', flush=True); print('noise', file=sys.stderr, flush=True); say(1)")
        + f"files = [open({str(tmp_path / 'data')!r} + str(n), 'w') for n in range(3)]\n"
        + "assert [file.fileno() for file in files] == [0, 1, 2]\n"
        + "for file in files: os.set_inheritable(file.fileno(), True)\n"
        + CHECK
    )
    closing = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closing, sys.executable, str(script)], check=False).returncode == 0
    assert output_of(tmp_path) == 1
    assert [(tmp_path / f"data{number}").read_text() for number in range(3)] == [""] * 3
