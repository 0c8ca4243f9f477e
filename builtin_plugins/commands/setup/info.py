"""`hardpoint info`: versions, processor, kernels, plugins and environment, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from hardpoint.builtin_plugins.commands.shown import without_userinfo
from hardpoint.plugins import Command, CommandContext, HardpointError
from hardpoint.toolkit.processor import processor_facts, processor_flags

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("msgspec", "pyzmq", "triton", "ray", "llguidance", "xgrammar"),
)
_VARIABLES = ("HARDPOINT", "HF_", "CUDA_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "NCCL_", "RAY_")
"""Beginnings of the environment variables that change how Hardpoint runs."""
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_WIDTH = 12


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print versions, processor, kernels, plugins and environment, for a bug report. "
        "Values of keys and tokens are left out."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    facts: dict[str, list[str]] = {
        "hardpoint": [context.version, f"in {Path(__file__).resolve().parents[3]}"],
        "python": [f"{platform.python_version()} ({sys.executable})"],
        "system": [f"{platform.platform()}, {' '.join(platform.libc_ver()).strip()}"],
        "processor": _processor(),
        "memory": _memory(),
        "kernels": [_tried(_kernels)],
        "torch": [_tried(_torch)],
        "packages": _packages(),
        "plugins": _plugins(context),
        "environment": _environment(),
    }
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, lines in facts.items():
        for index, line in enumerate(lines or ["none"]):
            print(f"{'' if index else name:<{_WIDTH}} {line}")
    return 0


def _tried(find: Callable[[], str]) -> str:
    """Return a fact, or the reason why it cannot be determined."""
    try:
        return find()
    except Exception as cause:
        return f"not available: {type(cause).__name__}: {cause}"


def _processor() -> list[str]:
    facts = processor_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    prefixes = ("avx", "amx", "asimd", "sve", "fma")
    sets = [flag for flag in processor_flags(facts) if flag.startswith(prefixes)]
    count = len(os.sched_getaffinity(0))
    lines = [f"{name}, {platform.machine()}, {count} of {os.cpu_count()} cores usable"]
    return [*lines, *([" ".join(sets)] if sets else [])]


def _memory() -> list[str]:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return []
    return [f"{total / 2**30:.1f} GiB"]


def _kernels() -> str:
    from hardpoint.kernels import cpu  # noqa: PLC0415 - needs torch, which takes a second

    return f"C++ for CPUs: {cpu.load().path}"


def _torch() -> str:
    import torch  # noqa: PLC0415 - takes a second

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "CPU only"
    return f"{torch.__version__} (built for {built}), GPUs: {', '.join(names) or 'none'}"


def _packages() -> list[str]:
    lines = []
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def _plugins(context: CommandContext) -> list[str]:
    """Return the plugins of other packages; of a wrong configuration, the error."""
    try:
        components = context.load_catalog(*context.load_config()).components()
    except HardpointError as error:
        return [f"error: {error}"]
    return [
        f"{info.kind}/{info.name} of {info.package}: {'on' if info.enabled else 'off'}"
        for info in components
        if not info.distribution.startswith("hardpoint")
    ]


def _environment() -> list[str]:
    lines = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            is_secret = any(word in name.upper() for word in _SECRETS)
            lines.append(f"{name}={'***' if is_secret else without_userinfo(value)}")
    return lines


COMMAND = Command("info", "show versions, processor and plugins", _configure, _run)
