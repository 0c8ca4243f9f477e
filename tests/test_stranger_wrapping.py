"""An executor from outside that wraps the built-in one: built, installed and used, by its tests."""

from __future__ import annotations

import shutil
import sys

import pytest
from support.processes import ROOT, run


@pytest.mark.nightly
def test_its_own_tests_pass(acme_wrapping, tmp_path):
    shutil.copytree(ROOT / "examples" / "acme_wrapping" / "tests", tmp_path / "tests")
    pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
    assert "passed" in run(*pytest_run, path=acme_wrapping, cwd=tmp_path, examples=0.1)
