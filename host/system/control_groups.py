"""The control groups of this process, which limit the resources of containers and services.

The figures of the system are those of the whole host: memory.py and threads.py, which size caches
and thread pools, ask here for the smaller limits of a container.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def control_groups(controller: str, proc: Path = PROC) -> Iterator[Path]:
    """Yield the folders of the groups of this process, and of their parents.

    Args:
        controller: the resource, "memory" or "cpu"; its groups of version 1, and all of version 2.
        proc: the system's folder of processes.
    """
    for top, group in _groups(controller, proc):
        yield group
        while group != top:
            group = group.parent
            yield group


def read_control(path: Path) -> str | None:
    """Return the content of a group's file; None if there is none."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def oom_kills(proc: Path = PROC) -> int | None:
    """Return how many processes of this group the kernel has killed since memory was used up.

    Returns:
        None where the system does not count them.
    """
    for group in control_groups("memory", proc):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, and of version 1
            match = _OOM_KILLS.search(read_control(group / name) or "")
            if match:
                return int(match[1])
        break  # an outer group counts the processes of others
    return None


def _groups(controller: str, proc: Path) -> Iterator[tuple[Path, Path]]:
    with contextlib.suppress(OSError, ValueError, IndexError):  # no Linux, or no control groups
        paths = {}
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                paths[bool(controllers)] = path
        for line in (proc / "self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            root, mount = left.split(" ")[3:5]
            kind, _, options = right.split(" ", 2)
            first = kind == "cgroup" and controller in options.split(",")
            if (first or kind == "cgroup2") and first in paths:
                top = Path(mount.replace("\\040", " "))
                yield top, _below(top, root, paths[first])


def _below(top: Path, root: str, path: str) -> Path:
    """Return the folder of a control group below the mount point `top` of its ancestor `root`."""
    inside = PurePosixPath(path)
    # In a container the path may be that of the host, whose root is not mounted here.
    if ".." in inside.parts or not inside.is_relative_to(root):
        return top
    folder = top / inside.relative_to(root)
    return folder if folder.is_dir() else top
