"""The key of packed weights in the weight cache: a digest of their sources."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from hardpoint.plugins import Model, Ops, WeightLoader
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config_tables import QuantizationConfig


def cache_key(
    loader: WeightLoader,
    model: Model,
    ops: Ops,
    quantization: QuantizationConfig,
    components: Iterable[tuple[PluginEntry, type]],
) -> str | None:
    """Return a text that differs whenever packed weights may; None if they are not kept.

    Args:
        model: what makes of them what is kept.
        ops: its operations, which pack.
        quantization: the configuration of weights of few bits.
        components: entries and classes of all of these, and of their wrapped components.
    """
    if not ops.layout or (fingerprint := loader.fingerprint()) is None:
        return None
    context, classes = model.context, set[type]()
    plugins = []
    for entry, cls in components:
        plugins.append((entry.value, entry.distribution, entry.version, entry.options))
        classes |= set(cls.__mro__)
    code = _code(classes)
    if code is None:
        return None
    key = {
        "files": fingerprint,
        "architecture": context.config.architecture,
        "vocab_size": context.config.vocab_size,
        "hf": context.config.hf,
        "dtype": str(context.dtype),
        "part": [
            context.parallel.tensor.rank,
            context.parallel.tensor.size,
            context.parallel.stage,
            context.parallel.num_stages,
            context.parallel.expert,
            context.parallel.engines.rank,
            context.parallel.engines.size,
        ],
        "operations": f"{ops.name} {ops.layout}",
        "quantization": quantization,
        "torch": torch.__version__,
        "byte order": sys.byteorder,
        "plugins": plugins,
        "code": code,
    }
    return msgspec.json.encode(key, enc_hook=repr, order="deterministic").decode()


def _code(classes: Iterable[type]) -> str | None:
    """Return a digest of names, sizes and times of the source files of some classes' packages.

    None if a class has no file, as in a notebook.
    """
    files: set[Path] = set()
    for name in {cls.__module__ for cls in classes}:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None:
            if name in sys.builtin_module_names:
                continue
            return None
        path = Path(file)
        files |= set(path.parent.glob("*.py")) if getattr(module, "__package__", "") else {path}
    try:
        stats = [(str(file), file.stat()) for file in sorted(files)]
    except OSError:
        return None
    seen = [(name, status.st_size, status.st_mtime_ns) for name, status in stats]
    return hashlib.sha256(repr(seen).encode()).hexdigest()
