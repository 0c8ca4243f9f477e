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
IN_EACH_RUN = ("acme_affinity", "acme_taps", "acme_watermark", "hardpoint_vllm")
SHORT = (
    "not test_resources and not test_memory and not test_the_suite_names_what_is_wrong"
    " and not (V0Class or V0Callable or V1Invariant or V1WithState or V2History or class_of_main)"
    " and not test_a_snippet_runs and not test_outputs_come_to_the_tasks"
)
"""Selects the tests of the packages for the default run: one class of each generation of vLLM's
interface, no check of memory, no programs of vLLM's users, and no program of its own."""


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
    if not request.config.getoption("all"):
        command += ["-k", SHORT]
    printed = run(*command, path=site, cwd=tmp_path, examples=PACKAGES[package])
    assert "passed" in printed
    if package == "hardpoint_xgrammar" and request.config.getoption("all"):
        assert find_spec("xgrammar") is not None, "scripts/test --all installs it"


def test_every_package_is_listed_with_its_kind():
    listed = (ROOT / "docs" / "README.md").read_text()
    for package in PACKAGES:
        assert f"../examples/{package})" in listed
