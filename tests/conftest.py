from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import support.searching  # noqa: F401 - registers the profiles
from hypothesis import settings
from support.once import once
from support.plugins.fake import Installed
from support.process.fork_server import STARTS
from support.processes import ROOT, run

from hardpoint.testing import write_scripted_model

# Triton's kernels are interpreted where there is no GPU, unless the environment has another value;
# it is read when they are imported. The files are NVIDIA's, AMD's, and Windows' for Linux.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell has what it starts in the background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run what takes long, too")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Never the user's own caches; the workers of a run share this one.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hardpoint-tests-")
    settings.load_profile("nightly" if config.getoption("all") else "ci")
    STARTS.install()


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all"):
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="takes long: scripts/test --all runs it"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    STARTS.forks = item.get_closest_marker("fresh_process") is None


@pytest.fixture(scope="session")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_sampling is installed."""
    return once(tmp_path_factory, "acme_sampling", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_scheduling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_scheduling is installed."""
    return once(tmp_path_factory, "acme_scheduling", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_caching(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_caching is installed."""
    return once(tmp_path_factory, "acme_caching", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_executors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_executors is installed."""
    return once(tmp_path_factory, "acme_executors", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_gpt is installed."""
    return once(tmp_path_factory, "acme_gpt", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_kv_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_kv_stores is installed."""
    return once(tmp_path_factory, "acme_kv_stores", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_quantization(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_quantization is installed."""
    return once(tmp_path_factory, "acme_quantization", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_attention is installed."""
    return once(tmp_path_factory, "acme_attention", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_wrapping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_wrapping is installed."""
    return once(tmp_path_factory, "acme_wrapping", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_kv_connector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_kv_connector is installed."""
    return once(tmp_path_factory, "acme_kv_connector", install_wheel) / "site"


@pytest.fixture(scope="session")
def acme_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_server is installed."""
    return once(tmp_path_factory, "acme_server", install_wheel) / "site"


def install_wheel(work: Path) -> None:
    """Build the wheel of the example that `work` is named after; install it into `work/site`."""
    source = work / "source"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "examples" / work.name, source, ignore=ignored)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source), cwd=work)
    (wheel,) = (source / "dist").glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
    run(*pip, "--no-deps", "--target", str(work / "site"), str(wheel), cwd=work)


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
