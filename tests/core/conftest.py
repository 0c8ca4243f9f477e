"""Engine processes that run a few lines of a test's own."""

from __future__ import annotations

import pytest
from launch_harness import CHILD, PARENT, launch, write_child

from hardpoint.core.process.engine_process import EngineProcess
from hardpoint.core.process.launch import Launch


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


@pytest.fixture
def parent(tmp_path):
    """Return the text of a parent program that has `go()`, with a module beside it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside.py").write_text("NAME = 'beside'")

    def text(child_body: str = CHILD) -> str:
        program = write_child(tmp_path, child_body)
        return PARENT.format(lib=str(tmp_path / "lib"), program=str(program))

    return text
