"""New files of commands, which are not there if their command fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hardpoint.plugins import RequestError


@contextlib.contextmanager
def new_file(path: str, name: str, *, keeps_lines: bool = False) -> Iterator[IO[str]]:
    """Open a file that is not there yet; it is removed again if the body fails.

    Args:
        path: path of the file.
        name: the argument that names it, for errors.
        keeps_lines: remove it only if nothing was written to it.

    Raises:
        RequestError: it is there, or cannot be written.
    """
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - closed below
    except FileExistsError:
        raise RequestError(f"{name}: expected a new file, {path!r} exists") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"{name}: {path!r} cannot be written: {reason}") from None
    try:
        with file:
            yield file
    except BaseException:
        if not keeps_lines or not _has_content(Path(path)):
            Path(path).unlink(missing_ok=True)
        raise


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
