"""The ceilings that scripts/sizes checks."""

import importlib
import json
import tomllib

import pytest
from support.processes import ROOT


@pytest.fixture
def sizes(monkeypatch):
    """The module of the script."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("sizes")


@pytest.fixture
def files(sizes, monkeypatch, tmp_path):
    """A function that writes a file of another tree, of which the script reads sizes."""
    for name in ("sources", "tree", "long_files", "long_functions"):
        getattr(sizes, name).cache_clear()
    monkeypatch.setattr(sizes, "ROOT", tmp_path)

    def write(path, lines):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("\n".join(lines) + "\n")

    yield write
    for name in ("sources", "tree", "long_files", "long_functions"):
        getattr(sizes, name).cache_clear()


def test_lines_of_core_count_with_those_of_host_and_alone(sizes, files):
    files("core/build.py", ["x = 1"] * 3)
    files("core/engine/step.py", ["x = 1"] * 4)
    files("host/live/change.py", ["x = 1"] * 5)
    values = {row.key: row.value for row in sizes.measured({})}
    assert (values["engine-lines"], values["core-lines"]) == (12, 7)


def test_a_name_in_several_modules_of_the_contract_counts_once(sizes, files):
    files("plugins/contract/__init__.py", ['__all__ = ["A", "B"]'])
    files("plugins/contract/model/model.py", ['__all__ = ["A", "C"]'])
    assert {row.key: row.value for row in sizes.measured({})}["contract-names"] == 3


def test_each_value_has_a_ceiling_and_each_ceiling_a_value(sizes, files, monkeypatch):
    walk = {"outside_files": 3, "calls": 20, "dearest": [["a.py: f", 2]], "kernels": "torch"}
    found = json.dumps(walk)
    monkeypatch.setattr(
        sizes.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": found})
    )
    rows = [*sizes.measured({}), *sizes.walked()]
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hardpoint"]["sizes"]
    assert {row.key for row in rows} == table.keys() - {"exceptions"}
    values = {row.key: row.value for row in rows}
    assert (values["walk-files"], values["walk-calls"]) == (3, 20)
    assert {row.key: row.parts for row in rows}["walk-files"] == ["torch"]  # they differ by these
