"""Preparation of a worker: find the model and check limits before weights are loaded."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from hardpoint import typed
from hardpoint.core.weights.worker_spec import ONLY_ENGINE, EnginePlace, WorkerSpec
from hardpoint.errors import PluginConflictError, PluginFaultError, shown
from hardpoint.host.registry.loading import keeping_torch
from hardpoint.host.registry.model_files import find_files, unreadable, with_recommended
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.system.memory import is_out_of_memory, memory_limit, out_of_memory
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    Executor,
    LoaderContext,
    ModelConfig,
    ModelError,
    ModelFiles,
    Quantization,
    WeightLoader,
)
from hardpoint.plugins.component import Progress
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.toolkit.updated_weights import UpdatedWeights

_log = logging.getLogger("hardpoint")
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_SUFFIX = "ForCausalLM"
_WITH_IMAGES = "ForConditionalGeneration"
_TYPO = 0.87
"""Similarity from which a name is a typing error: above that of Mixtral and Mistral."""
_DIGITS = re.compile(r"\d+")
"""Names that differ in these alone are of several generations, each a model of its own."""


def limits_of(config: EngineConfig, max_model_len: int) -> SchedulerLimits:
    """Return the scheduler's limits, of an engine without parts and with one batch at a time.

    Raises:
        ConfigError: limits that cannot work together.
    """
    scheduler = config.scheduler
    return SchedulerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        chunked_prefill=scheduler.chunked_prefill,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        max_waiting=scheduler.max_waiting,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        step_milliseconds=scheduler.step_milliseconds or 0.0,
    )


def num_batches(config: EngineConfig) -> int:
    """Return how many steps are to be in flight at once."""
    stages = min(config.parallel.pipeline, Executor.MAX_CONCURRENT_BATCHES)
    return 2 if stages == 1 and config.scheduler.asynchronous else stages


def _with_overlap(
    config: EngineConfig, device: torch.device, plugins: PluginSet
) -> tuple[EngineConfig, Sequence[str]]:
    """Return the configuration with `scheduler.asynchronous` resolved, and the obstacles."""
    scheduler, parallel = config.scheduler, config.parallel
    if scheduler.asynchronous != "auto":
        return config, ()
    executor = plugins.one("executors")
    causes = {
        f"device {device.type!r}": device.type != "cuda",
        f"executor {executor.name!r}": not plugins.target(executor).overlaps_steps,
        "several ranks": parallel.world_size > 1,
        "experts in several engines": parallel.expert and parallel.data > 1,
    }
    causes_here = [cause for cause, applies in causes.items() if applies]
    if causes_here and device.type == "cuda":
        _log.info("scheduler.asynchronous: false, because of %s", ", ".join(causes_here))
    scheduler = msgspec.structs.replace(scheduler, asynchronous=not causes_here)
    return msgspec.structs.replace(config, scheduler=scheduler), causes_here


def open_loader(config: EngineConfig, plugins: PluginSet, files: ModelFiles) -> WeightLoader:
    """Return the configured loader, or the first that recognizes the files.

    Raises:
        ModelError: no enabled loader recognizes them.
    """
    use, entries = config.load.use, plugins.entries("loaders")
    for entry in entries if use == "auto" else ():
        with keeping_torch(entry.source, "recognises"):
            if plugins.target(entry).recognises(files):
                use = entry.name
                break
    if use != "auto":
        entry = plugins.get("loaders", use, PluginConflictError)
        return plugins.create(entry, LoaderContext, files=files)
    raise unreadable(files, [entry.name for entry in entries])


def prepare_worker(
    config: EngineConfig,
    plugins: PluginSet,
    config_sources: ConfigSources,
    progress: Progress,
    place: EnginePlace = ONLY_ENGINE,
) -> WorkerSpec:
    """Find the model, read its configuration, and run the cheap checks.

    Raises:
        ConfigError: limits that cannot work, or a device that is not there.
        ModelError: the model is missing, damaged or unsupported.
    """
    device = _device(config, place.local_rank)
    config, without_overlap = _with_overlap(config, device, plugins)
    loader = open_loader(config, plugins, find_files(config.model))
    source = plugins.get("loaders", loader.name).source
    try:
        # Before the fields, which other architectures may call otherwise.
        with keeping_torch(source, "architecture"):
            architecture = loader.architecture()
        if architecture is not None:
            _implementation(architecture, config, plugins, loader)
        with keeping_torch(source, "config"):
            model_config = loader.config()
    except (MemoryError, OSError, RuntimeError) as error:  # mapping files takes address space
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"model: {out_of_memory(error, memory_limit(device))}") from error
    if not isinstance(model_config, ModelConfig) or not all(
        isinstance(size, int) and size >= 1
        for size in (model_config.vocab_size, model_config.max_position_embeddings)
    ):
        raise PluginFaultError(
            f"{source}: its config() gave {repr(model_config)[:120]}, expected a ModelConfig with "
            f"sizes >= 1"
        )
    model_config = with_recommended(model_config, loader.context.files)
    if config.load.updates:
        loader = UpdatedWeights(loader, config.load.updates)
    implementation = _implementation(model_config.architecture, config, plugins, loader)
    model_config = replace(model_config, implementation=implementation)
    _check_use(config, plugins, config_sources)
    _check_quantization(config, model_config, plugins)
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
        prepare=lambda other: prepare_worker(other, plugins, config_sources, progress, place),
        place=place,
        without_overlap=without_overlap,
    )


def _implementation(
    name: str, config: EngineConfig, plugins: PluginSet, loader: WeightLoader
) -> str:
    if not isinstance(name, str):
        source = plugins.get("loaders", loader.name).source
        raise PluginFaultError(
            f"{source}: it gave the architecture {shown(name)}, expected a string"
        )
    models = config.models
    other = models.use if models.use != "auto" else models.fallback
    if models.use == "auto" and (plugins.find("models", name, PluginConflictError) is not None):
        return name
    if other != "none":
        entry = plugins.get("models", other, PluginConflictError)
        if (implementation := plugins.target(entry).implementation(name)) is not None:
            return str(implementation)
        if models.use != "auto":
            raise ModelError(
                f"models.use: {entry.source} does not compute the architecture {shown(name)}"
            )
    entries = [e for e in plugins.entries("models") if plugins.target(e).is_architecture]
    known = {entry.name.removesuffix(_SUFFIX): entry.name for entry in entries}
    letters = _DIGITS.sub("", name)
    others = [short for short, of in known.items() if _DIGITS.sub("", of) != letters]
    close = difflib.get_close_matches(name.removesuffix(_SUFFIX), others, n=1, cutoff=_TYPO)
    meant = f" (did you mean {known[close[0]]!r}?)" if close else ""
    if name.endswith(_WITH_IMAGES) and (text := name.removesuffix(_WITH_IMAGES)) in known:
        meant = f": it has inputs besides text; checkpoints of {known[text]!r} are of text alone"
    raise ModelError(
        f"model: architecture {shown(name)} is not supported{meant}"
        f"{plugins.hint(name, 'models')}{loader.remark()}; supported: "
        f"{', '.join(sorted(known.values())) or 'none'}. A plugin of the kind models "
        "adds one: docs/write-a-model.md"
    )


def _check_use(config: EngineConfig, plugins: PluginSet, config_sources: ConfigSources) -> None:
    use = config.quantization.use
    if use in ("auto", "none") or plugins.find("quantizations", use) is not None:
        return
    known = sorted(entry.name for entry in plugins.entries("quantizations"))
    raise ConfigError(
        config_sources.locate(
            f"quantization.use: no quantization scheme {use!r} is enabled"
            f"{typed.suggest(use, ['auto', 'none', *known])}{plugins.hint(use, 'quantizations')}; "
            f"expected auto, none, or one of {', '.join(known) or 'no scheme'}"
        )
    )


def _check_quantization(config: EngineConfig, model: ModelConfig, plugins: PluginSet) -> None:
    name = model.quantization
    if name is None:
        return
    entry = plugins.find("quantizations", name, PluginConflictError)
    if entry is not None and _reads(plugins, entry):
        return
    known = sorted(e.name for e in plugins.entries("quantizations") if _reads(plugins, e))
    raise ModelError(
        f"model: {config.model!r} has weights that are quantized by {shown(name)}, which is not "
        f"supported{plugins.hint(name, 'quantizations')}; supported: {', '.join(known) or 'none'}, "
        f"and weights that are not quantized. A plugin of the kind quantizations adds one: "
        f"docs/write-a-quantization-scheme.md"
    )


def _reads(plugins: PluginSet, entry: PluginEntry) -> bool:
    read: object = plugins.target(entry).read
    return read is not Quantization.read


def _max_model_len(
    config: EngineConfig, model_config: ModelConfig, config_sources: ConfigSources
) -> int:
    longest = model_config.max_position_embeddings
    if config.max_model_len is None or config.max_model_len == "auto":
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the limit of the model, "
            f"got {config.max_model_len} (from {config_sources.of('max_model_len')})"
        )
    return config.max_model_len


def _check_limits(config: EngineConfig, max_model_len: int, config_sources: ConfigSources) -> None:
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


def _device(config: EngineConfig, rank: int) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            f"device: 'cuda' was asked for, but torch {torch.__version__} finds no CUDA device"
        )
    if not has_cuda or config.device == "cpu":
        return torch.device("cpu")
    parallel, count = config.parallel, torch.cuda.device_count()
    engines = parallel.num_local
    if engines > 1 and engines * parallel.world_size > count:
        raise ConfigError(
            f"parallel.data: {engines} engines of {parallel.world_size} ranks need as many "
            f"CUDA devices, their processes may use {count} (CUDA_VISIBLE_DEVICES)"
        )
    alone = engines > 1 and parallel.world_size == 1
    return torch.device("cuda", rank) if alone else torch.device("cuda")
