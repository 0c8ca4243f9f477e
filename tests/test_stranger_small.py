"""Small packages from outside, of a kind or two each: built, installed and used by their tests."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec

import pytest
from support.processes import ROOT, run

PACKAGES = {
    "acme_affinity": 0.1,
    "acme_beams": 0.1,
    "acme_choice_grammar": 0.1,
    "acme_communicators": 0.1,
    "acme_corpus": 0.1,
    "acme_early_exit": 0.1,
    "acme_guidance": 0.1,
    "acme_kv_eviction": 0.1,
    "acme_observing": 0.1,
    "acme_ops": 0.03,
    "acme_parsing": 0.1,
    "acme_ring": 0.1,
    "acme_spans": 0.1,
    "acme_taps": 0.2,
    "acme_tiny_scheduler": 0.02,
    "acme_watermark": 0.1,
    "hardpoint_ollama": 0.1,
    "hardpoint_vllm": 0.05,
    "hardpoint_wasm": 0.05,
    "hardpoint_xgrammar": 0.1,
}
"""By package: the share of what conformance suites try otherwise."""
IN_EACH_RUN = ("acme_affinity",)


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(package, marks=[] if package in IN_EACH_RUN else pytest.mark.nightly)
        for package in PACKAGES
    ],
)
def test_its_own_tests_pass(request, package, tmp_path):
    site = request.getfixturevalue(package)
    shutil.copytree(ROOT / "examples" / package / "tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "tests"]
    printed = run(*command, path=site, cwd=tmp_path, examples=PACKAGES[package])
    assert "passed" in printed
    if package == "hardpoint_xgrammar":
        assert find_spec("xgrammar") is not None, "scripts/test --all installs it"


def test_every_package_is_listed_with_its_kind():
    listed = (ROOT / "docs" / "README.md").read_text()
    for package in PACKAGES:
        assert f"../examples/{package})" in listed
