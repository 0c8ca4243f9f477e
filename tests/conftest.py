from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import inspect
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checked_builtins import check_builtins_once
from support.durations import Durations
from support.example_packages import package_fixture
from support.installed_metadata import read_metadata_once
from support.plugins.fake import Installed
from support.process.fork_server import STARTS
from support.searching import choose_profile
from support.selection import Selection
from support.stress import Stress

from hardpoint import LLM
from hardpoint.testing import scripted_config, scripted_engine, write_scripted_model

# Triton's kernels are interpreted where there is no GPU, unless the environment has another value;
# it is read when they are imported. The files are NVIDIA's, AMD's, and Windows' for Linux.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Every test runs with one thread, as in scripts/test: of several, sums of floating-point numbers
# have another order, and tests that run beside each other take each other's processors.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # of child processes
    torch.set_num_threads(1)

# Not below this folder, which tests read: hypothesis makes and removes files there meanwhile.
os.environ.setdefault(
    "HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).resolve().parents[1] / ".hypothesis")
)

# A shell has what it starts in the background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


YOUNG_OBJECTS = 10_000
"""As many are made between two collections of garbage; Python's own number is 700. Starts of
engines, which make many that live long, take a tenth less."""
MANY_MODULES = 50
"""Imports after which the objects of modules are left out of garbage collections."""


class GarbageCollection:
    """Keeps collections of garbage short.

    They pass over what lives as long as this process, such as modules: a collection of a million
    objects takes half a second, and some tests collect often.
    """

    def __init__(self) -> None:
        self._num_modules = 0

    def pytest_collection(self) -> None:
        """Collect no garbage while tests are found: there is next to none."""
        gc.disable()

    def pytest_collection_finish(self) -> None:
        gc.enable()
        self._freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Freeze the objects of new imports after a file of tests, once there are many."""
        if nextitem is None or nextitem.path == item.path:
            return
        if len(sys.modules) >= self._num_modules + MANY_MODULES:
            self._freeze()

    def _freeze(self) -> None:
        self._num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


class HangWatch:
    """Ends the process with the stacks of all threads if no test begins for long.

    The timer of pytest itself starts a thread for each test, which takes 3 % of a run.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._stderr = seconds, os.dup(2)
        self._begun = -math.inf

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if (now := time.monotonic()) >= self._begun + 10:
            self._begun = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stderr)

    def pytest_sessionfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class NamesOfFailures:
    """Prints the name of a test at once when it fails: a run that is cut has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reporter = self._config.pluginmanager.getplugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"FAILED {report.nodeid} ({report.when})")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked nightly, too")
    parser.addoption("--timing", action="store_true", help="run the tests marked timing alone")
    parser.addoption("--shuffle", metavar="SEED", help="run the files in a random order")
    parser.addoption("--stress", type=int, metavar="SEED", help="delay threads, reads and starts")
    parser.addoption("--durations-file", type=Path, help="write the seconds of each test there")
    parser.addini("hang_seconds", "after as many without a new test, the run ends", type="int")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Never the user's own caches; the workers of a run share this one.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hardpoint-tests-")
        if path := config.getoption("durations_file"):
            config.pluginmanager.register(Durations(path))
            config.pluginmanager.register(NamesOfFailures(config))
    # What other programs make does not look as if a test had left it behind. The last folders of
    # pytest itself stay.
    shared = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="hp-", dir=shared)
    gc.set_threshold(YOUNG_OBJECTS)
    choose_profile(long=config.getoption("all"))
    config.pluginmanager.register(Selection(config))
    config.pluginmanager.register(GarbageCollection())
    config.pluginmanager.register(HangWatch(config.getini("hang_seconds")))
    STARTS.install()
    read_metadata_once()
    check_builtins_once()
    if (seed := config.getoption("stress")) is not None:
        config.pluginmanager.register(Stress(seed))


def pytest_unconfigure() -> None:
    # Later than multiprocessing removes a folder in it, at priority -100.
    Finalize(None, shutil.rmtree, (os.environ["TMPDIR"], True), exitpriority=-200)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    STARTS.forks = item.get_closest_marker("fresh_process") is None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function: by its fixture `run`, or in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    coroutine = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if (run := pyfuncitem.funcargs.get("run")) is None:
        asyncio.run(coroutine)
    else:
        run(lambda _: coroutine)
    return True


# Folders in which the wheels of the packages in examples/ are installed.
acme = package_fixture("acme_sampling")
acme_affinity = package_fixture("acme_affinity")
acme_attention = package_fixture("acme_attention")
acme_beams = package_fixture("acme_beams")
acme_guidance = package_fixture("acme_guidance")
acme_caching = package_fixture("acme_caching")
acme_choice_grammar = package_fixture("acme_choice_grammar")
acme_communicators = package_fixture("acme_communicators")
acme_corpus = package_fixture("acme_corpus")
acme_early_exit = package_fixture("acme_early_exit")
acme_executors = package_fixture("acme_executors")
acme_gpt = package_fixture("acme_gpt")
acme_kv_connector = package_fixture("acme_kv_connector")
acme_kv_eviction = package_fixture("acme_kv_eviction")
acme_kv_stores = package_fixture("acme_kv_stores")
acme_observing = package_fixture("acme_observing")
acme_ops = package_fixture("acme_ops")
acme_parsing = package_fixture("acme_parsing")
acme_quantization = package_fixture("acme_quantization")
acme_ring = package_fixture("acme_ring")
acme_scheduling = package_fixture("acme_scheduling")
acme_server = package_fixture("acme_server")
acme_spans = package_fixture("acme_spans")
acme_taps = package_fixture("acme_taps")
acme_watermark = package_fixture("acme_watermark")
acme_tenant_budget = package_fixture("acme_tenant_budget")
acme_tiny_scheduler = package_fixture("acme_tiny_scheduler")
acme_wrapping = package_fixture("acme_wrapping")
hardpoint_ollama = package_fixture("hardpoint_ollama")
hardpoint_vllm = package_fixture("hardpoint_vllm")
hardpoint_wasm = package_fixture("hardpoint_wasm")
hardpoint_xgrammar = package_fixture("hardpoint_xgrammar")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the scripted model, with a few fixed replies."""
    return write_scripted_model(
        tmp_path_factory.mktemp("scripted"),
        {
            "say abc": " abc abc abc",
            "emoji": "go 😀 on",
            "long": "0123456789" * 8,
            "user: hi\nassistant: ": "hello",
            "user: words\nplease\nassistant: ": "the quick brown fox jumps over the lazy dog",
        },
    )


@pytest.fixture
def open_engine(scripted: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens an engine on the scripted model; the engine closes after the test."""
    with contextlib.ExitStack() as stack:

        def opened(*args: Any, **kwargs: Any) -> Any:
            engine = scripted_engine(scripted, *args, **kwargs)
            return stack.enter_context(contextlib.closing(engine))

        yield opened


@pytest.fixture(scope="module")
def llm(scripted: Path) -> Iterator[LLM]:
    """An LLM of the scripted model, for the tests of a module."""
    with LLM(config=scripted_config(scripted)) as llm:
        yield llm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment without configuration."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in list(os.environ):
        if name.startswith("HARDPOINT__"):
            monkeypatch.delenv(name)
    return tmp_path / "here"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Stand-ins for the built-in plugins; a test adds its own."""
    return Installed(monkeypatch)
