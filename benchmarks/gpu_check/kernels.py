"""Kernels against their twins: the tests of the package, on the device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .device import Device
from .models import Sizes
from .recorder import Check, Recorder

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "pyproject.toml"
_SUITES = ("TestTritonOps", "TestTritonAttention")
_AT_ONCE = 8  # test processes on one GPU; most of their time is compilation, on the CPU
_SHOWN = 5


def check_kernels(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Run the tests of each file of kernels, and the conformance suites, each file a check."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_triton_*.py"))
    suites = ROOT / "tests" / "testing" / "test_worker_conform.py"
    tests = {f"twins: {file.name}": [str(file)] for file in files}
    tests["conformance suites"] = [f"{suites}::{name}" for name in _SUITES]
    if not sizes.all_tests:
        tests = {"twins and conformance suites": [one for some in tests.values() for one in some]}
    at_once = 1 if device.is_fake else min(_AT_ONCE, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_once) as pool:
        runs = [
            (what, pool.submit(_run, chosen, sizes, Path(name) / str(index)))
            for index, (what, chosen) in enumerate(tests.items())
        ]
        for what, future in runs:
            with recorder.check(what) as check:
                _read(*future.result(), check)


def _run(chosen: list[str], sizes: Sizes, folder: Path) -> tuple[int, str, Path]:
    """Run tests in an empty folder; return the exit code, the output and the file of results."""
    folder.mkdir()
    results = folder / "results.xml"
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    program += [f"--junitxml={results}", f"--rootdir={ROOT}", f"--config-file={CONFIG}"]
    program += [] if sizes.all_tests else ["-p", "gpu_check.first_tests"]
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Not in the root, whose folders `python -m` would find before the installed package.
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr, results


def _read(returncode: int, output: str, results: Path, check: Check) -> None:
    """Add what pytest has found to a check."""
    cases = list(ET.parse(results).iter("testcase")) if results.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or _broken(case)]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    check.facts |= {"passed": passed, "failed": len(failed), "skipped": len(skipped)}
    check.detail = f"{passed} tests passed" + (f", {len(skipped)} skipped" if skipped else "")
    for case in failed[:_SHOWN]:
        (reason,) = [*case.iter("failure"), *case.iter("error")][:1]
        message = (reason.get("message") or "").splitlines()
        check.problems.append(f"{case.get('name')}: {message[0] if message else 'failed'}")
    if len(failed) > _SHOWN:
        check.problems.append(f"and {len(failed) - _SHOWN} more")
    check.expect(
        passed > 0 or bool(failed), f"no test passed (exit code {returncode}): {output[-500:]}"
    )
    check.expect(
        returncode == 0 or bool(failed), f"pytest ended with {returncode}: {output[-500:]}"
    )
    print(output, flush=True)


def _broken(case: ET.Element) -> bool:
    return case.find("error") is not None
