"""An interrupt while the command line is imported and started prints no traceback."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cases import nightly_but

from hardpoint.testing import scripted_config

CODE = """
import runpy, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "hardpoint.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
runpy.run_module("hardpoint", run_name="__main__")
"""

SIGNALING = """
import signal, sys

class Signaling:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("signal", flush=True)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Signaling())
from hardpoint.__main__ import main

sys.argv = ["hardpoint", *{arguments!r}]
sys.exit(main())
"""

LOSING = """
import signal, sys

class Losing:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("signal", flush=True)
            try:
                signal.raise_signal(signal.SIGINT)
            except:
                print("lost", flush=True)

sys.meta_path.insert(0, Losing())
from hardpoint.__main__ import main

sys.argv = ["hardpoint", *{arguments!r}]
sys.exit(main())
"""

QUIET = (130, "")


def test_an_interrupt_of_the_first_imports_ends_quietly():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def arguments_of(folder: Path) -> list[str]:
    """Return the command line that serves a scripted model."""
    config = scripted_config(folder)
    settings = {
        "load.use": "dummy",
        "dtype": "float32",
        "server.port": 0,
        "attention.use": config["attention"]["use"],
        "plugins.enable": '[{use="hardpoint.testing:ScriptedModel",name="ScriptedForCausalLM"}]',
    }
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    return ["serve", "--model", str(folder), *given]


@pytest.mark.parametrize(
    "module",
    [
        "hardpoint.cli",
        "argparse",
        "hardpoint.errors",
        "msgspec",
        "hardpoint.plugins",
        "hardpoint.host.registry.discovery",
        "hardpoint.host.registry.plugin_set",
        "hardpoint.builtin_plugins.server",
        "starlette.requests",
        "torch",
        "hardpoint.async_llm",
    ],
)
def test_a_signal_at_any_import_ends_quietly(scripted, module):
    code = SIGNALING.format(module=module, arguments=arguments_of(scripted))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == QUIET
    assert "signal" in ended.stdout  # that module is imported


@pytest.mark.parametrize(
    "module", nightly_but(["torch", "hardpoint.async_llm", "transformers"], "torch")
)
def test_libraries_lose_no_interrupt(scripted, module):
    """A bare `except` around an import within a library would swallow a KeyboardInterrupt.

    The command ends with what it does at that time, such as to open an engine, which logs.
    """
    code = LOSING.format(module=module, arguments=arguments_of(scripted))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert module != "torch" or ended.stderr == ""
    assert ended.stdout == "signal\nlost\n"


def test_signals_that_are_ignored_stay_so(scripted):
    """A program that `nohup` or a shell's `&` starts ignores SIGINT."""
    code = SIGNALING.format(module="hardpoint.cli", arguments=["plugins", "list"])
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{code}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "hardpoint" in ended.stdout


def test_the_package_imports_nothing_before_the_handler_is_set():
    """Time in imports that come before it is time in which an interrupt prints a traceback."""
    code = "import sys; old = set(sys.modules); import hardpoint.__main__\n"
    code += "print(*set(sys.modules) - old)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert set(ended.stdout.split()) <= {"hardpoint", "hardpoint.__main__", "__future__"}


@pytest.mark.nightly
def test_signals_at_many_moments(scripted):
    """The interpreter's own start, and the script that pip writes, come before this package."""
    moments = random.Random(3)
    code = (
        "print('up', flush=True)\nimport sys; from hardpoint.__main__ import main; sys.exit(main())"
    )
    for _ in range(30):
        program = subprocess.Popen(
            [sys.executable, "-c", code, *arguments_of(scripted)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        time.sleep(0.01 + moments.random() * 3)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=120)
        assert "Traceback" not in errors
        assert "Exception ignored" not in errors
