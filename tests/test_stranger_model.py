"""A model family from outside: architecture, file format and tokenizer of an installed package."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.processes import ROOT, run
from support.strangers import RESOLVE


@pytest.mark.nightly
def test_its_own_tests_pass(acme_gpt, tmp_path):
    """They open engines in both process modes, with preemption."""
    shutil.copytree(ROOT / "examples" / "acme_gpt" / "tests", tmp_path / "tests")
    pytest_run = (sys.executable, "-m", "pytest", "-q", "tests")
    assert "passed" in run(*pytest_run, path=acme_gpt, cwd=tmp_path, examples=0.1)


def test_installed_is_not_enabled(acme_gpt, tmp_path):
    done = run(sys.executable, "-c", RESOLVE, "{}", path=acme_gpt, cwd=tmp_path)
    result = json.loads(done)
    assert {label.split(" ")[0] for label in result["not_enabled"]} == {
        "models/TinyGPT",
        "loaders/tiny_gpt_file",
        "tokenizers/byte_text",
    }
    assert result["imported"] == []
