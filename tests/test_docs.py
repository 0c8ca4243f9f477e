"""Every Python example in the README and the guides runs, page by page, as a reader would do it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# file: (\S+)\n")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readmes_plugin_is_short():
    (plugin,) = [text for _, text in blocks(ROOT / "README.md") if "class NoEcho" in text]
    assert len(plugin.splitlines()) <= 30
