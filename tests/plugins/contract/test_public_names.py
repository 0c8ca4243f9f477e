"""Public names: built-ins and examples import only names that every author may import."""

import ast
import gc
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.processes import ROOT
from support.source_tree import modules

from hardpoint import plugins
from hardpoint.host.registry.kinds import KINDS

PUBLIC = (
    "hardpoint.plugins",
    "hardpoint.plugins.cache_memory",
    "hardpoint.plugins.commands",
    "hardpoint.plugins.component",
    "hardpoint.plugins.config",
    "hardpoint.plugins.config_tables",
    "hardpoint.plugins.device",
    "hardpoint.plugins.executor",
    "hardpoint.plugins.exponential_race",
    "hardpoint.plugins.grammars",
    "hardpoint.plugins.kv_cache",
    "hardpoint.plugins.kv_connector",
    "hardpoint.plugins.kv_store",
    "hardpoint.plugins.model",
    "hardpoint.plugins.output_parser",
    "hardpoint.plugins.parallel",
    "hardpoint.plugins.params",
    "hardpoint.plugins.process",
    "hardpoint.plugins.quantization",
    "hardpoint.plugins.request_options",
    "hardpoint.plugins.requests",
    "hardpoint.plugins.sampling",
    "hardpoint.plugins.scheduling",
    "hardpoint.plugins.server",
    "hardpoint.plugins.step_part",
    "hardpoint.plugins.worker_half",
    "hardpoint.plugins.structured",
    "hardpoint.plugins.text",
    "hardpoint.errors",
    "hardpoint.typed",
    "hardpoint.typed.describing",
    "hardpoint.toolkit.bitmasks",
    "hardpoint.toolkit.branches",
    "hardpoint.toolkit.curve_keys",
    "hardpoint.toolkit.delta_rule",
    "hardpoint.toolkit.encoder_cache",
    "hardpoint.toolkit.folders",
    "hardpoint.toolkit.half_floats",
    "hardpoint.toolkit.hf_config",
    "hardpoint.toolkit.http_heads",
    "hardpoint.toolkit.hub",
    "hardpoint.toolkit.images",
    "hardpoint.toolkit.kv_codes",
    "hardpoint.toolkit.layers",
    "hardpoint.toolkit.limited",
    "hardpoint.toolkit.logits_calls",
    "hardpoint.toolkit.parsing.completion_parser",
    "hardpoint.toolkit.parsing.events",
    "hardpoint.toolkit.parsing.format_parser",
    "hardpoint.toolkit.parsing.json_text",
    "hardpoint.toolkit.parsing.output_parsers",
    "hardpoint.toolkit.parsing.python_literals",
    "hardpoint.toolkit.processor",
    "hardpoint.toolkit.proof",
    "hardpoint.toolkit.ray_cluster",
    "hardpoint.toolkit.reloading",
    "hardpoint.toolkit.requests.item_reader",
    "hardpoint.toolkit.trace",
    "hardpoint.toolkit.updated_weights",
    "hardpoint.toolkit.workers.calls",
    "hardpoint.toolkit.workers.joining",
)
FOR_AUTHORS = ("hardpoint.plugins", "hardpoint.errors", "hardpoint.typed", "hardpoint.toolkit")
MOST_NAMES = 148
AUTHORS = [*(ROOT / "builtin_plugins").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
NOT_CALLERS = ("hardpoint.testing", "hardpoint.simulation", "hardpoint.replicas", "hardpoint.bench")
"""What does not count as use by the engine."""


@pytest.fixture(scope="module", autouse=True)
def no_collections():
    """Collect no garbage: syntax trees are many objects, and none of them is in a cycle."""
    gc.disable()
    yield
    gc.enable()


@cache
def taken(path: Path) -> frozenset[tuple[str, str]]:
    """Return module and name of a file's imports from the modules for authors."""
    return frozenset(_taken(path))


def _taken(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    annotating = for_annotations(tree)
    nodes = [node for node in ast.walk(tree) if node not in annotating]
    whole = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith(FOR_AUTHORS), f"{path}: {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module == "hardpoint":
            whole |= {a.asname or a.name for a in node.names if a.name == "plugins"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FOR_AUTHORS):
            yield from ((str(node.module), alias.name) for alias in node.names)
    for node in nodes if whole else ():
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in whole:
            yield "hardpoint.plugins", node.attr


def test_authors_take_public_names_only():
    not_public = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in AUTHORS
        for module, name in sorted(taken(path))
        if module not in PUBLIC or name not in importlib.import_module(module).__all__
    ]
    assert not_public == []


def for_annotations(tree: ast.Module) -> list[ast.ImportFrom]:
    """Return the imports that only type checkers execute."""
    return [
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    ]


def test_annotations_take_types_from_the_modules_that_define_them():
    """A type that a plugin names in annotations alone needs no public name."""
    annotations = [
        (node.module, alias.name, str(path.relative_to(ROOT)))
        for path in AUTHORS
        for node in for_annotations(ast.parse(path.read_text(encoding="utf-8")))
        if (node.module or "").startswith(FOR_AUTHORS)
        for alias in node.names
    ]
    assert len(annotations) > 30
    for module, name, path in annotations:
        source = importlib.import_module(module)
        is_public = module in PUBLIC and name in source.__all__
        assert is_public or name in defined(module), f"{path}: {module}.{name}"


@cache
def defined(module: str) -> set[str]:
    """Return the classes, functions and aliases that a module defines at its top level."""
    names = set[str]()
    for node in ast.parse(modules()[module].read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def test_built_ins_and_examples_are_looked_at():
    names = {name for path in AUTHORS for _, name in taken(path)}
    assert {"LogitsProcessor", "Scheduler", "SchedulingPolicy", "Command"} <= names


def test_the_list_stays_short_and_every_name_exists():
    assert len(plugins.__all__) == len(set(plugins.__all__)) <= MOST_NAMES
    assert all(hasattr(plugins, name) for name in plugins.__all__)


def test_every_interface_and_its_context_are_public():
    for kind in KINDS.values():
        for form in kind.forms or ([kind.interface] if kind.interface else []):
            assert form.__name__ in plugins.__all__
            contexts = (
                base.__annotations__["context"]
                for base in form.__mro__
                if "context" in vars(base).get("__annotations__", {})
            )
            if kind.name != "component_adapters":  # which are not built
                assert next(contexts) in plugins.__all__


def accessed(names: set[str]) -> set[str]:
    """Return which of these names are attributes that the engine reads."""
    attributes: set[str] = set()
    for path in (path for name, path in modules().items() if not name.startswith(NOT_CALLERS)):
        source = path.read_text(encoding="utf-8")
        if any(f".{name}" in source for name in names - attributes):
            nodes = ast.walk(ast.parse(source))
            attributes |= names & {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes


def test_every_abstract_member_is_used_by_the_engine():
    """Members that no code calls must not be required of an author."""
    members = {
        (form.__name__, member)
        for kind in KINDS.values()
        for form in kind.forms or ([kind.interface] if kind.interface else [])
        for member in form.__abstractmethods__
    }
    used = accessed({member for _, member in members})
    assert [f"{form}.{member}" for form, member in members if member not in used] == []


def test_rows_take_the_types_of_arguments_and_states_or_only_the_first():
    assert plugins.Rows[int] == plugins.Rows[int, Any]
    assert plugins.Rows[int, str] != plugins.Rows[int]
