"""Print the test files that a branch affects, one per line: "none", or nothing if it may be all.

scripts/changed-tests           files changed since main, uncommitted ones included
scripts/changed-tests BASE      since that commit
scripts/changed-tests --report  the selections for the last 30 commits and their duration, by
                                .venv-test/durations.json; tests that only run with --all have none

A change of a module affects the test files that reach it by at most REACH imports, those that name
it as a plugin, WHOLE, and SOURCE. Helpers of tests do not count as imports. A name that a package's
`__init__` re-exports counts as an import of the module that defines it. Modules that put an engine
together (ASSEMBLIES) lead no further, because nearly every test reaches every module through them.
Any other file (a page, an example) affects the test files that name it.

This is a selection for quick feedback: it finds 7 of 10 test files that the commits of the past
changed together with a module. The whole run remains the check of main. pytest-testmon needs a
recorded whole run, which a fresh clone lacks, and does not see child processes; pytest-picked runs
only test files that were changed themselves.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from syntax import literals, statements

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
DURATIONS = ROOT / ".venv-test" / "durations.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EVERYTHING = (
    "pyproject.toml",
    "setup.py",
    "scripts/changed-tests",
    "scripts/changed_tests.py",
    "scripts/test",
    "tests/conftest.py",
)
"""Files that may affect any test."""
IGNORED = (".gitignore", "LICENSE", ".importlinter")
"""Files that no test reads."""
PROGRAMS = ("benchmarks", "scripts")
"""Folders of programs; one that no test runs affects no test."""
ASSEMBLIES = (
    "hardpoint.async_llm",
    "hardpoint.calls.groups",
    "hardpoint.cli",
    "hardpoint.llm",
    "hardpoint.core.build",
    "hardpoint.core.engine.build",
    "hardpoint.core.engine.worker_launch",
    "hardpoint.process.build",
    "hardpoint.process.engine.run",
    "hardpoint.builtin_plugins.server.assembly",
    "hardpoint.testing.engine_access",
    "hardpoint.testing.scripted",
)
"""Modules that import the parts of an engine to put it together."""
WHOLE = (
    "tests/process/test_composition.py",
    "tests/test_equality_real.py",
    "tests/test_stacks.py",
)
"""Tests of whole engines."""
SOURCE = (
    "tests/test_code_structure.py",
    "tests/test_contracts.py",
)
"""Tests that read the source of all modules."""
REACH = 2
COMMITS = 30
CHECKS_S = 60.0
"""Seconds of the checks that precede the tests."""


def main() -> int:
    """Print the test files; return the exit code."""
    gc.disable()  # each collection would visit the cached trees
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", default="main", help="commit; without it, main")
    parser.add_argument("--report", action="store_true", help="estimate for the last commits")
    options = parser.parse_args()
    if options.report:
        if not DURATIONS.exists():
            parser.error(
                f"--report: expected {DURATIONS.relative_to(ROOT)}: run scripts/test first"
            )
        report()
        return 0
    base = git("merge-base", options.base, "HEAD").strip()
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    affected = affected_tests([*git("diff", "--name-only", base).splitlines(), *new])
    if affected is not None:
        print("\n".join(sorted(affected)) or "none")
    return 0


def report() -> None:
    """Print seconds and test files of the last commits, each on its own, and their median."""
    seconds: Counter[str] = Counter()
    record = json.loads(DURATIONS.read_text(encoding="utf-8"))
    for test, value in record["tests"].items():
        seconds[test.partition("::")[0]] += value
    walls, together = [], seconds.total() / record["wall"]
    for line in git("log", "--no-merges", "--format=%h %s", f"-{COMMITS}").splitlines():
        commit = line.partition(" ")[0]
        affected = affected_tests(git("diff", "--name-only", f"{commit}~1", commit).splitlines())
        tests = seconds.keys() if affected is None else affected
        walls.append(sum(seconds[test] for test in tests) / together)
        count = "all" if affected is None else len(affected)
        print(f"{walls[-1]:6.0f} s {count:>5} files  {line[:72]}")
    median = statistics.median(walls)
    print(f"{median:6.0f} s median, of {seconds.total() / together:.0f} s for all")
    print(f"{median + CHECKS_S:6.0f} s median with {CHECKS_S:.0f} s of checks")


def git(*arguments: str) -> str:
    """Return the output of a command of git."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def affected_tests(changed: Iterable[str]) -> set[str] | None:
    """Return the test files that changed files affect; None if it may be all."""
    modules: set[str] = set()
    affected: set[str] = set()
    for path in changed:
        if path in EVERYTHING:
            return None
        if path in IGNORED or not (ROOT / path).exists():  # what used it was changed, too
            continue
        if path in paths():
            modules.add(paths()[path])
        elif (tests := naming(path)) or path.startswith(PROGRAMS):
            affected |= tests
        else:
            return None
    if any(module.startswith("hardpoint.") for module in modules):
        affected |= {*WHOLE, *SOURCE}
    return affected | reaching(modules)


def reaching(modules: set[str]) -> set[str]:
    """Return the test files that are, or that use, one of some modules."""
    return {
        str(path.relative_to(ROOT))
        for name, path in files().items()
        if path.name.startswith("test_") and not modules.isdisjoint(used_modules(name))
    }


@cache
def files() -> dict[str, Path]:
    """Return the files of the package's and the tests' modules by their dotted names."""
    paths_by_module = {}
    for root in (ROOT / "src", TESTS):
        for folder, _, names in os.walk(root, followlinks=True):
            for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
                module = ".".join(path.relative_to(root).with_suffix("").parts)
                paths_by_module[module.removesuffix(".__init__")] = path.resolve()
    return paths_by_module


@cache
def paths() -> dict[str, str]:
    """Return the dotted names of the modules by their files' paths."""
    return {str(path.relative_to(ROOT)): name for name, path in files().items()}


@cache
def texts() -> dict[str, str]:
    """Return the text of each test file and helper by its dotted name."""
    tests = sorted(TESTS.rglob("*.py"))
    return {paths()[str(path.relative_to(ROOT))]: path.read_text("utf-8") for path in tests}


@cache
def naming(path: str) -> set[str]:
    """Return the test files that name a file which is not a module, or the package of an example.

    Those that import a helper which names it are included.
    """
    folder, _, rest = path.partition("/")
    package = re.escape(Path(rest).parts[0] if rest else path)
    stem = package.removesuffix(r"\.py")
    if folder in PROGRAMS:
        loaded = rf"scripts\" / \"{stem}\"|import_module\(f?\"{stem}[.\"]"
        pattern = rf"\b{stem}\.py\b|{loaded}|\b(?:from|import) {stem}\b"
    elif folder == "examples":
        pattern = rf"\b{package}\b"
    else:
        pattern = rf"\b{re.escape(Path(path).name)}\b"
    named = {name for name, text in texts().items() if re.search(pattern, text)}
    if folder in ("docs", "README.md"):
        named |= {"test_docs", "test_reference"}
    return reaching(named)


@cache
def used_modules(module: str) -> frozenset[str]:
    """Return a test's module, its helpers, and the modules that they reach by REACH imports."""
    modules = helpers(module)
    level = modules
    for number in range(REACH):
        level = {used for name in level - {*ASSEMBLIES} for used in imported(name)} - modules
        if number == 0:
            level |= named_plugins(modules)
        modules = modules | level
    return frozenset(modules)


def helpers(module: str) -> set[str]:
    """Return a test's module, the `conftest.py` of its folder, and the helpers that they import."""
    folders = [folder for folder in files()[module].parents if folder.is_relative_to(TESTS)]
    fixtures = [str((folder / "conftest.py").relative_to(ROOT)) for folder in folders]
    pending = [module, *(paths()[path] for path in fixtures if path in paths())]
    modules: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in modules and name != "conftest" and not name.startswith("hardpoint"):
            modules.add(name)
            pending += imported(name)
    return modules


def named_plugins(tests: set[str]) -> set[str]:
    """Return the modules of the built-in plugins that the strings of tests and helpers name."""
    words = {word for name in tests for word in strings(name)}
    return {module for name, module in entry_points() if name in words}


@cache
def entry_points() -> list[tuple[str, str]]:
    """Return name and module of each entry point."""
    groups = PROJECT["project"]["entry-points"]
    points = [point for group in groups.values() for point in group.items()]
    return [(name, target.partition(":")[0]) for name, target in points]


@cache
def tree(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def strings(module: str) -> frozenset[str]:
    """Return the words of a module's strings."""
    texts = (text for _, text in literals(files()[module].read_text("utf-8")))
    return frozenset(word for text in texts if text[0] != "#" for word in re.findall(r"\w+", text))


@cache
def imported(module: str) -> frozenset[str]:
    """Return the modules that a module imports, or names as `package.module:function`."""
    text = files()[module].read_text(encoding="utf-8")
    named = re.findall(r"""["']([a-z_]+(?:\.\w+)+):\w+["']""", text)
    used = {defining(source, name) for source, name in imports(module)}
    return frozenset(used | files().keys() & {*named})


@cache
def imports(module: str) -> list[tuple[str, str]]:
    """Return module and name of each `from MODULE import NAME`; no name for `import MODULE`."""
    package = module if files()[module].name == "__init__.py" else module.rpartition(".")[0]
    pairs = []
    for node in statements(tree(module)):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            pairs += [(source, alias.name) for alias in node.names]
    return [(source, name) for source, name in pairs if source in files()]


@cache
def defining(module: str, name: str) -> str:
    """Return the module that defines a name, which an `__init__` may re-export."""
    if f"{module}.{name}" in files():
        return f"{module}.{name}"
    if name and files()[module].name == "__init__.py":
        for source, imported_name in imports(module):
            if imported_name == name and (source, name) != (module, name):
                return defining(source, name)
    return module


if __name__ == "__main__":
    sys.exit(main())
