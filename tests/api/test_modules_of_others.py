"""Modules that other distributions add to `hardpoint`."""

from __future__ import annotations

import importlib
import sys

import pytest

from hardpoint.cli import main


def test_a_folder_of_a_distribution_is_found_where_it_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "hardpoint" / "of_another"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 3\n")
    (package / "inner.py").write_text("from . import VALUE\n")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hardpoint.of_another")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert importlib.import_module("hardpoint.of_another.inner").VALUE == 3
    finally:
        for name in ("hardpoint.of_another.inner", "hardpoint.of_another"):
            sys.modules.pop(name, None)


def test_a_module_of_another_cannot_replace_one_of_ours(tmp_path, monkeypatch):
    package = tmp_path / "hardpoint" / "requests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hardpoint.requests", raising=False)
    assert importlib.import_module("hardpoint.requests").make_requests


def test_flags_of_vllm_need_the_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "hardpoint.vllm", None)
    monkeypatch.setitem(sys.modules, "hardpoint.vllm.serve", None)
    assert main(["serve", "--from-vllm", "smollm2 --port 1"]) == 2
    error = capsys.readouterr().err
    assert "--from-vllm: expected the package hardpoint-vllm to be installed" in error
