"""The name of an engine process, and the labels of its log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.process.forked_python import forked_python

from hardpoint.process.child_processes import naming


@pytest.fixture
def run(tmp_path):
    """Run a program in an engine's process; return its output and its errors."""

    def start(code: str) -> tuple[str, str]:
        done = forked_python().run(["-c", code], tmp_path, dict(os.environ))
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return start


NAMES = """
from pathlib import Path
from hardpoint.process.engine.run import engine_name, name_process

name_process(engine_name({index}))
print(Path("/proc/self/comm").read_text(), end="")
"""


@pytest.mark.parametrize(("index", "name"), [(0, "EngineCore"), (3, "EngineCore_DP3")])
def test_process_lists_show_the_engine(run, index, name):
    assert run(NAMES.format(index=index))[0] == f"{name}\n"


def test_other_systems_have_no_such_file(monkeypatch, tmp_path):
    missing = tmp_path / "nothing" / "comm"
    monkeypatch.setattr(naming, "_COMM", missing)
    naming.name_process("EngineCore")
    assert not missing.parent.exists()
    assert Path("/proc/self/comm").read_text() != "EngineCore\n"


LOGS = """
import logging
import os
from hardpoint.process.engine.run import log_as

log_as(3, "INFO")
log = logging.getLogger("hardpoint")
log.info("two\\nlines of %s", "words")
log.debug("not this")
logging.getLogger("other").warning("also this")
try:
    raise KeyError("x")
except KeyError:
    log.exception("it failed")
print(os.getpid())
"""


def test_every_line_names_its_engine(run):
    pid, lines = run(LOGS)
    label = f"[EngineCore 3, pid {int(pid)}] "
    first, second, third, fourth, *trace = lines.splitlines()
    assert first == label + "INFO: two"
    assert second == label + "lines of words"
    assert third == label + "WARNING: also this"
    assert fourth == label + "ERROR: it failed"
    assert all(line.startswith(label) for line in trace)
    assert trace[-1] == label + "KeyError: 'x'"
