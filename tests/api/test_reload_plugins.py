"""Plugins are replaced when their files are saved; after an error the earlier version stays."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from hardpoint import LLM, AsyncLLM, EngineClosedError, SamplingParams
from hardpoint.calls.reloading import LoopChanges
from hardpoint.cli import main
from hardpoint.errors import BusyError, ConfigError, install_command
from hardpoint.testing import scripted_config
from hardpoint.toolkit.reloading import PluginReloader, reloader
from hardpoint.toolkit.reloading.copies import CopiedPackages
from hardpoint.typed import toml_text

pytest.importorskip("watchfiles")

PROCESSOR = """
from hardpoint import plugins
from hardpoint.plugins import Edits, Op, Phase, SparseLogitsProcessor, hookimpl
{imports}

class Forced(SparseLogitsProcessor):
    contract = 1
    phase = Phase.FORCE

    class Arguments(plugins.Arguments):
        pass

    def edits(self, rows):
        return Edits(range(len(rows)), [{token}] * len(rows), op=Op.KEEP_ONLY)
"""
HOOKS = """
from hardpoint.plugins import hookimpl
{imports}

class Counts:
    contract = 1

    def __init__(self, context):
        pass

    @hookimpl
    def request_received(self, request):
        pass
"""
GREEDY = {"temperature": 0, "ignore_eos": True}
WAIT_SECONDS = 60.0
_numbers = itertools.count()


def processor(token, imports=""):
    return PROCESSOR.format(token=token, imports=imports)


class Package:
    """A package with a processor that forces the token 40."""

    def __init__(self, folder):
        self.name = f"reloadable{next(_numbers)}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.save("__init__", "")
        self.save("token", "TOKEN = 40\n")
        self.save("other", "NUMBER = 1\n")
        self.save("forced", processor("token.TOKEN", f"from {self.name} import token"))
        self.save("counts", HOOKS.format(imports="from . import other"))
        importlib.invalidate_caches()

    def save(self, module, text):
        (self.folder / f"{module}.py").write_text(text)

    def use(self, module, attribute):
        return {"use": f"{self.name}.{module}:{attribute}", "name": module}


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return Package(tmp_path)


@pytest.fixture
def open_llm(package, scripted):
    def open_llm(*uses, in_process=True, **options):
        enabled = [package.use("forced", "Forced"), *uses]
        config = {"plugins": {"enable": enabled}, "engine": {"in_process": in_process}}
        return LLM(config=scripted_config(scripted, config), **options)

    return open_llm


def forced(llm, max_tokens=1):
    params = SamplingParams(max_tokens=max_tokens, plugin_args={"forced": {}}, **GREEDY)
    return llm.generate("say", params)[0].outputs[0].token_ids


class Reloads:
    """A reloader that a test calls, with its messages."""

    def __init__(self, llm, copies, replace=None):
        self.messages = []
        change = llm.plugins.change

        def replace_all(uses, origin):
            return change(replace=dict(uses), origin=origin)

        self.reloader = PluginReloader(
            copies, lambda: llm.plugins.manifest, replace or replace_all, self.messages.append
        )

    def message(self):
        """Reload, and return the message; None without one."""
        before = len(self.messages)
        self.reloader.reload()
        return self.messages[before] if len(self.messages) > before else None


@pytest.fixture
def copies():
    copies = CopiedPackages()
    yield copies
    copies.close()


@pytest.mark.parametrize("in_process", [True, False])
def test_a_saved_module_replaces_the_plugins_that_import_it(package, open_llm, copies, in_process):
    with open_llm(package.use("counts", "Counts"), in_process=in_process) as llm:
        reloads = Reloads(llm, copies)
        assert (forced(llm), reloads.message()) == ([40], None)
        package.save("token", "TOKEN = 41\n")
        assert reloads.message().startswith("reloaded forced from ")
        assert forced(llm) == [41]
        package.save("token", "TOKEN = 42\n")
        assert reloads.message().startswith("reloaded forced from ")
        assert forced(llm) == [42]
        assert llm.plugins.manifest.generation == 3
        assert reloads.message() is None  # nothing was saved since


BROKEN = {
    "a syntax error": ("forced", "class Forced(", "was never closed"),
    "half a file": ("forced", processor(41)[:200], "Forced"),
    "no UTF-8": ("forced", "é", "utf-8"),
    "an error at import": ("forced", "1 / 0\n" + processor(41), "ZeroDivisionError"),
    "another contract": ("forced", processor(41).replace("= 1", "= 99"), "version 99"),
    "an error in the constructor": (
        "forced",
        processor(41) + "\n    def __init__(self, context):\n        raise ValueError('wrong')\n",
        "wrong",
    ),
    "a failing module below it": ("token", "TOKEN = undefined\n", "undefined"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_after_an_error_the_earlier_version_stays(package, open_llm, copies, name):
    module, text, message = BROKEN[name]
    with open_llm() as llm:
        reloads = Reloads(llm, copies)
        encoding = "latin-1" if name == "no UTF-8" else "utf-8"
        (package.folder / f"{module}.py").write_bytes(text.encode(encoding))
        shown = reloads.message()
        assert f"reload of {package.name} failed, the earlier version stays: " in shown
        assert message in shown
        assert (forced(llm), llm.plugins.manifest.generation) == ([40], 1)
        package.save("token", "TOKEN = 43\n")
        package.save("forced", processor("token.TOKEN", "from . import token"))
        assert reloads.message().startswith("reloaded forced from ")
        assert forced(llm) == [43]


def test_a_plugin_that_cannot_change_live_is_reported(package, open_llm, copies):
    with open_llm(package.use("counts", "Counts")) as llm:
        reloads = Reloads(llm, copies)
        package.save("other", "NUMBER = 2\n")
        assert "components of kind hooks cannot be changed" in reloads.message()
        package.save("token", "TOKEN = 41\n")  # another plugin of the package
        reloads.reloader.reload()
        assert "components of kind hooks cannot be changed" in reloads.messages[1]
        assert reloads.messages[2].startswith("reloaded forced from ")
        assert forced(llm) == [41]


def test_a_deleted_module_is_an_error_until_it_is_back(package, open_llm, copies):
    with open_llm() as llm:
        reloads = Reloads(llm, copies)
        (package.folder / "token.py").unlink()
        assert "failed" in reloads.message()
        assert forced(llm) == [40]
        package.save("token", "TOKEN = 44\n")
        assert reloads.message().startswith("reloaded")
        assert forced(llm) == [44]


@pytest.mark.parametrize("text", ["", "TOKEN = 4", None])
def test_a_file_that_is_being_written_is_waited_for(package, copies, open_llm, monkeypatch, text):
    def sleep(_):
        package.save("token", "TOKEN = 41\n")  # the editor goes on

    with open_llm() as llm:
        reloads = Reloads(llm, copies)
        package.save("token", text or "")
        if text is None:
            (package.folder / "token.py").unlink()
        with monkeypatch.context() as patched:
            patched.setattr(reloader, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
            assert reloads.message().startswith("reloaded forced from ")
        assert forced(llm) == [41]
        assert len(reloads.messages) == 1


def test_a_file_that_stays_empty_is_an_empty_module(package, open_llm, copies):
    with open_llm() as llm:
        reloads = Reloads(llm, copies)
        package.save("forced", "")
        assert "failed, the earlier version stays: " in reloads.message()
        assert forced(llm) == [40]


def test_a_module_that_no_plugin_imports_changes_nothing(package, open_llm, copies):
    with open_llm() as llm:
        reloads = Reloads(llm, copies)
        package.save("other", "NUMBER = 2\n")
        assert reloads.message() is None
        assert llm.plugins.manifest.generation == 1


def test_a_reload_waits_for_another_change(package, open_llm, copies):
    calls = []

    def busy_twice(uses, origin):
        calls.append(uses)
        if len(calls) < 3:
            raise BusyError("another live change is under way")

    with open_llm() as llm:
        reloads = Reloads(llm, copies, busy_twice)
        package.save("token", "TOKEN = 41\n")
        assert reloads.message().startswith("reloaded forced")
    (uses,) = {tuple(uses.items()) for uses in calls}
    assert uses == (("logits_processors/forced", f"{package.name}__reload_1.forced:Forced"),)


def test_without_watchfiles_nothing_opens(open_llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    before = list(sys.path)
    with pytest.raises(ConfigError, match=re.escape(install_command("reload"))):
        open_llm(reload_plugins=True)
    assert sys.path == before


def test_an_engine_that_does_not_open_leaves_no_folder(scripted):
    before = list(sys.path)
    with pytest.raises(ConfigError):
        LLM(config=scripted_config(scripted, {"max_model_len": -1}), reload_plugins=True)
    assert sys.path == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        ("--workers", "2"): "--reload-plugins: expected one worker (server.workers), got 2",
        ("--on", "ray"): "--reload-plugins: expected a server without --on ray",
    }.items(),
)
def test_servers_with_several_frontends_are_rejected(scripted, capsys, arguments, message):
    assert main(["serve", str(scripted), "--reload-plugins", *arguments]) == 2
    assert message in capsys.readouterr().err


def wait_until(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_llm_watches_files_while_requests_run(package, open_llm):
    with open_llm(reload_plugins=True) as llm:
        params = SamplingParams(max_tokens=400, plugin_args={"forced": {}}, **GREEDY)
        outputs = llm.stream("say", params)
        next(outputs)
        package.save("token", "TOKEN = 41\n")
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert set(tokens) == {40}  # it was admitted with the earlier version
        wait_until(lambda: llm.plugins.manifest.generation == 2)
        assert forced(llm) == [41]
        folders = [path for path in sys.path if "hardpoint-reload-" in path]
        assert len(folders) == 1
    assert not [path for path in sys.path if "hardpoint-reload-" in path]
    assert "hardpoint-reload" not in {thread.name for thread in threading.enumerate()}


def open_async(package, scripted, **options):
    config = {"plugins": {"enable": [package.use("forced", "Forced")]}}
    return AsyncLLM(config=scripted_config(scripted, config), **options)


async def forced_token(llm):
    params = SamplingParams(max_tokens=1, plugin_args={"forced": {}}, **GREEDY)
    return [output async for output in llm.generate("say", params)][-1].outputs[0].token_ids


def test_an_async_llm_watches_files(package, scripted):
    async def run():
        async with open_async(package, scripted, reload_plugins=True) as llm:
            assert await forced_token(llm) == [40]
            package.save("token", "TOKEN = 41\n")
            deadline = time.monotonic() + WAIT_SECONDS
            while llm.plugins.manifest.generation == 1:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert await forced_token(llm) == [41]

    asyncio.run(run())
    assert not [path for path in sys.path if "hardpoint-reload-" in path]
    assert "hardpoint-reload" not in {thread.name for thread in threading.enumerate()}


def test_an_async_llm_that_is_closed_before_its_first_use_ends_the_watch(package, scripted):
    llm = open_async(package, scripted, reload_plugins=True)
    package.save("token", "TOKEN = 41\n")
    wait_until(lambda: any(t.name == "hardpoint-reload" for t in threading.enumerate()))
    llm.close()
    assert "hardpoint-reload" not in {thread.name for thread in threading.enumerate()}


def test_a_change_is_refused_by_a_closed_loop():
    loop = asyncio.new_event_loop()
    loop.close()
    changes = LoopChanges(lambda: loop, pytest.fail)
    with pytest.raises(EngineClosedError, match="the event loop of the engine was closed"):
        changes.replace({}, "a test")


def test_the_end_of_the_watch_ends_a_change():
    started = threading.Event()

    async def change(**_):
        started.set()
        await asyncio.sleep(3600)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    changes = LoopChanges(lambda: loop, change)
    errors = []

    def replace():
        try:
            changes.replace({}, "a test")
        except EngineClosedError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=replace)
    waiting.start()
    assert started.wait(WAIT_SECONDS)
    changes.end()
    waiting.join(WAIT_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_SECONDS)
    for task in asyncio.all_tasks(loop):  # is cancelled
        loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    assert errors == ["the engine was closed"]


@pytest.fixture
def server(package, scripted, tmp_path):
    config = scripted_config(scripted, {"server": {"port": 0}})
    config["plugins"]["enable"].append(package.use("forced", "Forced"))
    file = tmp_path / "hardpoint.toml"
    tables = (f"{name} = {toml_text(value)}" for name, value in config.items())
    file.write_text("\n".join(tables))
    command = [sys.executable, "-m", "hardpoint", "serve", "--config", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--reload-plugins"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    yield process, lines, reader
    process.send_signal(signal.SIGTERM)
    process.wait(WAIT_SECONDS)


@pytest.mark.nightly
def test_a_server_watches_files(package, server):
    process, lines, reader = server
    reader.start()
    wait_until(lambda: process.poll() is not None or any(" at http://" in line for line in lines))
    url = next(line for line in lines if " at http://" in line).split()[-1]
    body = {"prompt": "say", "max_tokens": 1, "plugin_args": {"forced": {}}, **GREEDY}

    def text():
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_SECONDS)
        return answer.json()["choices"][0]["text"]

    before = text()
    package.save("token", "TOKEN = 41\n")
    wait_until(lambda: any("reloaded forced" in line for line in lines))
    assert text() == chr(ord(before) + 1)
    package.save("token", "TOKEN = (\n")
    wait_until(lambda: any("the earlier version stays" in line for line in lines))
    assert text() == chr(ord(before) + 1)
