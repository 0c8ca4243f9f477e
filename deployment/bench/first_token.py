"""A program: opens a model, generates a token, and writes when each stage of that ended.

Its text is run by `python -c`, so that no module is imported before it begins. It reads a
line of JSON with path of the configuration, settings and prompt, and writes one with times of
`time.monotonic` and the most memory of each process.
"""

import time

_STARTED = time.monotonic()

import json  # noqa: E402 - what begins before this is the interpreter's
import sys  # noqa: E402
from pathlib import Path  # noqa: E402


def main() -> None:
    """Run it."""
    config_path, settings, prompt = json.loads(sys.stdin.readline())
    from hardpoint import SamplingParams  # noqa: PLC0415 - what imports take is a stage
    from hardpoint.configuration.loading import load_config  # noqa: PLC0415
    from hardpoint.llm import open_resolved  # noqa: PLC0415

    times = {"interpreter": _STARTED, "imports": time.monotonic()}
    config, sources = load_config(config_path, settings=settings)
    times["configuration"] = time.monotonic()
    llm = open_resolved(config, sources, progress=False)
    times["engine"] = time.monotonic()
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    times["first token"] = time.monotonic()
    peaks = [peak("self"), *(peak(child) for child in children("self"))]
    before = time.monotonic()
    llm.close()
    print(json.dumps([times, time.monotonic() - before, peaks]))


def peak(pid: str) -> int:
    """Return the bytes that a process had resident at most; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def children(pid: str) -> list[str]:
    """Return the ids of a process's children, and of theirs."""
    ids: list[str] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                ids += [child, *children(child)]
    except (FileNotFoundError, ProcessLookupError):  # the process, or a thread of it, has ended
        pass
    return ids


if __name__ == "__main__":
    main()
