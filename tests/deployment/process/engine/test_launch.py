"""The launch message of an engine process, and its reports when it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.core.launch_harness import LIMIT_S, failure_of, launch, output_of
from support.processes import ROOT

from hardpoint.errors import EngineDeadError, PluginLoadError
from hardpoint.plugins import ConfigError, HardpointError, ModelError
from hardpoint.process.child_processes.launch import Interpreter, decode_launch, main_objects
from hardpoint.process.child_processes.process import FailureReport
from hardpoint.process.launch import Launch

# What arrives


def test_launch_arrives_whole(child, tmp_path):
    plan = launch(
        config={"model": "m", "plugin": {"dry": {"a": [1, 2.5, None]}}, "big": "x" * 2_000_000},
        config_sources={"model": "file hardpoint.toml"},
        log_level="DEBUG",
        engine_index=2,
    )
    process = child(
        "say(json.loads(__import__('msgspec').json.encode(decode_launch(launch, Launch))))", plan
    )
    assert process.wait(LIMIT_S) == 0
    assert msgspec.convert(output_of(tmp_path), Launch) == plan
    assert process.description == f"the engine process (pid {process.pid}) exited with code 0"


def test_nothing_private_shows(child, tmp_path):
    plan = launch(config={"secret": "hunter2"}, address="ipc:///hunter2")
    process = child("say(1); time.sleep(600)", plan)
    output_of(tmp_path)
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
    path, argv, directory, name = output_of(tmp_path)
    assert path == sys.path[:-1]
    assert path[1] == odd
    assert argv == ["frozen", "--flag"]
    assert directory == str(tmp_path)
    assert name == "beside the script"


def test_kept_interpreter_starts_the_same_again(child, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    interpreter = Interpreter.current()
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    child("say([os.getcwd(), sys.path])", interpreter=interpreter)
    directory, path = output_of(tmp_path)
    assert directory == str(tmp_path)
    assert path == interpreter.path


def test_removed_directory_is_no_obstacle(child, tmp_path, monkeypatch):
    (tmp_path / "short").mkdir()
    monkeypatch.chdir(tmp_path / "short")
    (tmp_path / "short").rmdir()
    child("say(1)")
    assert output_of(tmp_path) == 1


def test_unknown_executable_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(HardpointError, match="sys.executable: expected the path of a Python"):
        Interpreter.current()


def test_missing_executable_is_reported(child):
    wrong = msgspec.structs.replace(Interpreter.current(), executable="/no/python")
    with pytest.raises(EngineDeadError, match="could not be started: .*'/no/python'"):
        child("pass", interpreter=wrong)


def test_other_version_is_refused():
    other = msgspec.msgpack.encode({"protocol": 99, "address": 5})
    with pytest.raises(HardpointError, match="protocol is version 99, this Hardpoint speaks ver"):
        decode_launch(other, Launch)
    with pytest.raises(HardpointError, match="launch: the message cannot be read: "):
        decode_launch(launch().encode()[:-3], Launch)


def test_blocked_and_ignored_signals_do_not_stay_so(child, tmp_path):
    everything = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        process = child("say(1); time.sleep(600)")
    finally:
        signal.signal(signal.SIGTERM, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    output_of(tmp_path)
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_own_session_and_no_input(child, tmp_path):
    process = child("say([os.getsid(0), os.getpgid(0), sys.stdin.read()])")
    assert output_of(tmp_path) == [process.pid, process.pid, ""]


def test_processes_spawned_from_the_child_do_not_run_the_program_again(child, tmp_path):
    child(
        """
        import multiprocessing
        process = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
        process.join()
        say(process.exitcode)
        """
    )
    assert output_of(tmp_path) == 0


def test_program_describes_its_purpose():
    program = ROOT / "deployment" / "process" / "child_processes" / "__main__.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "This program is started by Hardpoint itself.\n"


# Failures


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("raise ConfigError('model: expected a path, got 5')", ConfigError, "^model: expected a"),
        pytest.param(
            "raise ModelError('no weights')", ModelError, "^no weights$", marks=pytest.mark.nightly
        ),
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
        ("raise ValueError('ü' * 300_000)", EngineDeadError, "failed: ValueError: ü{100,}"),
        pytest.param(
            "raise KeyboardInterrupt",
            EngineDeadError,
            "failed: KeyboardInterrupt: $",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "json.loads('{')",
            EngineDeadError,
            "failed: json.decoder.JSONDecodeError: Expecting",
            marks=pytest.mark.nightly,
        ),
        ("sys.exit(3)", EngineDeadError, r"^the engine process \(pid \d+\) exited with code 3$"),
        pytest.param(
            "os._exit(0)", EngineDeadError, r"exited with code 0$", marks=pytest.mark.nightly
        ),
        ("os.kill(os.getpid(), 9)", EngineDeadError, r"was killed by signal 9 \(SIGKILL\)$"),
        pytest.param(
            "os.kill(os.getpid(), 40)",
            EngineDeadError,
            r"was killed by signal 40",
            marks=pytest.mark.nightly,
        ),
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
        """
        left = threading.Event()
        watch.on_gone(left.set, 60)
        say(1)
        left.wait()
        raise ValueError("late")
        """
    )
    output_of(tmp_path)
    process.close(grace_s=LIMIT_S)
    assert process.returncode == 1
    assert "ValueError: late" in capfd.readouterr().err


def test_main_object_that_cannot_be_rebuilt(child):
    module = type(sys)("here_alone")
    module.Missing = type("Missing", (), {"__module__": "here_alone"})
    sys.modules["here_alone"] = module
    try:
        from hardpoint.process.child_processes.main_module.main_pickle import dumps

        data = dumps({"Dry": module.Missing})
    finally:
        del sys.modules["here_alone"]
    failure = failure_of(child("pass", launch(main_objects=data)))
    assert type(failure) is PluginLoadError
    assert str(failure).startswith("__main__: definitions of the program cannot be rebuilt in the ")
    assert "No module named 'here_alone'" in str(failure)


@pytest.mark.parametrize("cut", [0, 7, 8, 20])
def test_half_a_report_is_none(cut):
    body = json.dumps({"types": ["a:B"], "message": "m", "notes": [], "traceback": ""}).encode()
    frame = len(body).to_bytes(8, "big") + body
    assert FailureReport.of(frame[:cut]) is None
    assert (
        str(FailureReport.of(frame).error("engine process (pid 5)"))
        == "the engine process (pid 5) failed: a.B: m"
    )


def test_nothing_of_main_is_nothing():
    assert main_objects(["json:dumps", "acme.sampling:Dry"]) == b""
