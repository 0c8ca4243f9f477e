from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.plugins.fake import Installed
from support.process.fork_server import STARTS
from support.processes import ROOT, run

from hardpoint.testing import write_scripted_model

# A machine that others use too may be slow at any moment; that is no finding.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell has what it starts in the background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    STARTS.install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    STARTS.forks = item.get_closest_marker("fresh_process") is None


@pytest.fixture(scope="session")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_sampling is installed."""
    return install_wheel("acme_sampling", tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session")
def acme_scheduling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of examples/acme_scheduling is installed."""
    return install_wheel("acme_scheduling", tmp_path_factory.mktemp("stranger"))


def install_wheel(example: str, work: Path) -> Path:
    """Build the wheel of an example package and install it as pip does; return the folder."""
    source = work / "source"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "examples" / example, source, ignore=ignored)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source), cwd=work)
    (wheel,) = (source / "dist").glob("*.whl")
    target = work / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
    run(*pip, "--no-deps", "--target", str(target), str(wheel), cwd=work)
    return target


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
