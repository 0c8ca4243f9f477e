"""The reference pages are what the code says."""

import subprocess
import sys

import pytest
from support.processes import ROOT

from hardpoint.plugins import EngineConfig
from hardpoint.plugins.describing import struct_fields
from hardpoint.plugins.hooks import HookSpecs
from hardpoint.plugins.kinds import KINDS

PAGES = ("kinds.md", "hooks.md", "config.md")


def reference(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "reference"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference") / "deeper"
    done = reference("--folder", str(folder))
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text() for name in PAGES}


def test_the_committed_pages_are_up_to_date():
    done = reference("--check")
    assert done.returncode == 0, done.stderr


def test_check_names_what_is_stale_and_writes_nothing(tmp_path):
    assert reference("--folder", str(tmp_path)).returncode == 0
    assert reference("--check", "--folder", str(tmp_path)).returncode == 0
    (tmp_path / "hooks.md").write_text("old")
    done = reference("--check", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'hooks.md'} is stale; run scripts/reference\n"
    assert (tmp_path / "hooks.md").read_text() == "old"


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_kind_is_described(pages, kind):
    section = pages["kinds.md"].split(f"\n## {kind.name}\n")[1].split("\n## ")[0]
    assert kind.summary in section
    assert f"- entry-point group: `{kind.group}`" in section
    assert f"- contract version: {kind.contract}" in section
    assert kind.suite in section
    for form in kind.forms or ([kind.interface] if kind.interface else []):
        assert f"### {form.__name__}" in section
        for method in form.__abstractmethods__:
            assert f"def {method}(" in section


def test_every_hook_is_described(pages):
    for name, hook in vars(HookSpecs).items():
        if not name.startswith("_"):
            section = pages["hooks.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
            assert f"def {name}(" in section
            assert "self" not in section
            assert hook.__doc__.strip().splitlines()[0] in section


def test_every_configuration_value_is_described(pages):
    def check(struct, path):
        heading = f"## [{path}]" if path else "## Top level"
        section = pages["config.md"].split(f"\n{heading}\n")[1].split("\n## ")[0]
        for field in struct_fields(struct):
            if field.table is not None:
                check(field.table, f"{path}.{field.name}".lstrip("."))
                continue
            (row,) = [
                line for line in section.splitlines() if line.startswith(f"| `{field.name}` ")
            ]
            assert field.type_text in row
            assert field.doc, f"{path}.{field.name} has no description"

    check(EngineConfig, "")
