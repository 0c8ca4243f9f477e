"""The rules that keep the source in order: folders, modules, unused code.

Layers and import cycles are import-linter's (`.importlinter`), sizes of functions are ruff's, words
are those of scripts/vocabulary.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import vulture
from support.processes import ROOT
from support.source_tree import (
    PACKAGE,
    defining_module,
    imported_names,
    importers,
    is_package,
    modules,
    nodes,
    tree,
    without_collections,
)

MOST_FILES = 16
"""Python files beside `__init__` in a folder of the package."""
MOST_FILES_IN_CORE = 5
"""Python files beside `__init__` in core/ itself."""
SMALL = 100
"""Lines below which a module that only one other imports belongs into that one."""

SMALL_MODULES = {
    "hardpoint.host.registry.backends": "the choice by device, apart from the loaded set",
    "hardpoint.testing.running.step_parts.groups": "one rule of a suite, as its siblings",
    "hardpoint.toolkit.batches.table_columns": "arrays of rows, beside the batch of requests",
    "hardpoint.builtin_plugins.batch_routes.answer_files": "files of answers, beside a batch's run",
    "hardpoint.builtin_plugins.commands.setup.template": "a generated file, beside the command",
    "hardpoint.process.start_budget": "a watch in a thread, beside the construction of engines",
    "hardpoint.calls.forks": "open requests by id, beside the requests that run",
    "hardpoint.toolkit.reloading.import_graph": "an algorithm, beside the copies of packages",
    "hardpoint.calls.sessions": "the answer of one control call, for both kinds of programs",
    "hardpoint.host.live.policy": "the live changes of one kind, as its siblings",
    "hardpoint.testing.general.inputs": "a comparison of values, beside the rules that use it",
    "hardpoint.testing.model.checkpoints.config_fields": "one of three groups of rules",
    "hardpoint.testing.model.checkpoints.content_hash": "one of three groups of rules",
    "hardpoint.testing.running.step_parts.verifying": "the steps of one hook; one rule checks it",
    "hardpoint.testing.running.step_parts.draft_rows": "one rule of a suite, as its siblings",
    "hardpoint.builtin_plugins.commands.records.served_trace": "HTTP; the command opens an engine",
    "hardpoint.replicas.waves.coordinator": "an algorithm with tests of its own",
    "hardpoint.builtin_plugins.executors.ray_worker": "what Ray sends to its nodes",
    "hardpoint.builtin_plugins.executors.multiproc_watch": "the time of steps, not their calls",
    "hardpoint.builtin_plugins.grammars.schemas.errors": "what users read of a refusal",
    "hardpoint.builtin_plugins.scaffold.merging": "an algorithm with tests of its own",
    "hardpoint.builtin_plugins.communicators.nccl": "one library of two; gloo has a module",
    "hardpoint.builtin_plugins.response_stores.memory": "one store of two; SQLite has a module",
    "hardpoint.builtin_plugins.server.operations.malformed_http": "texts for wrong bytes",
    "hardpoint.builtin_plugins.server.operations.slow_readers": "a timer, beside the HTTP protocol",
    "hardpoint.builtin_plugins.server.access.tls": "ssl and its errors, before a model loads",
    "hardpoint.builtin_plugins.server.dialects.completions.embedded_prompts": "a form of prompts",
    "hardpoint.builtin_plugins.server.dialects.completions.fim": "formats of models for FIM",
    "hardpoint.builtin_plugins.server.dialects.invocations": "one API of several, as its siblings",
    "hardpoint.builtin_plugins.server.routes.api_docs": "one page of two; the other has a module",
    "hardpoint.completion": "argcomplete, which nothing but a shell's request imports",
    "hardpoint.progress_bars": "rich, which only terminals need",
    "hardpoint.host.boundary.hang_watch": "an algorithm with tests of its own",
    "hardpoint.toolkit.trace.table": "one view of two; the page has a module",
    "hardpoint.process.async_tokenizer": "a thread, with tests of its own",
    "hardpoint.replicas.load": "what operators and autoscalers read; no request needs it",
    "hardpoint.process.engine.garbage": "Python's collector; has tests of its own",
    "hardpoint.process.engine.watchdog": "faulthandler, whose timer the process has once",
    "hardpoint.process.child_processes.main_module.find_unpicklable": "for errors alone",
    "hardpoint.host.system.rank_store": "a server, which runs only while ranks of hosts meet",
    "hardpoint.host.system.profiling": "torch's profiler, which nothing else of a worker needs",
    "hardpoint.host.boundary.logits.edits": "an algorithm with tests of its own",
    "hardpoint.host.system.weight_key": "what a key is made of; the cache knows its text alone",
    "hardpoint.testing.running.step_parts.forks": "a check of its own; the suite is large",
    "hardpoint.testing.model.quantized_model": "a check of its own; the suite of models is large",
    "hardpoint.testing.ops.code_matrices": "samples of codes; the suite of operations is large",
    "hardpoint.testing.ops.formulas": "formulas in float64; the suite of operations is large",
    "hardpoint.testing.text.output_parser_rules": "rules; the suite of output parsers is large",
    "hardpoint.testing.text.tokenizer_rules": "rules; the suite of tokenizers is large",
    "hardpoint.core.worker.late_tokens": "tokens between two steps; the model runner is large",
    "hardpoint.core.worker.sampling.logprobs": "those of prompts; the model runner is large",
    "hardpoint.toolkit.batches.spans": "an algorithm with tests of its own",
    "hardpoint.toolkit.batches.update_builder": "an algorithm with tests of its own",
    "hardpoint.toolkit.limited.fair_lock": "an algorithm with tests of its own",
    "hardpoint.toolkit.images.addresses": "a table of networks, with tests of its own",
    "hardpoint.builtin_plugins.models.gemma.processor": "run by its path, in a limited process",
    "hardpoint.builtin_plugins.models.qwen_vl.processor": "run by its path, as that of Gemma",
    "hardpoint.builtin_plugins.models.transformers.image_program": "run by its path, as the others",
    "hardpoint.builtin_plugins.models.glm4": "models of entry points; their heads derive from them",
    "hardpoint.builtin_plugins.models.qwen3_5": "models of entry points; as GLM-4",
    "hardpoint.builtin_plugins.models.heads.eagle3": "a model of an entry point, as MTP layers",
    "hardpoint.testing.hidden_states.head_cache": "a KV cache; the suite of speculators is large",
    "hardpoint.builtin_plugins.server.operations.on_ray": "checks that only `--on ray` needs",
    "hardpoint.ray_serve.autoscaling": "a policy of Serve, with tests of its own",
    "hardpoint.ray_serve.options": "a table of options, with tests of its own",
    "hardpoint.ray_serve.prompt_work": "an algorithm with tests of its own",
    "hardpoint.simulation.loads": "exported by hardpoint.simulation",
    "hardpoint.bench.first_token": "a program, which is run by its text",
    "hardpoint.builtin_plugins.commands.simulation.page": "HTML, beside tables of text",
    "hardpoint.simulation.device": "what stands for workers, beside the loop of an engine",
    "hardpoint.builtin_plugins.step_parts.prompt_embeddings.worker_half": "imports torch",
}
"""Small modules with one importer that are a concept of their own, and why."""

LOOKED_UP = {"Arguments", "Options", "Prepared", "State"}
"""Classes of a component that the contract finds by these names, as its attributes."""

_FOR_CALLERS = tuple(
    f"hardpoint.{name}" for name in ("bench", "plugins", "simulation", "toolkit", "typed")
)
_SERVER = ("hardpoint.builtin_plugins.server.", "hardpoint.builtin_plugins.typed_answers.")

UNUSED = ROOT / "tests" / "unused_code.toml"
"""Code without a caller, by the reason for which it stays."""
OF_THE_KIT = ROOT / "tests" / "kit_code.toml"
"""Code that the kit and the tests alone reach, by what will reach it."""


def test_folders_stay_small():
    assert crowded(modules().values()) == []


def test_a_folder_with_one_file_too_many_is_found():
    files = [ROOT / "plugins" / f"{number}.py" for number in range(MOST_FILES)]
    assert crowded([*files, ROOT / "plugins" / "__init__.py"]) == []
    assert crowded([*files, ROOT / "plugins" / "more.py"]) == [f"plugins: {MOST_FILES + 1}"]


def crowded(files: Iterable[Path]) -> list[str]:
    """Return the folders with more Python files than their limit, and how many they have."""
    counts = Counter(path.parent for path in files if path.name != "__init__.py")
    limits = {ROOT / "core": MOST_FILES_IN_CORE}
    return [
        f"{folder.relative_to(ROOT)}: {count}"
        for folder, count in counts.items()
        if count > limits.get(folder, MOST_FILES)
    ]


def test_the_name_of_a_class_occurs_once():
    kernels = sorted((ROOT / "kernels").rglob("*.py"))
    trees = {str(path.relative_to(ROOT)): tree(path) for path in (*modules().values(), *kernels)}
    assert repeated_classes(trees) == []


@pytest.mark.parametrize(
    ("first", "second", "matches"),
    [
        ("class Load: ...", "class Load: ...", ["Load: core/a.py, journal/b.py"]),
        ("class Load: ...", "class Loads: ...", []),
        (
            "class A:\n class Load: ...",
            "def run():\n try: ...\n finally:\n  class Load: ...",
            ["Load: core/a.py, journal/b.py"],
        ),
        ("class A:\n class Load: ...\nclass Load: ...", "", ["Load: core/a.py, core/a.py"]),
        ("if A:\n class Load: ...\nelse:\n class Load: ...", "", []),
        ("try:\n class Load: ...\nexcept A:\n class Load: ...", "", []),
        ("class _Load: ...", "class _Load: ...", []),
        ("class A:\n class _Load: ...\nclass _Load: ...", "", ["_Load: core/a.py, core/a.py"]),
        ("class A:\n class Options: ...", "class B:\n class Options: ...", []),
        ("class Options: ...", "class Options: ...", ["Options: core/a.py, journal/b.py"]),
    ],
)
def test_a_class_name_that_occurs_twice_is_found(first, second, matches):
    trees = {"core/a.py": ast.parse(first), "journal/b.py": ast.parse(second)}
    assert repeated_classes(trees) == matches


def repeated_classes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the names that several classes have, with the files of these.

    A private name may occur once in each folder of the package. Definitions of one name in one
    scope, such as the branches of an `if`, are the same class.

    Args:
        trees: syntax tree by path, from the root of the repository on.
    """
    scopes = {(path, *scope) for path, module in trees.items() for scope in class_scopes(module)}
    places: dict[tuple[str, str], list[str]] = {}
    for path, *_, name in sorted(scopes):
        folder = package_folder(path) if name.startswith("_") else ""
        places.setdefault((folder, name), []).append(path)
    return [f"{name}: {', '.join(paths)}" for (_, name), paths in places.items() if paths[1:]]


def package_folder(path: str) -> str:
    """Return the folder of a file of which the package has a link, such as `plugins/toolkit`."""
    first, second, *_ = (*path.split("/"), "")
    return first if first in ("core", "builtin_plugins", "kernels", "src") else f"{first}/{second}"


def class_scopes(node: ast.AST, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield each class in a node: the names of classes and functions around it, and its own."""
    is_class = isinstance(node, ast.ClassDef)
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                scope = (*outer, child.name)
                if isinstance(child, ast.ClassDef) and not (is_class and child.name in LOOKED_UP):
                    yield scope
                yield from class_scopes(child, scope)
            else:
                yield from class_scopes(child, outer)


def test_a_small_module_is_not_the_part_of_one_other():
    small = {
        module: sorted(by)
        for module, by in importers().items()
        if len(by) == 1 and not is_package(module)
        if len(modules()[module].read_text().splitlines()) < SMALL
    }
    assert {module: by for module, by in small.items() if module not in SMALL_MODULES} == {}
    assert SMALL_MODULES.keys() - small.keys() == set()


def test_the_engine_has_no_module_without_an_importer():
    named = {module for module, _ in references()}
    named |= {defining_module(source, name) for source, name in imported_names("hardpoint")}
    assert [
        module
        for module, by in importers().items()
        if module.startswith(("hardpoint.core.", "hardpoint.host.registry."))
        if not by and not is_package(module) and not module.endswith(".__main__")
        if module not in named
    ] == []


def test_code_without_a_caller_is_listed_with_a_reason():
    allowed = listed(UNUSED)
    found = unused_code()["package"]
    assert {name: place for name, place in found.items() if name not in allowed} == {}
    assert allowed - found.keys() == set()


def test_what_only_the_kit_reaches_is_listed_with_what_will_reach_it():
    found = set(modules_of_the_engine()) - reached(starting_points())
    found |= unused_code()["without the kit"].keys() - listed(UNUSED)
    assert found == listed(OF_THE_KIT)


def listed(table: Path) -> set[str]:
    """Return the names of a table of reasons."""
    reasons = tomllib.loads(table.read_text(encoding="utf-8"))
    return {name for names in reasons.values() for name in names}


def modules_of_the_engine() -> list[str]:
    """Return the modules of the package, without the conformance kit."""
    return [module for module in modules() if not module.startswith("hardpoint.testing")]


def starting_points() -> set[str]:
    """Return the modules that users, configurations and processes begin with."""
    api = (name for name, path in modules().items() if path.is_relative_to(PACKAGE))
    named = {module for module, _ in references()} | {
        target.partition(":")[0] for group in entry_point_groups() for target in group.values()
    }
    programs = {module for module in modules() if module.endswith(".__main__")}
    libraries = {"hardpoint.bench", "hardpoint.simulation"}  # what programs import besides
    return {*api, *named, *programs, *libraries} & {*modules_of_the_engine()}


def reached(start: set[str]) -> set[str]:
    """Return the modules that some modules import, directly or not, without the kit's."""
    found: set[str] = set()
    left, engine = [*start], {*modules_of_the_engine()}
    while left:
        module = left.pop()
        if module not in found and module in engine:
            found.add(module)
            left.append(module.rpartition(".")[0])
            for source, name in imported_names(module):
                left += [source, defining_module(source, name)]
    return found


@cache
def unused_code() -> dict[str, dict[str, str]]:
    """Return places of what nothing uses and no author may, in the package and without the kit."""
    public = public_names() | entry_points() | body_fields() | {name for _, name in references()}
    search = vulture.Vulture()
    found = {}
    # Nothing is scanned twice: the kit is added to the folders before it.
    kit = {path for name, path in modules().items() if name.startswith("hardpoint.testing")}
    for title, paths in (("without the kit", {*modules().values()} - kit), ("package", kit)):
        with without_collections():
            search.scavenge(sorted(map(str, paths)))
        found[title] = {
            item.name: f"{item.filename}:{item.first_lineno}"
            for item in search.get_unused_code()
            if item.name not in public and not item.name.startswith("__")
        }
    return found


def references() -> set[tuple[str, str]]:
    """Return module and name of the functions that other processes find by their names."""
    texts = (
        node.value
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    found = (re.fullmatch(r"(hardpoint(?:\.\w+)+):(\w+)", text) for text in texts)
    return {(match[1], match[2]) for match in found if match}


def public_names() -> set[str]:
    """Return the names that the API, the contract and their libraries define."""
    return {
        name
        for module, path in modules().items()
        if path.is_relative_to(PACKAGE) or module.startswith(_FOR_CALLERS)
        for node in nodes(path)
        for name in defined(node)
        if not name.startswith("_")
    }


def body_fields() -> set[str]:
    """Return the fields of the bodies of the server's routes, which clients write and read."""
    return {
        field.target.id
        for module, path in modules().items()
        if module.startswith(_SERVER)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def defined(node: ast.AST) -> list[str]:
    """Return the names that a syntax node defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.arg():
            return [node.arg]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case _:
            return []


def entry_points() -> set[str]:
    """Return the objects that the package's entry points name."""
    targets = (target for group in entry_point_groups() for target in group.values())
    return {target.partition(":")[2] for target in targets}


def entry_point_groups() -> list[dict[str, str]]:
    """Return the package's entry points and scripts: `module:object` by name, group by group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [project["scripts"], *project["entry-points"].values()]


def test_each_abstract_member_is_used():
    """An interface asks of an author only what the engine or a built-in plugin uses."""
    outside = [
        node
        for module, path in modules().items()
        if not module.startswith(("hardpoint.plugins", "hardpoint.testing"))
        for node in nodes(path)
    ]
    used = {
        node.attr
        for node in outside
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "super()"
    }
    assert [f"{cls}.{member}" for cls, member in abstract_members() if member not in used] == []


def abstract_members() -> Iterator[tuple[str, str]]:
    """Yield class and name of each abstract member of the contract."""
    for path in sorted((ROOT / "plugins" / "contract").rglob("*.py")):
        for cls in nodes(path):
            for member in cls.body if isinstance(cls, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                    "abstract" in ast.unparse(mark) for mark in member.decorator_list
                ):
                    yield cls.name, member.name
