"""The commands that install Hardpoint have one name, in pages and errors."""

import re
import subprocess
from pathlib import Path

import pytest

from hardpoint.errors import PIP_NAME, install_command

ROOT = Path(__file__).resolve().parent.parent


def test_the_pages_have_the_name():
    command = [str(ROOT / "scripts/install-commands"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), "run scripts/install-commands"


@pytest.mark.parametrize("extra", ["gpu", "ray-serve", "testing"])
def test_the_command_of_an_error(extra):
    assert install_command(extra) == f"pip install '{PIP_NAME}[{extra}]'"


def test_no_other_source_has_a_command():
    folders = ("src/hardpoint", "core", "host", "plugins", "builtin_plugins", "deployment")
    found = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if re.search("pip install '?hardpoint", path.read_text())
    ]
    assert found == []
