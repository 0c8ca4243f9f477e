"""Builds from an empty folder each time; everything else is in pyproject.toml.

setuptools reuses `build/`, and packs all that it finds there: also modules that an older version of
the source had.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    """Builds in a temporary folder, unless the caller names one (`--build-base`)."""

    def initialize_options(self) -> None:
        """Start with an empty folder."""
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="hardpoint-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


setup(cmdclass={"build": CleanBuild})
