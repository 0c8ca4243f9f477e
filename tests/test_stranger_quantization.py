"""Quantisation schemes from outside: built, installed, named; models load matrices by them."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run
from support.strangers import RESOLVE


@pytest.mark.nightly
def test_its_own_tests_pass(acme_quantization, tmp_path):
    """They open engines, one of them with ranks that share the model."""
    shutil.copytree(ROOT / "examples" / "acme_quantization" / "tests", tmp_path / "tests")
    pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
    assert "passed" in run(*pytest_run, path=acme_quantization, cwd=tmp_path, examples=0.1)


def test_installed_is_not_enabled(acme_quantization, tmp_path):
    done = run(sys.executable, "-c", RESOLVE, "{}", path=acme_quantization, cwd=tmp_path)
    result = json.loads(done)
    assert {label.split(" ")[0] for label in result["not_enabled"]} == {
        "quantizations/nf4",
        "quantizations/ternary",
    }
    assert result["imported"] == []
