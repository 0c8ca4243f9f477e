"""Files of folders, and where their names and links may lead: they may be hostile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hardpoint.errors import ModelError

from .hf_config import short

__all__ = ["permitted_path", "real_path"]


def real_path(folder: Path, name: str, where: str) -> Path:
    """Return the path of a file of a folder, without links; the file may be missing.

    Links may lead to other files of the folder, or to where the cache of the Hugging Face hub keeps
    the folder's files.

    Args:
        where: source of the file's name, for messages.

    Raises:
        ModelError: the name or a link leads out of the folder, or in a circle.
    """
    try:
        real, root = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as cause:  # links in a circle, for example
        raise ModelError(f"{where}: {short(name)} cannot be read: {cause.args[-1]}") from cause
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    stays = ".." not in Path(name).parts and not Path(name).is_absolute()
    if not stays or not any(real.is_relative_to(place) for place in roots):
        raise ModelError(
            f"{where}: expected files inside the folder {folder}, got {short(name)}, which leads "
            f"to {real}"
        )
    return real


def permitted_path(requested: str, folders: Sequence[str]) -> Path | None:
    """Return an absolute path without links, if it is in one of the folders; None if it is not.

    Args:
        requested: path that a caller names; it need not exist.
        folders: permitted ones; "~" is the user's.
    """
    path = Path(requested)
    if "\0" in requested or not path.is_absolute():
        return None
    try:
        real = path.resolve()
        roots = [Path(folder).expanduser().resolve() for folder in folders]
    except (OSError, RuntimeError, ValueError):  # links in a circle, or half of a surrogate pair
        return None
    return real if any(real.is_relative_to(root) for root in roots) else None
