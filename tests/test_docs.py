"""Every Python example in the README and the guides runs, page by page, as a reader would do it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT

from hardpoint.plugins import EngineConfig, LogitsProcessor
from hardpoint.registry.plugin_set import resolve_plugins

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# file: (\S+)\n")
DOCS = ROOT / "docs"
GENERATED = DOCS / "reference"
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if GENERATED not in page.parents),
]


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_examples_run(page, tmp_path):
    """Blocks that begin with `# file: NAME` become files; the other Python ones run in order."""
    script = []
    for language, text in blocks(page):
        if found := FILE.match(text):
            (tmp_path / found[1]).write_text(text)
        elif language == "python":
            script.append(text)
    if not script:
        pytest.skip("no Python examples")
    (tmp_path / "example.py").write_text("\n".join(script))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{label(page)} links to {target}"


def test_the_readmes_plugin_is_short():
    (plugin,) = [text for _, text in blocks(ROOT / "README.md") if "class NoEcho" in text]
    assert len(plugin.splitlines()) <= 30


PROCESSORS = [
    (entry.name, cls) for entry, cls in resolve_plugins(EngineConfig()).logits_processors()
]


@pytest.mark.parametrize(("name", "cls"), PROCESSORS, ids=[name for name, _ in PROCESSORS])
def test_every_built_in_logits_processor_has_a_page_that_is_true(name, cls):
    text = (DOCS / "builtins" / f"{name}.md").read_text()
    table = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", text, re.MULTILINE))
    fields = table.get("Field") or table["Fields"]
    assert [field for field in cls.params_fields if f"`{field}`" not in fields] == []
    assert table["Phase"].startswith(f"`{cls.phase.name}`")
    assert table["Form"].startswith("dense" if issubclass(cls, LogitsProcessor) else "sparse")
    assert ("argmax-invariant" in table["Greedy requests"]) is cls.argmax_invariant
    assert table["Source"]


def test_the_index_of_built_ins_is_in_the_order_in_which_they_run():
    index = (DOCS / "builtins" / "README.md").read_text()
    assert re.findall(r"\| \[(\w+)\]\(\1\.md\)", index) == [name for name, _ in PROCESSORS]
