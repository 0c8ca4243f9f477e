"""An engine process that cannot start reports its error, once, and leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from support.plugins.faulty import Dense
from support.process.harness import (
    PATIENCE_S,
    assert_quick,
    holdings,
    nothing_left,
    process_config,
    wait_until,
)
from support.samples import Sample

from hardpoint import LLM, AsyncLLM, ConfigError, SamplingParams, plugins
from hardpoint.errors import EngineDeadError, PluginLoadError
from hardpoint.testing import scripted_config

FRESH = pytest.mark.fresh_process
"""What a start of the interpreter itself writes or lets happen; the other cases are forks."""

HERE = __name__


class Refuses(Sample, Dense, contract=1):
    """Cannot be made; its message has several lines."""

    def __init__(self, context):
        raise OSError("no such thing,\nnot even here")


class Exits(Sample, Dense, contract=1):
    def __init__(self, context):
        os._exit(23)


class Kills(Sample, Dense, contract=1):
    def __init__(self, context):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Sample, Dense, contract=1):
    class Options(plugins.Options):
        begun: str | None = None

    def __init__(self, context):
        if context.options.begun is not None:
            Path(context.options.begun).touch()
        time.sleep(120)


def enabled(scripted, name: str, **engine):
    enable = {"plugins": {"enable": [f"{HERE}:{name}"]}, "engine": engine}
    return process_config(scripted, enable)


@pytest.fixture(scope="module")
def used(scripted):
    """An engine has run, which makes the objects that a program keeps."""
    with LLM(config=process_config(scripted)) as llm:
        llm.generate("x", SamplingParams(max_tokens=1))


@pytest.fixture(autouse=True)
def clean(used):
    """Whatever fails, nothing remains of it."""
    before = holdings()
    yield
    nothing_left(before)


@pytest.mark.parametrize("face", [pytest.param(LLM, marks=[FRESH, pytest.mark.nightly]), AsyncLLM])
def test_the_real_error_comes_once_with_its_traceback(scripted, face, capfd):
    with pytest.raises(PluginLoadError, match=r"plugin 'refuses'.*OSError: no such") as error:
        face(config=enabled(scripted, "Refuses"))
    (note,) = error.value.__notes__
    assert note.startswith("In the engine process (pid ")
    assert note.count('raise OSError("no such thing,') == 1
    assert capfd.readouterr().err == ""  # the program that catches it need not see it


def test_a_configuration_that_fails_in_the_engine_names_its_origin_there_too(scripted):
    """The KV cache is sized in the engine, with messages that have the configuration's origin."""
    extra = {"kv_cache": {"num_blocks": 2, "block_size": 16}, "max_model_len": 500}
    messages = []
    for config in (scripted_config(scripted, extra), process_config(scripted, extra)):
        with pytest.raises(ConfigError, match=r"kv_cache.num_blocks|max_model_len") as error:
            LLM(config=config)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "(from argument" in messages[0]


@pytest.mark.parametrize(
    ("name", "messages"),
    [("Exits", "exited with code 23"), ("Kills", "was killed by signal 9 (SIGKILL)")],
)
def test_an_end_without_a_message_is_reported_by_its_code(scripted, name, messages):
    began = time.monotonic()
    with pytest.raises(EngineDeadError) as error:
        LLM(config=enabled(scripted, name))
    assert messages in str(error.value)
    assert_quick(f"{name} reported", time.monotonic() - began)


def test_a_start_that_hangs_ends_at_the_limit(scripted):
    began = time.monotonic()
    messages = r"not ready within 1 s \(engine.start_timeout_seconds\)"
    with pytest.raises(EngineDeadError, match=messages):
        LLM(config=enabled(scripted, "Hangs", start_timeout_seconds=1.0))
    assert_quick("hanging start given up", time.monotonic() - began)


@FRESH
def test_an_engine_killed_while_it_starts(scripted):
    others = psutil.Process().children()

    def kill():
        while not (new := [c for c in psutil.Process().children() if c not in others]):
            time.sleep(0.01)
        time.sleep(0.3)
        killed.append(time.monotonic())
        new[0].kill()

    killed: list[float] = []
    threading.Thread(target=kill).start()
    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        LLM(config=enabled(scripted, "Hangs"))
    assert_quick("killed start reported", time.monotonic() - killed[0])


def test_an_interrupted_start_ends_the_process(scripted, tmp_path):
    """Ctrl-C while the engine starts."""
    begun = tmp_path / "begun"

    def interrupt():
        wait_until(begun.exists, PATIENCE_S, "the start")
        os.kill(os.getpid(), signal.SIGINT)

    config = enabled(scripted, "Hangs") | {"plugin": {"hangs": {"begun": str(begun)}}}
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        LLM(config=config)
