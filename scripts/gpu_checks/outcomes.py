"""A plugin of pytest that writes the outcome of each test as it ends, and where kernels run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

OPTION = "--outcomes"
_KERNELS = "kernels/triton/"
_LENGTH = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file."""
    parser.addoption(OPTION, type=Path, required=True, help="the file to append to")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write."""
    config.pluginmanager.register(_Teller(config.getoption(OPTION)))


class _Teller:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"runs": _short(nodeid)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self._write(
            {"test": _short(report.nodeid), "outcome": report.outcome}
            | ({"problem": _problem(report)} if report.failed else {})
        )

    def pytest_sessionfinish(self) -> None:
        from support.triton import kernel_device

        device = kernel_device()
        num_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        self._write({"device": device, "bytes": num_bytes})

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            print(json.dumps(line), file=file)


def _short(nodeid: str) -> str:
    """Return the module and the test."""
    module, colons, test = nodeid.partition("::")
    return module.rpartition("/")[2] + colons + test


def _problem(report: pytest.TestReport) -> str:
    """Return the first line of an error, and the last line of the kernels' code that it names."""
    lines = report.longreprtext.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    text = (errors or lines[-1:] or ["failed"])[0][:_LENGTH]
    places = [line for line in lines if _KERNELS in line.partition(" ")[0]]
    if places:
        text += f" (in {_KERNELS}{places[-1].partition(_KERNELS)[2].partition(': ')[0]})"
    return text


@dataclass
class Outcomes:
    """The results of the tests of a file.

    Attributes:
        passed, skipped: numbers of tests.
        failed: message of each failed test, by name.
        running: the test that began last and has not ended.
        device: where kernels ran; empty if the process did not come to its end.
        num_bytes: size of the GPU memory that the tests took.
    """

    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    running: str = ""
    device: str = ""
    num_bytes: int = 0

    @classmethod
    def read(cls, lines: Sequence[str]) -> Outcomes:
        """Read the file's complete lines."""
        outcomes = cls()
        for line in map(json.loads, lines):
            if "runs" in line:
                outcomes.running = line["runs"]
            elif "device" in line:
                outcomes.device, outcomes.num_bytes = line["device"], line["bytes"]
            else:
                outcomes.running = ""
                outcomes.passed += line["outcome"] == "passed"
                outcomes.skipped += line["outcome"] == "skipped"
                if line["outcome"] == "failed":
                    outcomes.failed[line["test"]] = line["problem"]
        return outcomes
