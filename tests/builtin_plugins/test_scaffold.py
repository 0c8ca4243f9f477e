"""`hardpoint plugins new`: each kind's package works, and is brought to newer templates."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from support.frozen_templates import changes, digests, recorded
from support.processes import run

from hardpoint.builtin_plugins.scaffold.names import PackageSpec
from hardpoint.builtin_plugins.scaffold.project import make, plan_update, read_spec, update
from hardpoint.builtin_plugins.scaffold.templates import Templates, templates_folder
from hardpoint.cli import main
from hardpoint.errors import HardpointError, RequestError
from hardpoint.host.registry.kinds import KINDS

SOME = ("hooks", "logits_processors", "scheduling_policies")
QUICK = (
    "activation_taps",
    "adapter_resolvers",
    "balancers",
    "component_adapters",
    "eviction_policies",
    "hooks",
    "io_processors",
    "logits_processors",
    "poolers",
    "scheduling_policies",
    "speculators",
    "stat_sinks",
)
"""Kinds whose suites take about a second; those of the others are in the test of all."""


NEWEST = Templates().newest


def spec(kind: str, version: int = 1) -> PackageSpec:
    return PackageSpec(version=version, kind=kind, name=f"acme-new-{kind.replace('_', '-')}")


def write_packages(folder: Path, kinds, version: int = 1) -> str:
    """Write a package per kind, as if it were installed; return the path of their modules."""
    templates, paths = Templates(), []
    for kind in kinds:
        made = spec(kind, version)
        make(folder / made.name, templates.render(made))
        source = folder / made.name / "src"
        info = source / f"{made.module}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {made.name}\nVersion: 0.1.0\n"
        )
        point = f"{made.module} = {made.module}:{made.class_name}"
        (info / "entry_points.txt").write_text(f"[hardpoint.{kind}]\n{point}\n")
        paths.append(str(source))
    return os.pathsep.join(paths)


def test_published_templates_do_not_change():
    now = digests()
    assert changes(recorded(), now) == [], "make a new version, in a folder of its own"
    assert now == recorded(), "run PYTHONPATH=tests python -m support.frozen_templates"


@pytest.mark.parametrize(
    ("path", "digest", "expected"),
    [
        ("1/common/README.md.txt", "other", ["1/common/README.md.txt changed"]),
        ("1/common/README.md.txt", None, ["1/common/README.md.txt is gone"]),
        ("1/common/MANIFEST.in.txt", "new", ["1/common/MANIFEST.in.txt is new"]),
        ("1/kinds/new_kind.txt", "new", []),
        ("9/common/README.md.txt", "new", []),
    ],
)
def test_a_change_of_published_templates_is_found(path, digest, expected):
    now = digests() | {path: digest}
    assert changes(digests(), {p: text for p, text in now.items() if text}) == expected


def test_every_kind_has_a_template():
    assert Templates().kinds() == sorted(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_package_is_complete(kind):
    made = spec(kind)
    files = Templates().render(made)
    source = files[f"src/{made.module}/__init__.py"]
    assert len(source.splitlines()) < 60
    assert "Change th" in source
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["keywords"] == ["hardpoint-plugin"]
    points = project["project"]["entry-points"]
    assert points == {f"hardpoint.{kind}": {made.module: f"{made.module}:{made.class_name}"}}
    assert project["tool"]["hardpoint"]["template"] == {
        "version": 1,
        "kind": kind,
        "name": made.name,
    }
    assert {".gitignore", ".github/workflows/test.yml", f"src/{made.module}/py.typed"} < {*files}
    assert f"contract = {KINDS[kind].contract}\n" in source
    assert KINDS[kind].suite in files[f"tests/test_{made.module}.py"]
    config = files["README.md"].partition("```toml\n")[2].partition("```")[0]
    assert made.module in config
    tomllib.loads(config)


RESOLVES = """
import sys, tomllib
from pathlib import Path
from hardpoint.configuration.loading import config_from
from hardpoint.host.registry.plugin_set import resolve_plugins

for folder in sorted(Path.cwd().iterdir()):
    text = (folder / "README.md").read_text().partition("```toml\\n")[2].partition("```")[0]
    module = folder.name.replace("-", "_")
    plugins = resolve_plugins(*config_from({"model": "smollm2", **tomllib.loads(text)}, caller=""))
    assert any(module in entry.value for entry in plugins.manifest.tree()), module
    print(module)
"""


def test_their_readmes_enable_them(tmp_path):
    path = write_packages(tmp_path, KINDS, NEWEST)
    printed = run(sys.executable, "-c", RESOLVES, path=path, cwd=tmp_path)
    assert len(printed.split()) == len(KINDS)


@pytest.mark.parametrize(
    "kinds", [SOME, pytest.param(QUICK, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_their_own_tests_pass(kinds, tmp_path):
    path = write_packages(tmp_path, kinds)
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *os.listdir(tmp_path),
    )
    printed = run(*command, path=path, cwd=tmp_path, examples=0.02)
    assert "passed" in printed
    assert "failed" not in printed


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the packages of all kinds, `made`, built and installed into `site`."""
    folder = tmp_path_factory.mktemp("all")
    for kind in KINDS:
        made = spec(kind, NEWEST)
        make(folder / "made" / made.name, Templates().render(made))
    packages = [str(path) for path in sorted((folder / "made").iterdir())]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    build = ("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheels"))
    run(*pip, *build, *packages, cwd=folder)
    wheels = [str(wheel) for wheel in (folder / "wheels").iterdir()]
    run(*pip, "install", "--no-deps", "--target", str(folder / "site"), *wheels, cwd=folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_is_built_installed_and_tested(installed, kind, tmp_path):
    shutil.copytree(installed / "made" / spec(kind).name / "tests", tmp_path / "tests")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    printed = run(*command, path=installed / "site", cwd=tmp_path, examples=0.1)
    assert "passed" in printed


@pytest.mark.nightly
def test_all_have_types(installed):
    sources = [str(path / "src") for path in sorted((installed / "made").iterdir())]
    run(sys.executable, "-m", "mypy", "--strict", *sources, cwd=installed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *arguments: str) -> str:
    assert main(["plugins", "new", *arguments]) != 0
    return capsys.readouterr().err


def test_the_command_makes_a_package_and_prints_the_next_ones(folder, capsys):
    assert main(["plugins", "new", "hooks", "Acme-Count", "--dry-run"]) == 0
    assert "Acme-Count/pyproject.toml\n" in capsys.readouterr().out
    assert not list(folder.iterdir())
    assert main(["plugins", "new", "hooks", "Acme-Count"]) == 0
    printed = capsys.readouterr().out
    assert "The class is AcmeCount, in src/acme_count/__init__.py. Next:" in printed
    for line in ("cd Acme-Count", 'pip install -e ".[test]"', "pytest"):
        assert f"  {line}\n" in printed
    assert "hardpoint plugins show hooks/acme_count" in printed
    assert (folder / "Acme-Count" / ".gitignore").is_file()
    assert "expected a new or empty folder, Acme-Count has .github" in refused(
        capsys, "hooks", "Acme-Count"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hook", "acme-a"), "KIND: expected one of activation_taps, adapter_resolvers, "),
        (("hooks", "2-acme"), "NAME: expected at most 64 letters, digits, '-', '_' and '.', the f"),
        (("hooks", "acme-"), "the last one a letter or digit, got 'acme-'"),
        (("hooks", "é"), "got 'é'"),
        (("hooks", "json"), "cannot have the module 'json', which Python, Hardpoint or the pack"),
        (("hooks", "class"), "cannot have the module 'class'"),
        (("hooks", "none"), "cannot have the class 'None', which is a word of Python"),
        (("hooks", "TRUE"), "cannot have the class 'True', which is a word of Python"),
        (("hooks", "false"), "cannot have the class 'False', which is a word of Python"),
        (("hooks", "fair"), "'fair': scheduling_policies/fair of hardpoint 0.1.0 is a plugin of"),
        (("hooks", "tqdm"), "the module 'tqdm' is installed, at "),
        (("executors", "wrapper"), "its class would have the name Wrapper, which the module im"),
        (("hooks",), "expected KIND and NAME, or --update"),
        (("--update", "hooks"), "--update: expected no KIND and NAME, which the package states"),
        (("--update",), "--update: pyproject.toml cannot be read: No such file or directory"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_written(folder, capsys, arguments, words):
    assert words in refused(capsys, *arguments)
    assert not list(folder.iterdir())


def test_a_folder_that_is_none_is_refused(folder, capsys):
    (folder / "file").touch()
    message = refused(capsys, "hooks", "acme-a", "--into", "file")
    assert "--into: expected a folder, but file is a file" in message
    assert "file is a file" in refused(capsys, "hooks", "acme-a", "--into", "file/below")
    (folder / "empty").mkdir()
    assert main(["plugins", "new", "hooks", "acme-a", "--into", "empty"]) == 0
    assert (folder / "empty" / "pyproject.toml").is_file()


@pytest.fixture
def second(tmp_path):
    """Templates with one more version: other README, a file more, no workflow."""
    copied = tmp_path / "templates"
    shutil.copytree(Path(str(templates_folder())), copied)
    common = copied / f"{NEWEST + 1}" / "common"
    (common / "dot_github" / "workflows").mkdir(parents=True)
    (common / "dot_github" / "workflows" / "test.yml.txt").touch()
    readme = (copied / "2" / "common" / "README.md.txt").read_text()
    (common / "README.md.txt").write_text(readme.replace("enables nothing.", "enables no plugin."))
    (common / "MANIFEST.in.txt").write_text("include README.md\n")
    return Templates(copied)


def updated(folder: Path, templates: Templates) -> dict[str, str]:
    """Update a package; return the state of its files."""
    changes = plan_update(folder, read_spec(folder, templates), templates)
    update(folder, changes)
    return {path: change.what for path, change in changes.items() if change.what != "unchanged"}


def test_an_update_keeps_what_the_author_has_changed(tmp_path, second):
    package = tmp_path / "acme"
    make(package, second.render(spec("hooks")))
    (package / "README.md").write_bytes(
        (package / "README.md").read_bytes().replace(b"\n", b"\r\n") + b"Mine.\r\n"
    )
    (package / ".gitignore").unlink()
    assert updated(package, second) == {
        ".github/workflows/test.yml": "removed",
        "MANIFEST.in": "added",
        "README.md": "merged",
        "pyproject.toml": "updated",
        "src/acme_new_hooks/__init__.py": "updated",
    }
    text = (package / "README.md").read_bytes().decode()
    assert "enables no plugin." in text
    assert text.endswith("Mine.\r\n")
    assert text.count("\r\n") == text.count("\n")
    assert read_spec(package, second).version == NEWEST + 1
    assert updated(package, second) == {}


def test_an_update_that_stops_in_the_middle_can_be_made_again(tmp_path, second):
    added = tmp_path / "templates" / f"{NEWEST + 1}" / "common" / "tests" / "more.py.txt"
    added.parent.mkdir()
    added.write_text("pass\n")
    templates, package = Templates(tmp_path / "templates"), tmp_path / "acme"
    make(package, second.render(spec("hooks")))
    hindrance = package / "tests" / ".more.py.new"
    hindrance.mkdir()
    with pytest.raises(HardpointError, match=r"tests/more\.py cannot be written: Is a directory"):
        updated(package, templates)
    assert read_spec(package, templates).version == 1
    hindrance.rmdir()
    again = updated(package, templates)
    assert (again["pyproject.toml"], again["tests/more.py"]) == ("updated", "added")
    assert read_spec(package, templates).version == NEWEST + 1
    assert updated(package, templates) == {}


def test_a_conflict_leaves_both_and_is_to_be_decided_first(tmp_path, second):
    package = tmp_path / "acme"
    make(package, second.render(spec("hooks")))
    readme = package / "README.md"
    readme.write_text(readme.read_text().replace("enables nothing.", "is enough."))
    assert updated(package, second)["README.md"] == "in conflict"
    assert "<<<<<<< yours\nInstalling it is enough." in readme.read_text()
    assert f">>>>>>> template {NEWEST + 1}\n" in readme.read_text()
    with pytest.raises(RequestError, match=r"README.md, line \d+: decide this conflict first"):
        updated(package, second)


def test_the_command_ends_with_1_if_there_are_conflicts(folder, capsys, second, monkeypatch):
    assert main(["plugins", "new", "hooks", "acme-a", "--into", "a"]) == 0
    readme = folder / "a" / "README.md"
    written = readme.read_text()
    readme.write_text(written.replace("enables nothing.", "is enough."))
    monkeypatch.setattr("hardpoint.builtin_plugins.scaffold.command.Templates", lambda: second)
    capsys.readouterr()
    assert main(["plugins", "new", "--update", "--dry-run", "--into", "a"]) == 1
    assert "<<<<<<<" not in readme.read_text()
    assert main(["plugins", "new", "--update", "--into", "a"]) == 1
    printed = capsys.readouterr().out
    assert "a/README.md: in conflict" in printed
    assert printed.endswith(f"Templates: version {NEWEST} to {NEWEST + 1}; 1 conflicts.\n")
    assert "<<<<<<< yours" in readme.read_text()
    assert main(["plugins", "new", "--update", "--into", "a"]) == 2
    assert "decide this conflict first" in capsys.readouterr().err
    readme.write_text(written)
    assert main(["plugins", "new", "--update", "--into", "a"]) == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("", "has no table [tool.hardpoint.template]"),
        ("version = 9\nkind = 'hooks'\nname = 'a'", f"version: expected 1 to {NEWEST}, got 9"),
        ("version = 1\nkind = 'hook'\nname = 'a'", "kind: expected one of activation_taps"),
        ("version = 1\nname = 'a'", "tool.hardpoint.template.kind: "),
        (
            "version = 1\nkind = 'hooks'\nname = '../a'",
            "pyproject.toml: tool.hardpoint.template.name: expected at most 64 letters, digits",
        ),
        (
            "version = 1\nkind = 'hooks'\nname = 'none'",
            "pyproject.toml: tool.hardpoint.template.name: expected another name than 'none'",
        ),
        ("version = [", "is no TOML: "),
    ],
)
def test_a_package_that_was_not_made_so_is_named(folder, capsys, table, words):
    head = "[tool.hardpoint.template]\n" if table else ""
    (folder / "pyproject.toml").write_text(head + table)
    assert words in refused(capsys, "--update")


def test_the_newest_package_needs_no_update(folder, capsys):
    assert main(["plugins", "new", "hooks", "acme-a", "--into", "a"]) == 0
    assert main(["plugins", "new", "--update", "--into", "a"]) == 0
    assert f"a has the newest templates, version {NEWEST}." in capsys.readouterr().out
