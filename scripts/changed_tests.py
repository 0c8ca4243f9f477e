"""Print the test files that a branch touched, one a line: "none", or nothing if it may be all.

scripts/changed-tests           changed since main, what is not committed included
scripts/changed-tests BASE      since that commit
scripts/changed-tests --report  what the last 30 commits would have run, and how long that takes by
                                .venv-test/durations.json

A test file is touched if it, or what it imports, was changed, however far down. A name that a
package's `__init__` re-exports counts as an import of the module that defines it. Built-in plugins
are found by their entry points: a test that imports the loader uses those that are there by
default, and those that it or a helper names. A file that is no module (a page, an example) touches
the tests that name it.

Where a test builds a whole engine, nearly every module would be in what it imports. So the modules
that put an engine together (ASSEMBLIES) lead no further: a change behind them touches the tests that
reach it another way, and WHOLE, tests of whole engines. What main runs is still everything.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".venv-test" / "durations.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EVERYTHING = (
    "pyproject.toml",
    "setup.py",
    "scripts/test",
    "scripts/changed_tests.py",
    "tests/conftest.py",
)
"""Files of which nobody can tell what they touch."""
IGNORED = (".gitignore", "LICENSE", ".importlinter")
"""Files that no test reads."""
LOADER = "hardpoint.registry.discovery"
"""Module that loads plugins by their entry points."""
ASSEMBLIES = (
    "hardpoint.async_llm",
    "hardpoint.cli",
    "hardpoint.llm",
    "hardpoint.core.build",
    "hardpoint.core.engine.build",
    "hardpoint.core.engine.worker_launch",
    "hardpoint.core.engine_process.run",
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
"""Tests of whole engines, for a change that is behind an assembly."""
COMMITS = 30


def main() -> int:
    """Print the test files; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", default="main", help="commit; without it, main")
    parser.add_argument("--report", action="store_true", help="estimate for the last commits")
    options = parser.parse_args()
    if options.report:
        report()
        return 0
    base = git("merge-base", options.base, "HEAD").strip()
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    touched = touched_tests([*git("diff", "--name-only", base).splitlines(), *new])
    if touched is not None:
        print("\n".join(sorted(touched)) or "none")
    return 0


def report() -> None:
    """Print seconds and test files of the last commits on their own, and their median."""
    seconds: Counter[str] = Counter()
    for test, value in json.loads(DURATIONS.read_text(encoding="utf-8"))["tests"].items():
        seconds[test.partition("::")[0]] += value
    found = []
    for commit in git("log", "--no-merges", "--format=%h", f"-{COMMITS}").split():
        touched = touched_tests(git("diff", "--name-only", f"{commit}~1", commit).splitlines())
        tests = seconds.keys() if touched is None else touched
        found.append(sum(seconds[test] for test in tests) / 2)  # there are two processes
        count = "all" if touched is None else len(touched)
        print(
            f"{found[-1]:6.0f} s {count:>5} files  {git('log', '--format=%h %s', '-1', commit)}",
            end="",
        )
    print(f"{statistics.median(found):6.0f} s median, of {seconds.total() / 2:.0f} s for all")


def git(*arguments: str) -> str:
    """Return what a command of git prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def touched_tests(changed: Iterable[str]) -> set[str] | None:
    """Return the test files that changed files touch; None if it may be all."""
    modules: set[str] = set()
    touched: set[str] = set()
    for path in changed:
        if path in EVERYTHING:
            return None
        if path in IGNORED:
            continue
        if path in paths():
            modules.add(paths()[path])
        elif tests := naming(path):
            touched |= tests
        else:
            return None
    if any(each.startswith("hardpoint.") for each in modules):
        touched |= {*WHOLE}
    return touched | {
        str(path.relative_to(ROOT))
        for name, path in files().items()
        if path.name.startswith("test_") and modules & {name, *closure(name)}
    }


@cache
def files() -> dict[str, Path]:
    """Return the files of the package's and the tests' modules by their dotted names."""
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    found = {}
    for package, folder in {**folders, "": "tests"}.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).strip(".").removesuffix(".__init__")] = path
    return found


@cache
def paths() -> dict[str, str]:
    """Return the dotted names of the modules by their files' paths."""
    return {str(path.relative_to(ROOT)): name for name, path in files().items()}


@cache
def texts() -> dict[str, str]:
    """Return the text of each test file and helper by its path."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in tests}


@cache
def naming(path: str) -> set[str]:
    """Return the test files that name a file which is no module, or its package's folder.

    Those that import a helper which names it are among them.
    """
    folder, _, rest = path.partition("/")
    package = Path(rest).parts[0] if rest else path
    if folder in ("examples", "scripts", "benchmarks"):
        words = {Path(package).stem, package}
    else:
        words = {Path(path).name}
    pattern = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words))
    named = {paths()[file] for file, text in texts().items() if pattern.search(text)}
    if folder in ("docs", "README.md"):
        named |= {"test_docs", "test_reference"}
    return {
        str(file.relative_to(ROOT))
        for name, file in files().items()
        if file.name.startswith("test_") and named & {name, *closure(name)}
    }


@cache
def closure(module: str) -> frozenset[str]:
    """Return all modules that a test's module uses, directly or not."""
    path = files()[module]
    fixtures = [
        str(f.relative_to(ROOT)) for f in (d / "conftest.py" for d in path.parents) if f.exists()
    ]
    waiting = [module, *(paths()[each] for each in fixtures if each != "tests/conftest.py")]
    found: set[str] = set(waiting)
    plugins = False
    while waiting:
        name = waiting.pop()
        for used in (imported(name) if name not in ASSEMBLIES else frozenset()) - found:
            found.add(used)
            waiting.append(used)
        if not waiting and LOADER in found and not plugins:
            plugins = True
            waiting = sorted(loaded(found) - found)
            found.update(waiting)
    return frozenset(found)


def loaded(used: set[str]) -> set[str]:
    """Return the modules of the built-in plugins that tests which use these modules may load."""
    words = {word for name in used if not name.startswith("hardpoint") for word in strings(name)}
    return {module for name, module in entry_points() if name in DEFAULTS or name in words}


DEFAULTS = {
    "default",
    "fcfs",
    "lru",
    "uniproc",
    "safetensors",
    "auto",
    "transformers",
    "native_cpu",
}
"""Names of the plugins that are used unless a configuration says otherwise."""


@cache
def entry_points() -> list[tuple[str, str]]:
    """Return name and module of each entry point."""
    groups = PROJECT["project"]["entry-points"]
    return [
        (name, target.partition(":")[0])
        for group, points in groups.items()
        for name, target in points.items()
        for name in ([name] if group != "hardpoint.logits_processors" else [name, "default"])
    ]


@cache
def tree(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def strings(module: str) -> frozenset[str]:
    """Return the words of a module's strings."""
    nodes = ast.walk(tree(module))
    found = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return frozenset(word for text in found for word in re.findall(r"\w+", text))


@cache
def imported(module: str) -> frozenset[str]:
    """Return the modules that a module imports, or names as `package.module:function`."""
    found = {defining(source, name) for source, name in imports(module)}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"([a-z_]+(?:\.\w+)+):\w+", node.value)
            found |= {named[1]} if named and named[1] in files() else set()
    return frozenset(found)


@cache
def imports(module: str) -> list[tuple[str, str]]:
    """Return module and name of each `from MODULE import NAME`; "" as name of an `import MODULE`."""
    package = module if files()[module].name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            found += [(source, alias.name) for alias in node.names]
    return [(source, name) for source, name in found if source in files()]


@cache
def defining(module: str, name: str) -> str:
    """Return the module that defines a name; a package's `__init__` that re-exports it is passed."""
    if f"{module}.{name}" in files():
        return f"{module}.{name}"
    if name and files()[module].name == "__init__.py":
        for source, imported_name in imports(module):
            if imported_name == name and (source, name) != (module, name):
                return defining(source, name)
    return module


if __name__ == "__main__":
    sys.exit(main())
