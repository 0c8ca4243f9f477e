"""Generate the reference pages from the code.

scripts/reference           writes kinds.md, types.md, hooks.md, config.md, server.md, gallery.md,
                            conformance.md, builtins.md, parsers.md and model-families.md into
                            docs/reference/, which git ignores
scripts/reference --check   writes nothing; exits 1 and names what has no description, and links
                            without a target
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
import textwrap
import tomllib
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import msgspec
from reference_builtins import builtins_page, parsers_page
from reference_families import families_page

from hardpoint import plugins, testing
from hardpoint.builtin_plugins.server.assembly import core_routes
from hardpoint.builtin_plugins.server.routes.fields import GenerationFields
from hardpoint.configuration.loading import default_config_type
from hardpoint.host.live.settings import settings_of
from hardpoint.host.registry.kinds import KINDS, PluginKind, Stability
from hardpoint.plugins import EngineHalf, SamplingParams, WorkerHalf, Wrapper
from hardpoint.plugins.component import Component
from hardpoint.plugins.component.behaviour import declared_of
from hardpoint.plugins.sampling.phases import Phase
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.testing.component_suite import ComponentSuite, LiveComponentSuite
from hardpoint.testing.general.suite import GeneralSuite
from hardpoint.testing.suite import ConformanceSuite, Rule
from hardpoint.testing.timing.timed_suite import TimedSuite
from hardpoint.typed import join_path
from hardpoint.typed.describing import (
    FieldDoc,
    attribute_docs,
    first_paragraph,
    struct_fields,
    walk_structs,
)

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = ROOT / "docs" / "reference"
MODULES = {
    "hardpoint.errors": "stable",
    "hardpoint.typed": "stable",
    "hardpoint.plugins.commands": "provisional",
    "hardpoint.plugins.device": "provisional",
    "hardpoint.plugins.output_parser": "provisional",
    "hardpoint.plugins.server": "provisional",
    "hardpoint.plugins.grammars": "provisional",
    "hardpoint.plugins.structured": "provisional",
    "hardpoint.plugins.executor": "provisional",
    "hardpoint.plugins.exponential_race": "provisional",
    "hardpoint.plugins.parallel": "provisional",
    "hardpoint.plugins.quantization": "provisional",
    "hardpoint.plugins.step_part": "provisional",
    "hardpoint.toolkit.bitmasks": "provisional",
    "hardpoint.toolkit.branches": "provisional",
    "hardpoint.toolkit.encoder_cache": "provisional",
    "hardpoint.toolkit.hf_config": "provisional",
    "hardpoint.toolkit.layers": "provisional",
    "hardpoint.toolkit.parsing.format_parser": "provisional",
    "hardpoint.toolkit.parsing.json_text": "provisional",
    "hardpoint.toolkit.workers.calls": "provisional",
    "hardpoint.toolkit.workers.joining": "provisional",
}
"""Public modules besides `hardpoint.plugins`: those of single kinds, and libraries for authors."""
UNDESCRIBED = {"hardpoint.errors", "hardpoint.typed", "hardpoint.plugins.commands"}
"""Those whose names have no section, unless a signature has one of them."""
CONTRACT = "hardpoint.plugins"
OURS = ("hardpoint.errors", CONTRACT, "hardpoint.toolkit", "hardpoint.typed")
"""What authors import, as prefixes."""
COSTS = ROOT / "docs" / "gallery-costs.json"
"""What scripts/gallery-costs has measured."""
NOTE = "<!-- Written by scripts/reference from the code; not in git. -->"

GALLERY_TEXT = """\
All plugins of this repository by kind: the built-in ones, and those of the example
packages, which are written as anybody's are. Tests run the suites of the kinds for them;
`hardpoint plugins check NAME` runs one against an installed plugin, and measures what that
costs on this machine. `hardpoint plugins list` names those that are enabled.

The costs are what `plugins check` measured once, in microseconds to the nearest of 1, 2, 5,
10 and so on, on {machine}, in steps of the scripted
model with 8 requests and the simplest arguments: of a logits processor the time in its own
methods, of others how much longer a step took. One of `< 50` was too small for a figure. Where
there is none, no run of that model uses the plugin, or each does. `scripts/gallery-costs`
measures again. The proof is the test that runs the suite for it; of the few without one, the
tests of its module or package."""
TYPES_TEXT = """\
All names of `hardpoint.plugins`, and the types that its interfaces pass. A name of a group
that is *stable* changes only with the contract version of its kind, and the version before
is accepted. A *provisional* one may change in any release; its notes say how. Modules of
Hardpoint that are not listed here are *internal*. Described below are the public names, all
types in their signatures, and names of the further modules that a guide or the page of the
kinds has; the docstrings have the rest."""
PASSED_TEXT = """\
These are provisional. The engine makes them, and a plugin needs their names in annotations alone:
import them under `TYPE_CHECKING`, from the module that the section names."""
CONFIG_TEXT = """\
Every value that `hardpoint.toml` may hold. [The guide](../configuration.md) says where
values come from and which wins. `none` stands for a value that is not set. A value that
changes *live* is one that [`set_config`](../hot-reconfiguration.md) changes while the engine runs;
the others need a restart."""
SERVER_TEXT = """\
Every route of `hardpoint serve`, and every field of its requests: what it means, whether it
is ignored, or refused by name. A field that is null is one that is left out. Any other
field is an error that names the nearest known one, unless `server.unknown_fields` is
"warn". [The guide](../serving.md) has examples."""
SUITES_TEXT = """\
Every suite of the [conformance kit](../conformance-kit.md): the attributes and methods that a
test class sets or overrides, and its tests with the rule that each of them checks."""

TABLES_DESCRIBED = ("config.md", "gallery.md")
"""Pages whose table rows all have a description."""
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^):]+))?\)")
SCHEDULER_RULES = "hardpoint.testing.scheduling.rules"
"""Rules that every test of `SchedulerSuite` checks."""
SHARED_SUITES = (ConformanceSuite, ComponentSuite, GeneralSuite, TimedSuite, LiveComponentSuite)
"""Base classes of suites, which are described once."""
INTERNAL_ATTRIBUTES = ("kind", "options_from")


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="only print problems")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the pages are")
    options = parser.parse_args()
    folder: Path = options.folder
    pages = {
        folder / "kinds.md": kinds_page(),
        folder / "types.md": types_page(),
        folder / "hooks.md": hooks_page(),
        folder / "config.md": config_page(),
        folder / "server.md": server_page(),
        folder / "conformance.md": suites_page(),
        folder / "gallery.md": gallery_page(),
        folder / "builtins.md": builtins_page(NOTE),
        folder / "parsers.md": parsers_page(NOTE),
        folder / "model-families.md": families_page(NOTE),
    }
    if options.check:
        problems = [problem for path, text in pages.items() for problem in undescribed(path, text)]
        problems += lost_links({path.name: text for path, text in pages.items()})
        for problem in problems:
            print(problem, file=sys.stderr)
        return 1 if problems else 0
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        if _read(path) != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 0


def undescribed(path: Path, page: str) -> Iterator[str]:
    """Yield the headings, functions and table rows of a page that have no description."""
    lines = [line for line in page.splitlines() if line] + ["# "]
    ends = ("#", "```python")  # what follows a description
    name = ""
    for line, after in itertools.pairwise(lines):
        if line.startswith(("#", "def ", "    def ")):
            name = line.strip("# ")
        is_heading = line.startswith("##") and after.startswith("#")
        is_deeper = is_heading and after.count("#") > line.count("#")
        is_function = line == "```" and after.startswith(ends)
        if (is_heading and not is_deeper) or is_function:
            yield f"{path.name}: {name} has no description"
        if path.name in TABLES_DESCRIBED and line.startswith("| `") and line.endswith("|  |"):
            yield f"{path.name}: {name}: {line.split('`')[1]} has no description"


def lost_links(pages: dict[str, str]) -> Iterator[str]:
    """Yield the links of pages, by name, to a file or a section that does not exist."""
    for name, page in pages.items():
        for target, section in LINK.findall(page):
            if target in pages or not target:
                if section and section not in _anchors(pages[target or name]):
                    yield f"{name}: no section {section!r} in {target or name}"
            elif not target.startswith("http") and not (DEFAULT_FOLDER / target).resolve().exists():
                yield f"{name}: the link to {target} has no target"


def _anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def suites_page() -> str:
    """Return the page of the conformance suites."""
    kinds: dict[str, list[str]] = {}
    for kind in KINDS.values():
        if kind.suite:
            kinds.setdefault(kind.suite, []).append(f"[`{kind.name}`](kinds.md#{kind.name})")
    names = [name for name in testing.__all__ if name.endswith("Suite")]
    lines = [*_title("Conformance suites"), SUITES_TEXT, "", "| suite | kinds |", "|---|---|"]
    lines += [_row(f"[`{n}`](#{n.lower()})", ", ".join(kinds.get(n, []))) for n in names]
    lines.append("")
    for suite in (*SHARED_SUITES, *(getattr(testing, name) for name in names)):
        own = [
            cls
            for cls in suite.__mro__
            if issubclass(cls, ConformanceSuite) and (cls is suite or cls not in SHARED_SUITES)
        ]
        shared = [cls for cls in SHARED_SUITES if cls in suite.__mro__ and cls is not suite]
        links = ", ".join(f"[`{cls.__name__}`](#{cls.__name__.lower()})" for cls in shared)
        lines += [f"## {suite.__name__}", "", *_prose(suite), ""]
        lines += [f"It also has the attributes and tests of {links}.", ""] if shared else []
        lines += [*_attributes(own), "", *_overridable(own), "", *_tests(own, shared), ""]
        if suite.__name__ == "SchedulerSuite":
            lines += [*_rules(SCHEDULER_RULES), ""]
    return _page(lines)


def _attributes(classes: list[type]) -> list[str]:
    """Return the table of the attributes that the docstrings of suites describe."""
    rows: dict[str, str] = {}
    defaults: dict[str, object] = {}
    for base in reversed(classes[0].__mro__):
        defaults |= vars(base)
    for cls in classes:
        section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
        for entry in filter(None, re.split(r"\n(?=    \S)", section)):
            names, _, text = entry.strip().partition(": ")
            rows.setdefault(names, " ".join(text.split()))
    lines = [_row("attribute", "default", ""), "|---|---|---|"]
    for names, text in rows.items():
        if names not in INTERNAL_ATTRIBUTES:
            values = [_default(defaults, name) for name in names.split(", ")]
            shown = ", ".join(f"`{name}`" for name in names.split(", "))
            lines.append(_row(shown, ", ".join(values), text))
    return lines if rows else []


def _default(defaults: dict[str, object], name: str) -> str:
    """Return the default of an attribute, shortened to its type if it is long."""
    if name not in defaults:
        return "required"
    text = repr(defaults[name])
    is_plain = len(text) <= 30 and "<" not in text
    return f"`{text}`" if is_plain else "several"


def _overridable(classes: list[type]) -> list[str]:
    """Return the table of the methods that a test class may override."""
    methods = {
        name: getattr(classes[0], name)
        for cls in classes
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith(("_", "test_"))
    }
    lines = [_row("method", ""), "|---|---|"]
    for name, method in methods.items():
        parameters = ", ".join([*inspect.signature(method).parameters][1:])
        lines.append(_row(f"`{name}({parameters})`", _first_sentence(inspect.getdoc(method))))
    return lines if methods else []


def _tests(classes: Sequence[type], shared: Sequence[type]) -> list[str]:
    """Return the table of the tests of suites, without those that shared suites describe alike."""
    tests = {
        name: " ".join(getattr(classes[0], name).__doc__.split())
        for cls in reversed(classes)
        for name in vars(cls)
        if name.startswith("test_")
    }
    described = {
        " ".join(value.__doc__.split())
        for cls in shared
        for name, value in vars(cls).items()
        if name.startswith("test_")
    }
    rows = [_row(f"`{name}`", text) for name, text in tests.items() if text not in described]
    return [_row("test", "rule"), "|---|---|", *rows] if rows else []


def _rules(module: str) -> Iterator[str]:
    """Yield the table of the rules of a module: the name of each, its text, and how to keep it."""
    yield from (_row("rule", "requirement", "fix"), "|---|---|---|")
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, Rule):
            yield _row(*value.text.split(": ", 1), value.fix)


def gallery_page() -> str:
    """Return the page of all plugins in this repository: built-in ones and examples."""
    measured = json.loads(COSTS.read_text(encoding="utf-8"))
    lines = [
        *_title("Gallery"),
        GALLERY_TEXT.format(machine=measured["machine"]),
    ]
    rows_by_kind: dict[str, list[tuple[str, ...]]] = {}
    proofs = _proofs()
    for file in (ROOT / "pyproject.toml", *sorted(ROOT.glob("examples/*/pyproject.toml"))):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        where = "built in" if file.parent == ROOT else _example(file.parent)
        for group, entries in project.get("entry-points", {}).items():
            kind = group.removeprefix("hardpoint.")
            for name, target in entries.items() if kind in KINDS else ():
                text, lines_of_code = _summary_of(target, file.parent)
                cost = measured["microseconds"].get(f"{kind}/{name}", {})
                costs = (cost.get("row", "-"), cost.get("step", "-"))
                module, _, cls = target.partition(":")
                if cls and file.parent == ROOT:  # an entry point may have another name of a class
                    cls = getattr(importlib.import_module(module), cls).__name__
                proof = proofs.get((KINDS[kind].suite, cls or module.rpartition(".")[2]))
                shown = _link_of_test(proof or _test_of(module, file.parent))
                row = (f"`{name}`", text, where, lines_of_code, *costs, shown)
                rows_by_kind.setdefault(kind, []).append(row)
    for kind in KINDS.values():
        if rows := rows_by_kind.get(kind.name):
            lines += ["", f"## {kind.name}", "", f"{kind.summary} Proved by `{kind.suite}`.", ""]
            columns = ("name", "", "package", "lines", "µs per row", "µs per step", "proof")
            lines += [_row(*columns), "|---|---|---|---|---|---|---|"]
            lines += [_row(*row) for row in rows]
    return "\n".join(lines) + "\n"


def _proofs() -> dict[tuple[str, str], Path]:
    """Return the tests that run a suite for a plugin, by the names of suite and class or module."""
    proofs: dict[tuple[str, str], Path] = {}
    files = (*sorted(ROOT.glob("tests/**/test_*.py")), *ROOT.glob("examples/*/tests/*.py"))
    for file in sorted(files, key=lambda file: "kit_catches" in file.stem):
        suites: dict[str, set[str]] = {}
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                above = {name for base in bases for name in suites.get(base, {base})}
                suites[node.name] = {name for name in above if name.endswith("Suite")}
                values = [
                    statement.value for statement in node.body if isinstance(statement, ast.Assign)
                ]
                names = [ast.unparse(v).rpartition(".")[2] for v in values]
                for suite in suites[node.name]:
                    proofs |= {(suite, n): file for n in names if (suite, n) not in proofs}
    return proofs


def _test_of(module: str, folder: Path) -> Path | None:
    """Return the test of a plugin without a suite: by the name of its module or package."""
    if folder != ROOT:
        return folder / "tests"
    for part in reversed(module.split(".")[2:]):
        for pattern in (f"test_{part}.py", f"test_{part}_*.py", part):
            if paths := sorted(ROOT.glob(f"tests/**/{pattern}")):
                return paths[0]
    return None


def _link_of_test(file: Path | None) -> str:
    return "-" if file is None else f"[{file.stem}](../../{file.relative_to(ROOT)})"


def _example(folder: Path) -> str:
    return f"[{folder.name}](../../examples/{folder.name})"


def _summary_of(target: str, folder: Path) -> tuple[str, str]:
    """Return the first sentence about a target, and the lines of its class or module."""
    module, _, name = target.partition(":")
    if folder == ROOT:
        cls = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            cls = getattr(cls, part)
        return _first_sentence(inspect.getdoc(cls)), str(len(inspect.getsource(cls).splitlines()))
    path = folder / "src" / Path(*module.split("."))
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.glob("*.py")
    flat = folder / f"{module}.py"
    for file in [flat] if flat.exists() else sorted(files):
        text = file.read_text(encoding="utf-8")
        source = ast.parse(text)
        if not name:
            return _first_sentence(ast.get_docstring(source)), str(text.count("\n"))
        for node in ast.walk(source):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                count = (node.end_lineno or 0) - node.lineno + 1
                return _first_sentence(ast.get_docstring(node)), str(count)
    raise SystemExit(f"{folder / 'pyproject.toml'}: {target} has no source")


def _first_sentence(text: str | None) -> str:
    first = " ".join((text or "").split("\n\n")[0].split())
    return first.replace("|", "\\|")


def kinds_page() -> str:
    """Return the page of the extension points."""
    lines = [
        *_title("Extension points"),
        "A plugin is a class that derives from the interface of its kind, states `contract = 1` in",
        "its own body, and is offered under the kind's entry-point group. Everything here is",
        "imported from `hardpoint.plugins`.",
        "",
        "| kind | interface | number | what it does |",
        "|---|---|---|---|",
    ]
    for kind in KINDS.values():
        interfaces = ", ".join(f"`{name}`" for name in kind.interface_names) or "functions"
        link = f"[`{kind.name}`](#{kind.name})"
        lines.append(f"| {link} | {interfaces} | {kind.number.value} | {kind.summary} |")
    lines += ["", "## Every component", "", *_prose(Component), "", *_members(Component)]
    taking = ", ".join(f"`{kind.name}`" for kind in KINDS.values() if kind.takes_arguments)
    lines += ["## Components with arguments", "", f"Of the kinds {taking}.", ""]
    lines += [*_prose(ComponentWithArguments), "", *_members(ComponentWithArguments)]
    guide = "[The guide](../components-and-hooks.md#wrap-a-component)."
    lines += ["## Wrappers", "", *_prose(Wrapper), "", guide, ""]
    for kind in KINDS.values():
        lines += _kind_section(kind)
    return _page(lines)


def types_page() -> str:
    """Return the page of the public names, and of the types that they pass."""
    groups = public_groups()
    shown = {name for _, _, names in groups for name in names}
    named = named_in_guides()
    in_modules = {name for module in MODULES.keys() - UNDESCRIBED for name in _exported(module)}
    used = passed_types(shown)
    named |= {cls.__name__ for cls in used}
    passed = [cls for cls in used if cls.__name__ not in in_modules]
    shown |= {cls.__name__ for cls in passed}
    lines = [
        *_title("Names and types"),
        TYPES_TEXT,
        "",
        "| group | | names |",
        "|---|---|---|",
    ]
    for title, stability, names in groups:
        links = ", ".join(f"[`{name}`](#{name.lower()})" for name in names)
        lines.append(f"| {title} | {stability} | {links} |")
    links = ", ".join(f"[`{cls.__name__}`](#{cls.__name__.lower()})" for cls in passed)
    lines += [f"| Passed, without a public name | provisional | {links} |", ""]
    lines += ["| further module | | names |", "|---|---|---|"]
    for name, stability in MODULES.items():
        module = importlib.import_module(name)
        exported = ", ".join(f"`{each}`" for each in module.__all__)
        lines.append(f"| `{module.__name__}` | {stability} | {exported} |")
    lines.append("")
    for title, stability, names in groups:
        lines += [f"## {title}", "", f"These are {stability}.", ""]
        for name in names:
            lines += _type_section(name, getattr(plugins, name))
    lines += ["## Passed, without a public name", "", PASSED_TEXT, ""]
    for cls in passed:
        heading, *section = _type_section(cls.__name__, cls)
        lines += [heading, "", f"In `{cls.__module__}`.", *section]
    for name in MODULES:
        if name in UNDESCRIBED:
            continue
        module = importlib.import_module(name)
        prefix = CONTRACT if name.startswith(CONTRACT) else name
        own_types = [
            type_name
            for type_name in module.__all__
            if _module_of(getattr(module, type_name)).startswith(prefix)
        ]
        lines += [f"## {name}", "", *_prose(_documented_module(module)), ""]
        for type_name in sorted((named - shown).intersection(own_types), key=own_types.index):
            lines += _type_section(type_name, getattr(module, type_name))
    return _page(lines)


def _exported(module: str) -> list[str]:
    """Return the public names that a module defines itself."""
    imported = importlib.import_module(module)
    return [name for name in imported.__all__ if _module_of(getattr(imported, name)) == module]


def named_in_guides() -> set[str]:
    """Return the words in code of the guides and of the pages of kinds and hooks."""
    guides = [path.read_text("utf-8") for path in sorted(DEFAULT_FOLDER.parent.glob("*.md"))]
    code = (
        text
        for page in (*guides, kinds_page(), hooks_page())
        for text in re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL)
    )
    return {word for text in code for word in re.findall(r"[A-Za-z_]\w*", text)}


def _documented_module(module: ModuleType) -> ModuleType:
    """Return the module that defines the names, if a module only re-exports them; else itself.

    Of several, the one with the same last name, or with the most names.
    """
    origins = Counter(_module_of(getattr(module, name)) for name in module.__all__)
    if hasattr(module, "__path__") or module.__name__ in origins:
        return module
    last = module.__name__.rpartition(".")[2]
    same = [origin for origin in origins if origin.endswith(f".{last}")]
    return sys.modules[same[0] if same else origins.most_common(1)[0][0]]


def _module_of(value: object) -> str:
    """Return where a class or function is defined; nothing for a constant."""
    return getattr(value, "__module__", None) or ""


def public_groups() -> list[tuple[str, str, list[str]]]:
    """Return title, stability and names of each group of `hardpoint.plugins.__all__`."""
    source = inspect.getsource(plugins).split("__all__ = [", 1)[1].split("\n", 1)[1]
    groups: list[tuple[str, str, list[str]]] = []
    for line in map(str.strip, source.splitlines()):
        if line.startswith("# "):
            title, _, stability = line[2:].rpartition(": ")
            groups.append((title, Stability(stability).value, []))
        elif line.startswith('"'):
            groups[-1][2].append(line.strip('",'))
    return groups


def passed_types(public: set[str]) -> list[type]:
    """Return the types that signatures of public names have, at any depth, and are not public.

    Args:
        public: names of `hardpoint.plugins`; those of the further modules count, too.
    """
    roots = [getattr(plugins, name) for name in sorted(public)]
    for name in MODULES:
        module = importlib.import_module(name)
        roots += [getattr(module, each) for each in module.__all__]
    used: list[Any] = []
    waiting = [part for root in roots for part in _types_in_signatures(root)]
    while waiting:
        thing = waiting.pop()
        if any(thing is other for other in used):
            continue
        used.append(thing)
        waiting += _types_in_signatures(thing)
    types_by_name = {
        thing.__name__: thing
        for thing in used
        if inspect.isclass(thing) and _is_ours(thing) and not thing.__name__.startswith("_")
        if thing.__name__ not in public and not issubclass(thing, Component)
    }
    return [types_by_name[name] for name in sorted(types_by_name)]


def _types_in_signatures(thing: Any) -> list[Any]:
    """Return the types in the signatures of a class or function, or the parts of an alias."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return _parts_of(thing)
    if not _is_ours(thing):
        return []
    namespace = _namespace(thing.__module__)
    names = [
        name
        for annotation in _annotations(thing)
        for name in re.findall(r"[A-Za-z_]\w*", annotation)
    ]
    return [namespace[name] for name in dict.fromkeys(names) if name in namespace]


def _parts_of(alias: Any) -> list[Any]:
    """Return the types in an alias, such as `Mapping[str, Name]`."""
    if isinstance(alias, list):  # of parameters
        return alias
    return [alias.__bound__] if isinstance(alias, typing.TypeVar) else [*typing.get_args(alias)]


@functools.cache
def _namespace(module: str) -> dict[str, Any]:
    """Return the names of a module, and its imports for type checkers."""
    names = dict(vars(sys.modules[module]))
    package = module if hasattr(sys.modules[module], "__path__") else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in (
                statement for statement in node.body if isinstance(statement, ast.ImportFrom)
            ):
                name = importlib.util.resolve_name("." * each.level + (each.module or ""), package)
                source = importlib.import_module(name)
                names |= {
                    alias.asname or alias.name: getattr(source, alias.name) for alias in each.names
                }
    return names


def _annotations(thing: Any) -> Iterator[str]:
    """Yield the annotations of a function; or of the attributes and methods of a class."""
    yield from map(str, inspect.get_annotations(thing).values())
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        is_public = not name.startswith("_") or name in ("__call__", "__init__")
        if is_public and (function := _function_of(member)) is not None:
            yield from map(str, inspect.get_annotations(function).values())


def _is_ours(thing: Any) -> bool:
    return bool(thing.__module__.startswith(OURS))


def _type_section(name: str, thing: Any) -> list[str]:
    """Return the description of a public name."""
    lines = [f"### {name}", ""]
    kind = next((k for k in KINDS.values() if name in k.interface_names), None)
    if kind is not None:
        return [*lines, f"The interface of [`{kind.name}`](kinds.md#{kind.name}).", ""]
    if inspect.isfunction(thing):
        return [*lines, *_function(name, thing), ""]
    if not inspect.isclass(thing) or not _is_ours(thing):
        return [*lines, *_other(name, thing), ""]
    lines += [*_prose(thing), ""]
    if issubclass(thing, enum.Enum):
        return lines + [f"- `{member.name}`: {_member_doc(member)}" for member in thing] + [""]
    if issubclass(thing, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
        return [*lines, f"An exception, derived from {bases}.", ""]
    is_plain = not dataclasses.is_dataclass(thing) and not getattr(thing, "_is_protocol", False)
    if is_plain and inspect.isfunction(vars(thing).get("__init__")):
        code = _function(name, thing.__init__)
        code = [line.replace("(self, ", "(").replace(" -> None", "") for line in code]
        lines += [line for line in code if line != "    self,"] + [""]
        lines[lines.index("```python") + 1] = lines[lines.index("```python") + 1][4:]
    return lines + _fields(thing) + _members(thing, is_component=False)


def _other(name: str, thing: Any) -> list[str]:
    """Return a line on a name that stands for no class of the contract."""
    if getattr(thing, "__module__", "") in ("typing", "msgspec") or name in ("Annotated", "Meta"):
        return [f"As in `{'typing' if name == 'Annotated' else 'msgspec'}`."]
    if name == "hookimpl":
        return ["Marks a function as the implementation of a [hook](hooks.md)."]
    return [f"`{str(thing).replace('typing.', '')}`"]


def _fields(cls: type) -> list[str]:
    """Return the attributes of a class with type, default and meaning."""
    docs = attribute_docs(cls)
    if not docs and typing.is_typeddict(cls):  # it has fields of others alone
        return []
    annotations = {
        name: getattr(annotation, "__forward_arg__", None) or str(annotation)
        for base in reversed(cls.__mro__)
        if _is_ours(base)
        for name, annotation in inspect.get_annotations(base).items()
        if not name.startswith("_")
    }
    annotations |= {n: "" for n in docs if n not in annotations and not _described(cls, n)}
    if not annotations:
        return []
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for name, annotation in annotations.items():
        type_text = f"`{annotation}`" if annotation else ""
        cells = (f"`{name}`", type_text, _default_of(cls, name), docs.get(name, ""))
        lines.append(_row(*cells))
    return [*lines, ""]


def _described(cls: type, name: str) -> bool:
    """Return whether a name is a method or property, which has a section of its own."""
    return _function_of(inspect.getattr_static(cls, name, None)) is not None


def _default_of(cls: type, name: str) -> str:
    """Return a field's default as text; empty if it has none."""
    if issubclass(cls, tuple) and name in getattr(cls, "_fields", ()):
        defaults = cls._field_defaults  # type: ignore[attr-defined]
        return f"`{defaults[name]!r}`" if name in defaults else ""
    if issubclass(cls, msgspec.Struct):
        fields: dict[str, Any] = {field.name: field for field in msgspec.structs.fields(cls)}
        missing: Any = msgspec.NODEFAULT
    elif dataclasses.is_dataclass(cls):
        fields = {field.name: field for field in dataclasses.fields(cls)}
        missing = dataclasses.MISSING
    else:
        fields, missing = {}, None
    if name in fields:
        factory, default = fields[name].default_factory, fields[name].default
        if factory is not missing:
            default = factory() if inspect.isclass(factory) else missing  # `time.time`, say
        if default is missing:
            return ""
    elif name in vars(cls) and not callable(vars(cls)[name]):
        default = vars(cls)[name]
    else:
        return ""
    text = "a function" if inspect.isfunction(default) else repr(default)
    return "" if " at 0x" in text or type(default).__name__ == "member_descriptor" else f"`{text}`"


def hooks_page() -> str:
    """Return the page of the hooks."""
    lines = [
        *_title("Hooks"),
        *_prose(inspect.getmodule(HookSpecs)),
        "",
        "The process that calls a hook stands in brackets. See [extension points](kinds.md#hooks)",
        "for how a plugin of hooks is found and enabled.",
        "",
    ]
    for name, hook in vars(HookSpecs).items():
        if not name.startswith("_"):
            # In a plugin it is a plain function.
            code = [
                line.replace("(self, ", "(").replace("(self)", "()")
                for line in _function(name, hook)
            ]
            lines += [f"## {name}", "", *code, ""]
    return _page(lines)


def config_page() -> str:
    """Return the page of the configuration."""
    lines = [
        *_title("Configuration"),
        CONFIG_TEXT,
        "",
        *_table_section(default_config_type(), ""),
    ]
    return _page(lines)


def server_page() -> str:
    """Return the page of the server's routes, with every field and how it is treated."""
    routes = [route for route in core_routes(Mock()) if not route.admin]
    lines = [
        *_title("The server's fields"),
        SERVER_TEXT,
        "",
        "| route | | body | answer |",
        "|---|---|---|---|",
    ]
    for route in routes:
        types = (route.request_type, route.response_type)
        links = (f"[`{t.__name__}`](#{t.__name__.lower()})" if t else "" for t in types[:1])
        answer = f"`{types[1].__name__}`" if types[1] else ""
        methods = ", ".join(route.methods)
        cells = (f"`{methods} {route.path}`", route.summary, *links, answer)
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    request_types = [route.request_type for route in routes if route.request_type is not None]
    shown: dict[type[msgspec.Struct], None] = {}
    for struct in request_types:
        shown.update(dict.fromkeys(walk_structs(struct)))
    for struct in sorted(shown, key=lambda struct: struct not in request_types):
        lines += _request_section(struct)
    return _page(lines)


def _request_section(struct: type[msgspec.Struct]) -> list[str]:
    """Return the fields of a request's body, or of a part of one."""
    lines = [f"## {struct.__name__}", "", first_paragraph(struct), ""]
    # Others have fields of the same names with other meanings.
    shared = attribute_docs(SamplingParams) if issubclass(struct, GenerationFields) else {}
    rows = [
        dataclasses.replace(field, doc=field.doc or shared.get(field.name, ""))
        for field in struct_fields(struct)
    ]
    config = struct.__struct_config__
    if config.tag_field:
        lines += [f'`{config.tag_field}` is `"{config.tag}"`.', ""]
    if rows:
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_request_row(struct, field) for field in rows] + [""]
    for title, names in (
        ("Known and ignored", getattr(struct, "ignored", {})),
        ("Known and refused", getattr(struct, "refused", {})),
    ):
        if names:
            lines += ["| " + title.lower() + " | because |", "|---|---|"]
            lines += [f"| `{name}` | {reason} |" for name, reason in sorted(names.items())] + [""]
    return lines


def _request_row(struct: type[msgspec.Struct], field: FieldDoc) -> str:
    (info,) = [f for f in msgspec.structs.fields(struct) if f.encode_name == field.name]
    if info.default is msgspec.UNSET:
        default = "the model's"
    else:
        default = "required" if field.required else f"`{_toml(field.default)}`"
    cells = (f"`{field.name}`", field.type_text, default, field.doc)
    return _row(*cells)


def _changes(kind: PluginKind) -> str:
    if kind.restart is not None:
        return f"with a restart: {kind.restart}"
    says = "; of a class that says `changes_live = True`"
    default = getattr(kind.interface, "changes_live", True)
    return f"[live](../hot-reconfiguration.md){'' if default else says}"


def _kind_section(kind: PluginKind) -> list[str]:
    processes = " and ".join(process.value for process in kind.processes)
    chosen = f"`{kind.chosen_by}`" if kind.chosen_by else _chosen_otherwise(kind)
    lines = [
        f"## {kind.name}",
        "",
        kind.summary,
        "",
        f"- entry-point group: `{kind.group}`",
        f"- chosen by: {chosen}",
        f"- number: {kind.number.value}. {_member_doc(kind.number)}",
        f"- runs in: {processes}",
        f"- changes: {_changes(kind)}",
        f"- a fault ends: {_lower(_member_doc(kind.fault_scope))}",
        f"- contract version: {kind.contract}, {kind.stability.value}: "
        f"{_lower(_member_doc(kind.stability))}",
    ]
    if kind.suite:
        anchor = f"conformance.md#{kind.suite.lower()}"
        lines.append(f"- tested by: [`hardpoint.testing.{kind.suite}`]({anchor})")
    lines.append("")
    if kind.interface is None:
        return [*lines, "The hooks themselves are [on their own page](hooks.md).", ""]
    if kind.forms:
        lines += _interface(kind.interface, "What its forms share")
    for form in kind.forms or (kind.interface,):
        lines += _interface(form, form.__name__)
    if kind.name == "logits_processors":
        lines += ["### Phases", "", "Processors run phase by phase, in this order.", ""]
        lines += [f"- `{phase.name}`: {_member_doc(phase)}" for phase in Phase] + [""]
    return lines


def _chosen_otherwise(kind: PluginKind) -> str:
    by_requests = kind.role is not None or kind.name == "grammars"
    named = "a request" if by_requests else "a model"
    named = f"`{kind.named_by}` or {named}" if kind.named_by else named
    return "`plugins.enable`; built-in ones are on" + (
        f", and used when {named} names them" if kind.number.value == "by name" else ""
    )


def _interface(cls: type[Component], title: str) -> list[str]:
    """Return an interface with its own additions: attributes, arguments, context, methods."""
    lines = [f"### {title}", "", *_prose(cls), ""]
    if docs := attribute_docs(cls) if cls.__doc__ and "Attributes:" in cls.__doc__ else {}:
        types = {n: a for base in cls.__mro__ for n, a in inspect.get_annotations(base).items()}
        typed = {name: f"{name}: {types[name]}" if name in types else name for name in docs}
        lines += [*(f"- `{typed[name]}`: {text}" for name, text in docs.items()), ""]
    if (context := inspect.get_annotations(cls).get("context")) is not None:
        lines += _context(getattr(inspect.getmodule(cls), str(context)))
    return lines + _members(cls)


def _of_unlisted(cls: type) -> dict[str, Any]:
    """Return the abstract methods of a form from a base that is on no page of its own."""
    names: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    return {
        name: vars(base)[name]
        for base in cls.__mro__[1:]
        if base.__name__ not in plugins.__all__
        for name in names & vars(base).keys()
    }


def _members(cls: type, *, is_component: bool = True) -> list[str]:
    """Return the methods that a class adds, beginning with a component's required ones."""
    if cls in (EngineHalf, WorkerHalf):
        return ["The protocols of hooks describe the methods.", ""]
    lines: list[str] = []
    fields = inspect.get_annotations(cls)  # a default that is a function is not a method
    members = [
        (name, member)
        for name, member in {**_of_unlisted(cls), **vars(cls)}.items()
        if name not in fields
        if not name.startswith("_") or (name == "__call__" and not is_component)
    ]
    methods = [(name, member) for name, member in members if _function_of(member) is not None]
    for wanted, heading in ((True, "To implement"), (False, "To override where wanted")):
        chosen = [(n, m) for n, m in methods if _is_abstract(m) is wanted]
        if chosen and is_component:
            lines += [f"**{heading}**", ""]
        for name, member in chosen:
            lines += [*_function(name, member), ""]
    return lines


def _context(context: type) -> list[str]:
    """Return the arguments of a component's constructor."""
    docs = attribute_docs(context)
    annotations = {
        name: annotation
        for base in reversed(context.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
    }
    lines = [f"`self.context: {context.__name__}`. {first_paragraph(context)}", ""]
    for name, annotation in annotations.items():
        tail = f": {docs[name]}" if name in docs else ""
        lines.append(f"- `{name}: {annotation}`{tail}")
    return [*lines, ""]


def _function_of(member: Any) -> Any:
    """Return the function of a method, class method or property; None for anything else."""
    member = member.fget if isinstance(member, property) else member
    member = getattr(member, "__func__", member)
    return member if inspect.isfunction(member) else None


def _is_abstract(member: Any) -> bool:
    return bool(getattr(member, "__isabstractmethod__", False))


def _function(name: str, member: Any) -> list[str]:
    """Return a function's signature as code, then its docstring."""
    function = _function_of(member)
    signature = str(inspect.signature(function)).replace("'", "")
    marks = {property: "@property\n", classmethod: "@classmethod\n"}
    mark = marks.get(type(member), "")
    code = f"{mark}def {name}{signature}"
    if len(code.removeprefix(mark)) > 90:
        code = f"{mark}def {name}({_wrapped(function)}"
    lines = ["```python", *code.splitlines(), "```", "", *_prose(function, whole=True)]
    behaviour = declared_of(function)
    return lines if behaviour is None else [*lines, "", f"{behaviour}"]


def _wrapped(function: Any) -> str:
    """Return a long signature, one parameter per line."""
    signature = inspect.signature(function)
    parts: list[str] = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(str(parameter).replace("'", ""))
    returns = str(signature.return_annotation).replace("'", "")
    return "\n    " + ",\n    ".join(parts) + f",\n) -> {returns}"


def _table_section(struct: type[msgspec.Struct], path: str) -> list[str]:
    """Return one table of the configuration, then the tables in it."""
    fields = struct_fields(struct)
    heading = f"## [{path}]" if path else "## Top level"
    lines = [heading, "", first_paragraph(struct), ""]
    plain = [field for field in fields if field.table is None]
    if plain:
        changes = dict(settings_of(struct))
        lines += ["| key | type | default | changes | |", "|---|---|---|---|---|"]
        lines += [_field_row(field, changes.get(field.name, "by kind")) for field in plain]
        lines.append("")
    for field in fields:
        if field.table is not None:
            lines += _table_section(field.table, join_path(path, field.name))
    return lines


def _field_row(field: FieldDoc, change: str) -> str:
    default = "required" if field.required else f"`{_toml(field.default)}`"
    cells = (f"`{field.name}`", field.type_text, default, change, field.doc)
    return _row(*cells)


def _toml(value: Any) -> str:
    return "none" if value is None else json.dumps(msgspec.to_builtins(value))


def _member_doc(member: enum.Enum) -> str:
    """Return the docstring that follows an enum member in the source, else its value."""
    body = ast.parse(textwrap.dedent(inspect.getsource(type(member)))).body[0]
    assert isinstance(body, ast.ClassDef)
    for assignment, after in zip(body.body, body.body[1:], strict=False):
        is_it = isinstance(assignment, ast.Assign) and ast.unparse(assignment.targets[0])
        if is_it == member.name and isinstance(after, ast.Expr):
            return " ".join(str(ast.literal_eval(after.value)).split())
    return repr(member.value)


def _prose(thing: Any, *, whole: bool = False) -> list[str]:
    """Return a docstring as Markdown; without `whole`, up to its first section."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    return list(_sections(text, whole=whole))


def _sections(text: str, *, whole: bool) -> Iterator[str]:
    """Turn `Args:` and the like into bold words and lists."""
    inside = ""
    for line in text.splitlines():
        if line in ("Attributes:", "Args:", "Returns:", "Raises:", "Example:"):
            if not whole:
                return
            inside = line
            yield f"**{line.removesuffix(':')}**"
            yield ""
        elif inside in ("Args:", "Raises:") and line.startswith("    ") and line[4] != " ":
            yield f"- {line.strip()}"
        elif inside:
            yield f"  {line.strip()}" if inside in ("Args:", "Raises:") else line.strip()
        else:
            yield line


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _title(title: str) -> list[str]:
    return [f"# {title}", "", NOTE, ""]


def _page(lines: list[str]) -> str:
    """Join lines; never more than one empty line, and one newline at the end."""
    shown_lines = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    return "\n".join(line.rstrip() for line in shown_lines).rstrip() + "\n"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
