"""Wheels of the example packages, built and installed as a user would, all of them at once.

Each package is installed into a folder of its own: tests put one in front of what is installed, and
must not find the others.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .once import once
from .processes import ROOT, run

_BUILD = Path(__file__).with_name("process") / "build_wheels.py"
_IGNORED = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")


def package_fixture(package: str) -> Callable[..., Path]:
    """Return a fixture: the folder in which the wheel of an example package is installed.

    Args:
        package: folder in examples/.
    """

    @pytest.fixture(scope="session")
    def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder in which the wheel of the example package is installed."""
        return once(tmp_path_factory, "examples", install_packages) / package

    return installed


def install_packages(work: Path) -> None:
    """Build the wheels of all example packages; install each into a folder named after it."""
    packages = [path.parent.name for path in sorted(ROOT.glob("examples/*/pyproject.toml"))]
    for package in packages:
        shutil.copytree(ROOT / "examples" / package, work / "sources" / package, ignore=_IGNORED)
    run(sys.executable, str(_BUILD), *packages, cwd=work / "sources")
    wheels = [str(wheel) for wheel in sorted((work / "sources").glob("*.whl"))]
    assert len(wheels) == len(packages)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
    run(*pip, "--no-deps", "--target", str(work / "all"), *wheels, cwd=work)
    for distribution in importlib.metadata.distributions(path=[str(work / "all")]):
        folder = work / distribution.name.replace("-", "_")
        for file in distribution.files or ():
            (folder / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy2(distribution.locate_file(file), folder / file)
