"""Paths that administrators name; they have to lie in folders that the operator allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.errors import shown
from hardpoint.toolkit.folders import permitted_path

_LONGEST_PATH, _LONGEST_NAME = 4000, 255  # of Linux; with room for the name of a file


def allowed_path(requested: str, folders: Sequence[str], field: str, setting: str) -> Path:
    """Return a path without links, if it is in one of the folders.

    Args:
        requested: the path.
        folders: allowed ones.
        field: names the path in messages.
        setting: names the folders.

    Raises:
        AnswerError: it is not absolute, too long, or in none of them.
    """
    path = Path(requested)
    if "\0" in requested or not path.is_absolute():
        raise AnswerError(
            400, f"{field}: expected an absolute path, got {shown(requested, 200)}", param=field
        )
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in path.parts)
    if len(requested) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise AnswerError(
            400,
            f"{field}: expected a path of at most {_LONGEST_PATH} characters with names of at most "
            f"{_LONGEST_NAME} bytes, got {shown(requested, 200)}",
            param=field,
        )
    real = permitted_path(requested, folders)
    if real is None:
        allowed = [Path(folder).expanduser() for folder in folders]
        raise AnswerError(
            403,
            f"{field}: expected a path in one of {setting} "
            f"({', '.join(map(str, allowed)) or 'which is empty'}), got {shown(requested, 200)}",
            param=field,
            code="folder_not_allowed",
        )
    return real
