"""Starting, hearing of and ending engine processes: real processes, a few lines of work."""

from __future__ import annotations

import gc
import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from pathlib import Path

import msgspec
import pytest
from processes import ROOT

from hardpoint.core.process import engine_process
from hardpoint.core.process.engine_process import EngineProcess
from hardpoint.core.process.failure import Failure
from hardpoint.core.process.launch import Interpreter, Launch, decode_launch, main_objects
from hardpoint.plugins import (
    ConfigError,
    EngineDeadError,
    HardpointError,
    Manifest,
    ModelError,
    PluginEntry,
    PluginLoadError,
)

ENTRY = PluginEntry(
    kind="logits_processors", name="dry", value="__main__:Dry", distribution="d", version="1"
)
MANIFEST = Manifest(hardpoint="1", entries=(ENTRY,), generation=3)


def launch(**fields) -> Launch:
    return Launch(**{"address": "ipc:///tmp/x", "manifest": MANIFEST, "config": {}} | fields)


@pytest.fixture
def child(tmp_path):
    """Write a child program that does `body`; start it with keyword arguments of `start`."""
    started = []

    def start(body: str, plan: Launch | None = None, **options) -> EngineProcess:
        program = write_child(tmp_path, body)
        process = EngineProcess.start(plan or launch(), program=program, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close(grace_s=0)


def write_child(folder: Path, body: str) -> Path:
    program = folder / "child_program.py"
    program.write_text(
        "import json, os, signal, sys, threading, time\n"
        "from pathlib import Path\n"
        "from hardpoint.core.process.__main__ import main\n"
        "from hardpoint.plugins import *\n"
        f"OUT = Path({str(folder / 'out')!r})\n"
        "def say(value):\n"
        "    OUT.with_suffix('.new').write_text(json.dumps(value))\n"
        "    OUT.with_suffix('.new').rename(OUT)\n"
        "def run(launch, watch):\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\nmain(run)\n"
    )
    return program


def said(folder: Path, limit_s: float = 20.0):
    until = time.monotonic() + limit_s
    while not (folder / "out").exists():
        assert time.monotonic() < until, "the child said nothing"
        time.sleep(0.01)
    answer = json.loads((folder / "out").read_text())
    (folder / "out").unlink()
    return answer


def failure_of(process: EngineProcess) -> HardpointError:
    """Wait as a client does, on the sentinels, for what went wrong."""
    poller = select.poll()
    for descriptor in process.sentinels:
        poller.register(descriptor, select.POLLIN)
    until = time.monotonic() + 20
    while (failure := process.failure()) is None:
        assert time.monotonic() < until
        poller.poll(1000)
    return failure


def gone(pid: int, limit_s: float) -> bool:
    """Whether a process ends, or has ended, within a time."""
    until = time.monotonic() + limit_s
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z" or time.monotonic() >= until:
            return state == "Z"
        time.sleep(0.01)


# What arrives


def test_launch_arrives_whole(child, tmp_path):
    plan = launch(
        config={"model": "m", "plugin": {"dry": {"a": [1, 2.5, None]}}, "big": "x" * 2_000_000},
        origins={"model": "file hardpoint.toml"},
        log_level="DEBUG",
        engine_index=2,
    )
    process = child("say(json.loads(__import__('msgspec').json.encode(launch)))", plan)
    assert process.wait(20) == 0
    assert msgspec.convert(said(tmp_path), Launch) == plan
    assert process.description == f"the engine process (pid {process.pid}) exited with code 0"


def test_nothing_private_shows(child, tmp_path):
    plan = launch(config={"secret": "hunter2"}, address="ipc:///hunter2")
    process = child("say(1); time.sleep(30)", plan)
    said(tmp_path)
    for name in ("cmdline", "environ"):
        shown = Path(f"/proc/{process.pid}/{name}").read_bytes()
        assert shown
        assert b"hunter2" not in shown
        assert str(sys.path).encode() not in shown


def test_interpreter_is_the_parents(child, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside.py").write_text("NAME = 'beside the script'")
    odd = os.fsdecode(b"/not/utf-8/\xff")
    monkeypatch.setattr(sys, "path", ["lib", odd, *sys.path, 7])
    monkeypatch.setattr(sys, "argv", ("frozen", "--flag"))
    monkeypatch.chdir(tmp_path)
    child(
        """
        import beside
        say([sys.path, sys.argv, os.getcwd(), beside.NAME])
        """
    )
    path, argv, directory, name = said(tmp_path)
    assert path == sys.path[:-1]
    assert path[1] == odd
    assert argv == ["frozen", "--flag"]
    assert directory == str(tmp_path)
    assert name == "beside the script"


def test_kept_interpreter_starts_the_same_again(child, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Interpreter.current()
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    child("say([os.getcwd(), sys.path])", interpreter=kept)
    directory, path = said(tmp_path)
    assert directory == str(tmp_path)
    assert path == kept.path


def test_removed_directory_is_no_obstacle(child, tmp_path, monkeypatch):
    (tmp_path / "short").mkdir()
    monkeypatch.chdir(tmp_path / "short")
    (tmp_path / "short").rmdir()
    child("say(1)")
    assert said(tmp_path) == 1


def test_unknown_executable_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(HardpointError, match="sys.executable: expected the path of a Python"):
        Interpreter.current()


def test_missing_executable_is_said(child):
    wrong = msgspec.structs.replace(Interpreter.current(), executable="/no/python")
    with pytest.raises(EngineDeadError, match="could not be started: .*'/no/python'"):
        child("pass", interpreter=wrong)


def test_other_version_is_refused():
    other = msgspec.msgpack.encode({"protocol": 99, "address": 5})
    with pytest.raises(HardpointError, match="protocol is version 99, this Hardpoint speaks ver"):
        decode_launch(other)
    with pytest.raises(HardpointError, match="launch: the message cannot be read: "):
        decode_launch(launch().encode()[:-3])


def test_blocked_and_ignored_signals_do_not_stay_so(child, tmp_path):
    everything = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        process = child("say(1); time.sleep(30)")
    finally:
        signal.signal(signal.SIGTERM, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    said(tmp_path)
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


def test_own_session_and_no_input(child, tmp_path):
    process = child("say([os.getsid(0), os.getpgid(0), sys.stdin.read()])")
    assert said(tmp_path) == [process.pid, process.pid, ""]


def test_program_says_what_it_is_for():
    program = ROOT / "core" / "process" / "__main__.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "This program is started by Hardpoint, which tells it what to do.\n"


# Failures


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("raise ConfigError('model: expected a path, got 5')", ConfigError, "^model: expected a"),
        ("raise ModelError('no weights')", ModelError, "^no weights$"),
        (
            """
            class Own(PluginLoadError):
                def __init__(self, a, b): super().__init__(f"{a} and {b}")
            raise Own(1, 2)
            """,
            PluginLoadError,
            "^1 and 2$",
        ),
        ("{}['x']", EngineDeadError, r"^the engine process \(pid \d+\) failed: KeyError: 'x'$"),
        ("raise ValueError('ü' * 300_000)", EngineDeadError, "failed: ValueError: ü+$"),
        ("raise KeyboardInterrupt", EngineDeadError, "failed: KeyboardInterrupt: $"),
        ("json.loads('{')", EngineDeadError, "failed: json.decoder.JSONDecodeError: Expecting"),
        ("sys.exit(3)", EngineDeadError, r"^the engine process \(pid \d+\) exited with code 3$"),
        ("os._exit(0)", EngineDeadError, r"exited with code 0$"),
        ("os.kill(os.getpid(), 9)", EngineDeadError, r"was killed by signal 9 \(SIGKILL\)$"),
        ("os.kill(os.getpid(), 40)", EngineDeadError, r"was killed by signal 40"),
        (
            "import ctypes; ctypes.string_at(0)",
            EngineDeadError,
            r"was killed by signal 11 \(SIGSEGV\)$",
        ),
    ],
)
def test_failure_is_the_childs(child, capfd, body, error, message):
    failure = failure_of(child(body))
    assert type(failure) is error
    assert re.search(message, str(failure))
    assert capfd.readouterr().err == ""


def test_failure_has_the_childs_traceback(child):
    failure = failure_of(
        child(
            """
            def inner():
                raise OSError("disk")
            try:
                inner()
            except OSError as cause:
                error = ModelError("weights cannot be read")
                error.add_note("try again")
                raise error from cause
            """
        )
    )
    again, (head, text) = failure.__notes__[0], failure.__notes__[1].split("\n", 1)
    assert again == "try again"
    assert head.startswith("In the engine process (pid ")
    assert 'raise OSError("disk")\nOSError: disk\n\nThe above exception was the direct' in text
    assert text.endswith("raise error from cause")
    assert "weights cannot be read" not in text.split("direct cause")[1].split("raise error")[1]


def test_failure_after_the_parent_left_is_printed(child, tmp_path, capfd):
    process = child(
        "watch.on_gone(lambda: None, 20); say(1); time.sleep(0.3); raise ValueError('late')"
    )
    said(tmp_path)
    process.close()
    assert process.returncode == 1
    assert "ValueError: late" in capfd.readouterr().err


def test_main_object_that_cannot_be_rebuilt(child):
    module = type(sys)("here_alone")
    module.Missing = type("Missing", (), {"__module__": "here_alone"})
    sys.modules["here_alone"] = module
    try:
        from hardpoint.core.process.by_value import dumps

        data = dumps({"Dry": module.Missing})
    finally:
        del sys.modules["here_alone"]
    failure = failure_of(child("pass", launch(main_objects=data)))
    assert type(failure) is PluginLoadError
    assert str(failure).startswith("__main__: what the program defines cannot be rebuilt in the ")
    assert "No module named 'here_alone'" in str(failure)


def test_no_failure_while_it_is_well(child, tmp_path):
    process = child("say(1); time.sleep(30)")
    assert process.failure() is None
    said(tmp_path)
    assert process.failure() is None
    assert process.returncode is None
    assert process.wait(0.01) is None
    assert process.description.endswith("is running")


@pytest.mark.parametrize("cut", [0, 7, 8, 20])
def test_half_a_report_is_none(cut):
    body = json.dumps({"types": ["a:B"], "message": "m", "notes": [], "traceback": ""}).encode()
    frame = len(body).to_bytes(8, "big") + body
    assert Failure.of(frame[:cut]) is None
    assert str(Failure.of(frame).error(5)) == "the engine process (pid 5) failed: a.B: m"


# Ending


def test_kill_is_noticed_at_once(child, tmp_path):
    process = child("say(1); time.sleep(30)")
    said(tmp_path)
    process.kill()
    start = time.monotonic()
    failure = failure_of(process)
    assert time.monotonic() - start < 0.5
    assert "was killed by signal 9 (SIGKILL)" in str(failure)


def test_close_ends_a_child_that_does_nothing(child, tmp_path):
    process = child("say(1); time.sleep(30)")
    said(tmp_path)
    start = time.monotonic()
    process.close()
    process.close()
    assert time.monotonic() - start < 1
    assert process.returncode == 1
    process.kill()  # nothing is left to be killed


def test_close_lets_a_child_finish(child, tmp_path):
    process = child(
        """
        done = threading.Event()
        watch.on_gone(done.set, 20)
        say("up")
        done.wait()
        say("finished")
        """
    )
    assert said(tmp_path) == "up"
    process.close()
    assert process.returncode == 0
    assert said(tmp_path) == "finished"


def test_finishing_has_a_limit(child, tmp_path):
    process = child("watch.on_gone(lambda: time.sleep(30), 0.2); say(1); time.sleep(30)")
    said(tmp_path)
    start = time.monotonic()
    process.close()
    assert 0.2 < time.monotonic() - start < 1
    assert process.returncode == 1


def test_close_kills_what_hangs(child, tmp_path):
    process = child("say(1); os.kill(os.getpid(), signal.SIGSTOP)")
    said(tmp_path)
    process.close(grace_s=0.1)
    assert process.returncode == -signal.SIGKILL


def test_collected_without_close(child, tmp_path):
    process = EngineProcess.start(launch(), program=write_child(tmp_path, "say(1); time.sleep(30)"))
    pid, descriptors = process.pid, process.sentinels
    said(tmp_path)
    del process
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_without_process_descriptors(child, tmp_path, monkeypatch):
    def refuse(pid):
        raise OSError("no such system call")

    monkeypatch.setattr(engine_process.os, "pidfd_open", refuse)
    process = child("say(1); time.sleep(30)")
    assert len(process.sentinels) == 1
    said(tmp_path)
    assert process.wait(0.05) is None
    process.kill()
    assert "killed by signal 9" in str(failure_of(process))
    assert process.wait() == -9


def test_two_thousand_descriptors_do_not_grow(child, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    process = child("say(1)")
    assert process.wait(20) == 0
    process.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Parents of every kind

PARENT = """
import os, sys, time
sys.path.insert(0, {lib!r})
from pathlib import Path
from hardpoint.core.process.engine_process import EngineProcess
from hardpoint.core.process.launch import Launch, main_objects
from hardpoint.plugins import Manifest

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
CHECK = "if code := go().wait(20): sys.exit(code)\n"


@pytest.fixture
def parent(tmp_path):
    """Return the text of a parent program that has `go()`, with a module beside it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside.py").write_text("NAME = 'beside'")

    def text(child_body: str = CHILD) -> str:
        program = write_child(tmp_path, child_body)
        return PARENT.format(lib=str(tmp_path / "lib"), program=str(program))

    return text


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


IN_A_THREAD = """
import threading
found = []
thread = threading.Thread(target=lambda: found.append(go()))
thread.start(); thread.join()
time.sleep(0.5)
assert found[0].returncode in (None, 0)
assert found[0].wait(20) == 0
"""
IN_ASYNCIO = """
import asyncio
async def main():
    process = go()
    ended = asyncio.Event()
    for descriptor in process.sentinels:
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await asyncio.wait_for(ended.wait(), 20)
    assert process.wait(1) == 0
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "check", [CHECK, IN_A_THREAD, IN_ASYNCIO], ids=["plain", "thread", "async"]
)
def test_plain_script(parent, tmp_path, check):
    script = tmp_path / "script.py"
    script.write_text(parent() + check)
    python(str(script), "argument", cwd="/")
    assert said(tmp_path)[:2] == ["beside", "from main"]


def test_from_a_command_line(parent, tmp_path):
    python("-c", parent() + CHECK, "argument")
    assert said(tmp_path)[7] == ["-c", "argument"]


def test_from_standard_input(parent, tmp_path):
    done = python("-i", "-q", input=f"{parent()}\n{CHECK}\nprint('still here')\n")
    assert said(tmp_path)[:2] == ["beside", "from main"]
    assert "still here" in done.stdout, "the child must not read the parent's input"


def test_flags_are_carried(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(parent() + CHECK)
    python("-I", "-W", "error::UserWarning", "-X", "dev", "-X", "pct=1", "-OO", str(script))
    _, _, dev, warnings, isolated, optimize, option, _ = said(tmp_path)
    assert (dev, isolated, optimize, option) == (True, 1, 2, True)
    assert warnings[-1] == "error::UserWarning"


def test_hardpoint_found_by_a_path_set_at_run_time(tmp_path):
    """Neither installed nor in PYTHONPATH, and another one where the parent stands."""
    package = tmp_path / "lib" / "hardpoint"
    link_package(package)
    (package / "core" / "process" / "run.py").write_text(
        "import hardpoint\n"
        "from pathlib import Path\n"
        "def run_engine(launch, watch):\n"
        "    Path(launch.config['out']).write_text(hardpoint.__file__)\n"
    )
    (tmp_path / "hardpoint").mkdir()
    (tmp_path / "hardpoint" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(
        f"import sys; sys.path[:0] = {[str(package.parent), sysconfig.get_path('purelib')]}\n"
        "from hardpoint.core.process.engine_process import EngineProcess\n"
        "from hardpoint.core.process.launch import Launch\n"
        "from hardpoint.plugins import Manifest\n"
        "process = EngineProcess.start(Launch(address='a', config={'out': sys.argv[1]},\n"
        "    manifest=Manifest(hardpoint='1', entries=())))\n"
        "assert process.wait(20) == 0, process.failure()\n"
    )
    python("-S", "-I", str(script), str(tmp_path / "out"), cwd=tmp_path)
    assert (tmp_path / "out").read_text() == str(package / "__init__.py")


def link_package(package: Path) -> None:
    """Make the package `hardpoint` of this checkout at a path, as links."""
    for source, target in ((ROOT / "api", package), (ROOT / "core", package / "core")):
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != "process":
                (target / entry.name).symlink_to(entry)
    (package / "plugins").symlink_to(ROOT / "plugins")
    (package / "core" / "process").mkdir()
    for entry in (ROOT / "core" / "process").glob("*.py"):
        if entry.name != "run.py":
            (package / "core" / "process" / entry.name).symlink_to(entry)


WAITING_CHILD = "say(os.getpid()); time.sleep(60)"
FORKING = """
other = os.fork()
if other == 0:
    time.sleep(60)
    os._exit(0)
"""


@pytest.mark.parametrize("before", ["", FORKING], ids=["alone", "forked"])
def test_child_ends_when_the_parent_is_killed(parent, tmp_path, before):
    """Also where another child of the parent holds what it inherited."""
    script = tmp_path / "script.py"
    script.write_text(
        parent(WAITING_CHILD)
        + "process = go(); other = 0\n"
        + "import subprocess; subprocess.Popen(['sleep', '5'])\n"
        + before
        + f"Path({str(tmp_path / 'forked')!r}).write_text(str(other))\ntime.sleep(60)\n"
    )
    running = subprocess.Popen([sys.executable, str(script)])
    pid = said(tmp_path)
    while not (tmp_path / "forked").exists():
        time.sleep(0.01)
    running.kill()
    running.wait()
    try:
        assert gone(pid, 1.0)
        if before:
            assert not gone(int((tmp_path / "forked").read_text()), 0)
    finally:
        if before:
            os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)


def test_child_ends_when_the_parent_exits_without_a_word(parent, tmp_path):
    python(
        "-c",
        parent(WAITING_CHILD)
        + f"process = go()\nwhile not Path({str(tmp_path / 'out')!r}).exists(): pass\n",
    )
    assert gone(said(tmp_path), 0)


def test_forked_copy_does_nothing_to_the_child(child, tmp_path):
    process = child("say(1); time.sleep(30)")
    said(tmp_path)
    if (forked := os.fork()) == 0:
        process.terminate()
        process.kill()
        process.close()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    assert process.wait(0.3) is None
    assert process.failure() is None


def test_interrupt_of_the_terminal_spares_the_child(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        parent(WAITING_CHILD)
        + "process = go()\n"
        + "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass\n"
        + "time.sleep(0.2)\nassert process.returncode is None\n"
    )
    running = subprocess.Popen([sys.executable, str(script)], process_group=0)
    pid = said(tmp_path)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(20) == 0
    assert gone(pid, 0)


def test_closed_standard_descriptors(parent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        parent("say(1)") + "os.close(0); os.close(1); os.close(2)\nos._exit(go().wait(20))\n"
    )
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0
    assert said(tmp_path) == 1


def test_watchers_in_many_threads(child, tmp_path):
    process = child("say(1); time.sleep(30)")
    said(tmp_path)
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(process.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    process.terminate()
    for thread in threads:
        thread.join(5)
    assert codes == [-signal.SIGTERM] * 8


def test_nothing_of_main_is_nothing():
    assert main_objects(["json:dumps", "acme.sampling:Dry"]) == b""
