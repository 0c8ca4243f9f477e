"""Comparison of a head with an engine that joins it: versions, model, plugins."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hardpoint.errors import ConfigError, PluginLoadError
from hardpoint.host.registry.discovery import discover, installed_version
from hardpoint.host.registry.kinds import KINDS, Process
from hardpoint.host.registry.model_files import find_files
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.process.protocol import PROTOCOL_VERSION
from hardpoint.toolkit.processor import processor_facts, processor_flags

from .messages import Hello

_VECTORS = re.compile(
    "avx2|fma|avx512(f|bw|vl|_vnni|_bf16|_fp16)|amx_(tile|int8|bf16)|asimd(hp)?|bf16|i8mm|sve"
)
"""Instructions for which kernels have paths of their own."""

_WHOLE_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def hello_of(config: EngineConfig) -> Hello:
    """Return the versions and the model of a program with a configuration.

    Raises:
        ModelError: the model is not there.
        ConfigError: its files cannot be read.
    """
    files = find_files(config.model)
    return Hello(
        hardpoint=installed_version(),
        torch=importlib.metadata.version("torch"),
        wire=PROTOCOL_VERSION,
        contracts={kind.name: kind.contract for kind in KINDS.values()},
        host=socket.gethostname(),
        model=config.model,
        fingerprint=_fingerprint(files.path),
        processor=processor(),
    )


def processor(system: Path = Path("/proc")) -> str:
    """Return the kind of this machine's processors, by which results differ in the last bits.

    Args:
        system: the folder of the system's facts.
    """
    facts = processor_facts(system)
    properties = [platform.machine(), facts.get("vendor_id", facts.get("CPU implementer", ""))]
    properties += sorted(filter(_VECTORS.fullmatch, processor_flags(facts)))
    for card in sorted(system.glob("driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError):
            properties.append(
                card.read_text(errors="replace").partition("Model:")[2].split("\n")[0]
            )
    return " ".join(" ".join(properties).split())


def difference(head: Hello, engine: Hello) -> str | None:
    """Return the first difference between two sides that prevents working together."""
    for name, mine, theirs in (
        ("version of hardpoint", head.hardpoint, engine.hardpoint),
        ("version of torch", head.torch, engine.torch),
        ("wire protocol", head.wire, engine.wire),
    ):
        if mine != theirs:
            return f"{name}: the head {head.host} has {mine}, the engine on {engine.host} {theirs}"
    for kind in sorted(head.contracts.keys() | engine.contracts.keys()):
        wanted, version = head.contracts.get(kind), engine.contracts.get(kind)
        if wanted != version:
            return (
                f"contract of {kind}: the head {head.host} has version {wanted}, the engine on "
                f"{engine.host} {version}"
            )
    if head.fingerprint != engine.fingerprint:
        return (
            f"model: the head {head.host} has {head.model!r} with the fingerprint "
            f"{head.fingerprint[:12]}, the engine on {engine.host} has {engine.model!r} with "
            f"{engine.fingerprint[:12]}"
        )
    return None


def check_manifest(theirs: Manifest, manifest: Manifest, head: str) -> None:
    """Check that this program itself has enabled each plugin of another program.

    Or one that comes with Hardpoint, of which versions are the same, without options.

    Args:
        theirs: the other program's.
        manifest: what is installed and enabled here.
        head: names the other program in messages.

    Raises:
        PluginLoadError: one is not, or with another version or other options.
    """
    known = {entry.key: _compared(entry) for entry in manifest.tree()}
    built_in = {(f.kind, f.name, f.value) for f in discover() if f.builtin}
    here = socket.gethostname()
    for entry in theirs.tree():
        if entry.kind in KINDS and KINDS[entry.kind].processes == (Process.FRONTEND,):
            continue  # no engine loads it
        mine = known.get(entry.key)
        if mine is None:
            if entry.key in built_in and not entry.options and not entry.wraps:
                continue
            raise PluginLoadError(
                f"{entry.source}: the head {head} has it enabled, the configuration on {here} "
                "enables none such, and nothing else is loaded"
            )
        if mine == (other := _compared(entry)):
            continue
        for field in ("version", "distribution", "options", "wraps"):
            if getattr(mine, field) != getattr(other, field):
                raise PluginLoadError(
                    f"{entry.source}: {field}: the head {head} has "
                    f"{_described(other, field)}, here on {here} it is {_described(mine, field)}"
                )


def _compared(entry: PluginEntry) -> PluginEntry:
    wraps = {use: _compared(wrapped) for use, wrapped in entry.wraps.items()}
    return msgspec.structs.replace(entry, origin="", place=0, wraps=wraps)


def _described(entry: PluginEntry, field: str) -> str:
    value = getattr(entry, field)
    if field == "options":  # a password may be among the values
        return f"others, of {', '.join(sorted(value)) or 'none'}"
    return ", ".join(sorted(value)) if field == "wraps" else str(value)


def _fingerprint(path: Path) -> str:
    """Return a digest of a model's files: of small ones whole, of large ones size and samples.

    Raises:
        ConfigError: one cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in _model_files(path):
            size = file.stat().st_size
            name = "" if file == path else file.relative_to(path).as_posix()
            digest.update(f"{name}\0{size}\0".encode())
            with file.open("rb") as opened:
                if size <= _WHOLE_BYTES:
                    digest.update(opened.read())
                    continue
                for sample in range(_SAMPLES):
                    opened.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    digest.update(opened.read(_SAMPLE_BYTES))
    except OSError as cause:
        raise ConfigError(f"model: {str(path)!r} cannot be read: {cause.strerror}") from None
    return digest.hexdigest()


_MODEL_SUFFIXES = {".json", ".safetensors", ".gguf", ".model", ".jinja", ".txt", ".tiktoken"}


def _model_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.iterdir()):
        if file.suffix in _MODEL_SUFFIXES and file.is_file():
            yield file
