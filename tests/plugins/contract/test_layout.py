"""The layout of the contract: short import chains, and group packages that export their names."""

from __future__ import annotations

import ast
import importlib
import re
import warnings

import pytest
from support.import_graph import import_graph, longest_chain
from support.processes import ROOT

LONGEST = 6
"""Modules on the longest import chain of the contract, `hardpoint.plugins` included."""
FOLDER = ROOT / "plugins" / "contract"
GROUPS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
NOT_EXPORTED = {
    "server": {"HookSpecs"},  # the engine's; it imports the whole contract
    "process": {"to_device"},  # imports torch; `hardpoint.plugins.device` has it
}


def test_the_longest_import_chain_of_the_contract_is_short():
    chain = longest_chain(import_graph(FOLDER, "hardpoint.plugins"))
    assert len(chain) <= LONGEST, " > ".join(chain)


def test_a_chain_has_imports_for_type_checking_and_those_inside_functions(tmp_path):
    imports = {
        "__init__": "from . import top",
        "top": "from .group.first import A",
        "group/__init__": "from .first import A",
        "group/first": "if TYPE_CHECKING:\n    from .second import A",
        "group/second": "def load():\n    from package.bottom import A",
        "bottom": "import os",
    }
    for name, source in imports.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    assert longest_chain(import_graph(tmp_path, "package")) == [
        "package",
        "package.top",
        "package.group.first",
        "package.group.second",
        "package.bottom",
    ]


def test_each_module_of_a_cycle_counts():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"d"}}
    assert longest_chain(graph) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_exports_the_public_names_of_its_modules(group):
    package = importlib.import_module(f"hardpoint.plugins.{group}")
    modules = [
        importlib.import_module(f"{package.__name__}.{path.stem}")
        for path in (FOLDER / group).glob("*.py")
        if path.name != "__init__.py"
    ]
    names = {name for module in modules for name in getattr(module, "__all__", ())}
    assert names - NOT_EXPORTED.get(group, set()) <= set(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("group", GROUPS)
def test_the_docstring_of_a_group_is_one_sentence(group):
    text = importlib.import_module(f"hardpoint.plugins.{group}").__doc__
    assert text.endswith(".")
    assert "\n" not in text
    assert ". " not in text


def test_guides_templates_and_examples_import_no_moved_name():
    statement = re.compile(
        r"^[ ]*(from hardpoint\.plugins\S* import (?:\([^)]*\)|.+))$", re.MULTILINE
    )
    pages = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "builtin_plugins" / "scaffold" / "templates").rglob("*.txt"),
    ]
    statements = {
        source for page in pages for source in statement.findall(page.read_text(encoding="utf-8"))
    }
    assert len(statements) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for source in sorted(statements):
            exec(compile(ast.parse(source), source, "exec"), {})
