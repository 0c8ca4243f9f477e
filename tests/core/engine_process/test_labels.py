"""The name of an engine process, and the labels of its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.core.launch_harness import output_of

from hardpoint.system.process import naming


@pytest.mark.parametrize(("index", "name"), [(0, "EngineCore"), (3, "EngineCore_DP3")])
def test_process_lists_show_the_engine(child, tmp_path, index, name):
    process = child(
        f"""
        from hardpoint.core.engine_process.run import engine_name, name_process
        name_process(engine_name({index}))
        say(Path("/proc/self/comm").read_text())
        """
    )
    assert output_of(tmp_path) == f"{name}\n"
    assert process.wait(20) == 0


def test_other_systems_have_no_such_file(monkeypatch, tmp_path):
    missing = tmp_path / "nothing" / "comm"
    monkeypatch.setattr(naming, "_COMM", missing)
    naming.name_process("EngineCore")
    assert not missing.parent.exists()
    assert Path("/proc/self/comm").read_text() != "EngineCore\n"


def test_every_line_names_its_engine(child, capfd):
    process = child(
        """
        import logging
        from hardpoint.core.engine_process.run import log_as
        log_as(3, "INFO")
        log = logging.getLogger("hardpoint")
        log.info("two\\nlines of %s", "words")
        log.debug("not this")
        logging.getLogger("other").warning("also this")
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("it failed")
        """
    )
    assert process.wait(20) == 0
    label = f"[EngineCore 3, pid {process.pid}] "
    first, second, third, fourth, *trace = capfd.readouterr().err.splitlines()
    assert first == label + "INFO: two"
    assert second == label + "lines of words"
    assert third == label + "WARNING: also this"
    assert fourth == label + "ERROR: it failed"
    assert all(line.startswith(label) for line in trace)
    assert trace[-1] == label + "KeyError: 'x'"
