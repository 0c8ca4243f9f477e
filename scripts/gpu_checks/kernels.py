"""Kernels against their twins: the tests of the package, on the device."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .device import INTERPRETER, Device, num_processes
from .models import Sizes
from .outcomes import OPTION, Outcomes
from .recorder import Check, Recorder

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "pyproject.toml"
_SUITES = ("TestTritonOps", "TestFewRowProducts", "TestTritonAttention")
_AT_ONCE = 8  # test processes on one GPU; most of their time is compilation, on the CPU
_SHOWN = 5
_TAIL = 500


def check_kernels(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Run the tests of each file of kernels, and the conformance suites, each file a check."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_triton_*.py"))
    suites = ROOT / "tests" / "plugins" / "testing" / "test_worker_conform.py"
    tests = {f"twins: {file.name}": [str(file)] for file in files}
    tests["conformance suites"] = [f"{suites}::{name}" for name in _SUITES]
    if not sizes.all_tests:
        tests = {"twins and conformance suites": [test for some in tests.values() for test in some]}
    run_tests(recorder, device, sizes, tests)


def run_tests(
    recorder: Recorder, device: Device, sizes: Sizes, tests: Mapping[str, Sequence[str]]
) -> None:
    """Run tests in processes, some at once; write the check of each as it ends.

    Args:
        recorder: writes the checks.
        device: on which they have to run.
        sizes: which tests, and how long.
        tests: arguments of pytest by the check's name.
    """
    at_once = num_processes(device, _AT_ONCE)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_once) as pool:
        run = functools.partial(_check, recorder, device, sizes)
        folders = [Path(name) / str(index) for index in range(len(tests))]
        outcomes = list(pool.map(run, tests, tests.values(), folders))
    with recorder.check("the tests ran on the device") as check:
        _check_devices(dict(zip(tests, outcomes, strict=True)), device, check)


def _check(
    recorder: Recorder,
    device: Device,
    sizes: Sizes,
    title: str,
    chosen: Sequence[str],
    folder: Path,
) -> Outcomes:
    """Run some tests as one check; return their outcomes."""
    outcomes = Outcomes()
    with recorder.check(title) as check:
        code, outcomes, output = _run(chosen, device, sizes, folder)
        print(output, flush=True)
        _judge(code, outcomes, output[-_TAIL:], sizes, check)
    return outcomes


def _run(
    chosen: Sequence[str], device: Device, sizes: Sizes, folder: Path
) -> tuple[int | None, Outcomes, str]:
    """Run tests in an empty folder.

    Returns:
        The exit code, None after the time limit; the outcomes of tests; and the output.
    """
    folder.mkdir()
    file, log = folder / "outcomes", folder / "output"
    file.touch()
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    program += [f"--rootdir={ROOT}", f"--config-file={CONFIG}"]
    program += ["-p", "gpu_checks.outcomes", f"{OPTION}={file}"]
    program += [] if sizes.all_tests else ["-p", "gpu_checks.first_tests"]
    code: int | None = None
    # Not in the root, whose folders `python -m` would find before the installed package. What a
    # test has started may outlive it, and would hold a pipe open.
    with log.open("w") as output:
        process = subprocess.Popen(
            program, cwd=folder, env=environment(device), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(sizes.tests_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    lines = file.read_text().rpartition("\n")[0].splitlines()
    return code, Outcomes.read(lines), log.read_text(errors="replace")


def environment(device: Device) -> dict[str, str]:
    """Return the variables of tests, which run kernels on the device and nowhere else."""
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return variables | {INTERPRETER: "1" if device.is_fake else "0"}


def _judge(code: int | None, outcomes: Outcomes, tail: str, sizes: Sizes, check: Check) -> None:
    """Add the outcomes of tests to a check."""
    failed = [f"{name}: {problem}" for name, problem in outcomes.failed.items()]
    check.facts |= {"passed": outcomes.passed, "failed": len(failed), "skipped": outcomes.skipped}
    check.detail = f"{outcomes.passed} tests passed"
    check.detail += f", {outcomes.skipped} skipped" if outcomes.skipped else ""
    check.problems += failed[:_SHOWN]
    if len(failed) > _SHOWN:
        check.problems.append(f"and {len(failed) - _SHOWN} more")
    if code is None:
        running = f", in {outcomes.running}" if outcomes.running else ""
        check.problems.append(f"took longer than its {sizes.tests_s:.0f} s{running}")
        return
    check.expect(outcomes.passed > 0 or bool(failed), f"no test passed (exit code {code}): {tail}")
    running = f", in {outcomes.running}" if outcomes.running else ""
    check.expect(code == 0 or bool(failed), f"pytest ended with {code}{running}: {tail}")


def _check_devices(outcomes_by_title: Mapping[str, Outcomes], device: Device, check: Check) -> None:
    """Check where processes that came to their end ran kernels."""
    ended = {title: outcomes for title, outcomes in outcomes_by_title.items() if outcomes.device}
    for title, outcomes in ended.items():
        check.expect(
            outcomes.device == device.name,
            f"{title}: ran on {outcomes.device}, expected {device.name}",
        )
    taken = max((outcomes.num_bytes for outcomes in ended.values()), default=0)
    check.facts |= {"ended": len(ended), "bytes": taken}
    check.expect(bool(ended), "no process of tests came to its end")
    check.expect(device.is_fake or taken > 0, "no test took memory of the GPU")
    check.detail = f"{device.name}, by {len(ended)} processes"
