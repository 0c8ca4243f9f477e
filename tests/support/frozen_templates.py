"""The digests of the templates of packages, which are frozen when a version is published.

    PYTHONPATH=tests python -m support.frozen_templates

writes `tests/compatibility/templates.json`. A package has the version that it was made from, and
`hardpoint plugins new --update` renders that again; so a version's files never change. A new
version, or the template of a new kind, is added to the record.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from hardpoint.builtin_plugins.scaffold.templates import templates_folder

RECORD = Path(__file__).parents[1] / "compatibility" / "templates.json"


def recorded() -> dict[str, str]:
    """Return the record: the SHA-256 of each file, by its path in the folder of templates."""
    digests: dict[str, str] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return digests


def digests() -> dict[str, str]:
    """Return the same of the files that are there."""
    folder = Path(str(templates_folder()))
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix == ".txt"
    }


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the changes of a published version: of its files, or of the kinds that it has."""
    versions = {path.partition("/")[0] for path in before}
    differences = [
        f"{path} {'changed' if path in now else 'is gone'}"
        for path, digest in before.items()
        if now.get(path) != digest
    ]
    for path in sorted(now.keys() - before.keys()):
        version, _, rest = path.partition("/")
        if version in versions and not rest.startswith("kinds/"):
            differences.append(f"{path} is new")
    return differences


def _main() -> int:
    differences = changes(recorded(), digests())
    for change in differences:
        print(f"{change}: make a new version of the templates, in a folder of its own")
    if not differences:
        RECORD.write_text(json.dumps(digests(), indent=1) + "\n")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(_main())
