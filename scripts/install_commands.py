"""Write the commands that install Hardpoint into all pages, from one name.

scripts/install-commands           writes `hardpoint.errors.PIP_NAME` into the pages
scripts/install-commands --check   exits with 1 if a page has another name

Release: set PIP_NAME to "hardpoint", and run this program.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NAMES = r"(?:/path/to/hardpoint|hardpoint)"
_COMMAND = re.compile(rf"(pip install (?:\. )?)['\"]?{_NAMES}\[([a-z-]+)\]['\"]?")


def pip_name() -> str:
    """Return `hardpoint.errors.PIP_NAME`, without an import of the package."""
    tree = ast.parse((ROOT / "src/hardpoint/errors.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PIP_NAME":
            name: str = ast.literal_eval(node.value)
            return name
    raise SystemExit("src/hardpoint/errors.py: expected PIP_NAME, found none")


def pages() -> Iterator[Path]:
    """Yield the pages that users read, and the docstring of the conformance kit."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "examples").glob("*/README.md"))
    yield ROOT / "plugins/testing/__init__.py"


def written(text: str, name: str) -> str:
    """Return a page with the name in its commands."""
    return _COMMAND.sub(rf"\1'{name}[\2]'", text)


def main(arguments: list[str]) -> int:
    """Write the pages, or check them; return the exit code."""
    name, is_check, wrong = pip_name(), arguments == ["--check"], 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text, name)) == text:
            continue
        wrong += 1
        if is_check:
            print(f"{page.relative_to(ROOT)}: a command has another name than {name!r}")
        else:
            page.write_text(new, encoding="utf-8")
    return int(is_check and wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
