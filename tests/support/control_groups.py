"""Control groups and a `/proc` that tests write."""

from __future__ import annotations

from pathlib import Path


def system(folder: Path, group: str, mounts: str, files: dict[str, int | str]) -> Path:
    """Write a `/proc` and control groups; `mounts` has {top} for the place of the groups."""
    top = folder / "cgroup fs"
    proc = folder / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(group)
    (proc / "mountinfo").write_text(mounts.format(top=str(top).replace(" ", "\\040")))
    for name, content in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"{content}\n")
    return folder / "proc"


V2 = "31 23 0:28 / {top} rw shared:9 - cgroup2 cgroup2 rw\n"
