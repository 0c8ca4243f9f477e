"""Builds an engine and its frontend from a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hardpoint.core.client.base import EngineCoreClient, InprocClient
from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.core.frontend.engine_owner import EngineOwner
from hardpoint.core.frontend.engine_parts import Companion, EngineParts, Opening
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import PluginLoadError
from hardpoint.host.boundary.errors import naming_plugin
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts, frontend_parts
from hardpoint.host.boundary.text_guards import open_tokenizer
from hardpoint.host.registry.blame import close_if_failed, faults_as
from hardpoint.host.registry.discovery import InstalledPlugin, installed_version
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.host.system.descriptors import check_descriptors
from hardpoint.host.system.threads import short_spin
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    IterationStats,
    ModelFiles,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component.base import Progress, no_progress
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.typed import join_path, read_only

from .kv_cache import CacheSize

if TYPE_CHECKING:
    from .engine.core import OpenInputs
    from .weights.worker_spec import StartWorker, WorkerSpec

_log = logging.getLogger("hardpoint")

Engine = TypeVar("Engine", bound=EngineOwner)

OpenCompanion = Callable[[Opening], Companion]
SendStats = Callable[[IterationStats], None]

_NAMED = frozenset({"model"})
_SECRET = frozenset({"plugin"})
"""Options of plugins are never logged: a password may be among them."""


def log_opening(config: EngineConfig, config_sources: ConfigSources) -> None:
    """Log version, model, and each value that is not its default, with its origin."""
    changed = ", ".join(
        f"{path} = {value!r} ({config_sources.of(path)})"
        for path, value in _changed(config, type(config)(), "")
        if path not in _NAMED | _SECRET
    )
    _log.info(
        "hardpoint %s: loading the model %s (%s); settings: %s",
        installed_version(),
        config.model,
        config_sources.of("model"),
        changed or "all at their defaults",
    )


def _changed(
    value: msgspec.Struct, default: msgspec.Struct, path: str
) -> Iterator[tuple[str, Any]]:
    for name in value.__struct_fields__:
        mine, other, where = getattr(value, name), getattr(default, name), join_path(path, name)
        if isinstance(mine, msgspec.Struct) and isinstance(other, msgspec.Struct):
            yield from _changed(mine, other, where)
        elif mine != other:
            yield where, msgspec.to_builtins(mine)


@dataclass(frozen=True)
class PreparedEngine:
    """The parts of an engine that do not depend on where its core runs.

    Attributes:
        spec: the plugins, and the model as workers load it.
        vocabulary: vocabulary of the tokenizer, for grammars; None if no step part uses it.
        began: when preparing began, in seconds of `time.perf_counter`.
    """

    config: EngineConfig
    config_sources: ConfigSources
    hooks: HookSet
    spec: WorkerSpec
    tokenizer: Tokenizer
    clock: Callable[[], float]
    step_parts: FrontendParts
    companions: Sequence[Companion]
    vocabulary: Vocabulary | None
    began: float

    def open(self, open_client: OpenClient, new_engine: Callable[[EngineParts], Engine]) -> Engine:
        """Open the engine core, join it with its frontend, and call the hooks of a ready engine.

        Raises:
            ModelError: the model cannot be loaded.
            EngineDeadError: the engine's process ended or was not ready in time.
        """
        with contextlib.ExitStack() as undo:
            for companion in self.companions:
                undo.callback(companion.close)
            undo.callback(self.step_parts.close)
            parts = self._parts(*open_client(self))
            undo.pop_all()
        engine = new_engine(parts)
        _start_hooks(parts, self, engine.close)
        return engine

    def _parts(self, client: EngineCoreClient, size: CacheSize) -> EngineParts:
        """Return the parts of an engine of that size; its client is closed if calling it fails."""
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            tasks = EngineUtilities.supported_tasks.call(client.call_utility)
            undo.pop_all()
        spec = self.spec
        config = msgspec.structs.replace(
            self.config,
            max_model_len=size.max_model_len,
            kv_cache=msgspec.structs.replace(self.config.kv_cache, num_blocks=size.num_blocks),
        )
        return EngineParts(
            config=config,
            config_sources=self.config_sources,
            plugins=spec.plugins,
            hooks=self.hooks,
            model_config=spec.model_config,
            tokenizer=self.tokenizer,
            client=client,
            supported_tasks=tuple(tasks),
            components=[spec.loader, self.tokenizer],
            clock=self.clock,
            step_parts=self.step_parts,
            companions=self.companions,
        )


OpenClient = Callable[[PreparedEngine], tuple[EngineCoreClient, CacheSize]]
"""Opens an engine core; returns its client and the size of its KV cache."""


def build_engine(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    *,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.monotonic,
    handed: Sequence[InstalledPlugin] = (),
    companions: Sequence[OpenCompanion] = (),
    open_inputs: OpenInputs | None = None,
    start_worker: StartWorker | None = None,
) -> LLMEngine:
    """Build an engine in this process.

    Args:
        config, config_sources, progress, clock, handed, companions: as of `prepare_engine`.
        open_inputs: as of `build_core`; None is its default.
        start_worker: as of `WorkerSpec`.

    Raises:
        ConfigError, PluginError, ModelError: as `prepare_engine`.
    """
    sources = config_sources or ConfigSources()
    if not config.engine.in_process:
        raise ConfigError(
            sources.locate(
                "engine.in_process: expected true, got false; hardpoint.process builds engines in "
                "processes of their own"
            )
        )
    if config.kv_events.publishers:  # which open sockets
        check_descriptors()
    prepared = prepare_engine(
        config, sources, progress=progress, clock=clock, handed=handed, companions=companions
    )
    return prepared.open(functools.partial(_open_in_process, open_inputs, start_worker), LLMEngine)


def _open_in_process(
    open_inputs: OpenInputs | None, start_worker: StartWorker | None, prepared: PreparedEngine
) -> tuple[EngineCoreClient, CacheSize]:
    with naming_plugin(prepared.spec.plugins):
        from hardpoint.core.engine.build import build_core  # noqa: PLC0415 - needs torch
        from hardpoint.core.engine.core import EngineInputs  # noqa: PLC0415 - as above

        built = build_core(
            dataclasses.replace(prepared.spec, start_worker=start_worker),
            prepared.hooks,
            prepared.config_sources,
            prepared.clock,
            vocabulary=prepared.vocabulary,
            open_inputs=open_inputs or EngineInputs,
        )
        return InprocClient(built.core, built.info.process_id), built.size


def prepare_engine(
    config: EngineConfig,
    config_sources: ConfigSources,
    *,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.monotonic,
    handed: Sequence[InstalledPlugin] = (),
    companions: Sequence[OpenCompanion] = (),
    send_stats: SendStats | None = None,
) -> PreparedEngine:
    """Resolve the plugins, find the model and do all cheap checks, before weights are read.

    Args:
        config, config_sources: the configuration, and the sources of its values.
        clock: clock of the engine and the frontend, in seconds.
        handed: the plugins that the program hands over, see `handed_over`.
        companions: open the companions of the engine, such as IO processors.
        send_stats: sends statistics to another process, which has the sinks; None if this process
            has them.

    Raises:
        ConfigError, PluginError, ModelError: a setting, a plugin or the model cannot be used.
    """
    began = time.perf_counter()
    hooks, spec = _resolve(config, config_sources, progress, handed)
    plugins, vocab_size = spec.plugins, spec.model_config.vocab_size
    files = spec.loader.context.files
    new_tokenizer = functools.partial(_tokenizer, config, plugins, files, vocab_size)
    tokenizer = new_tokenizer()
    vocabulary = functools.cache(tokenizer.vocabulary)
    fields = spec.for_parts | {"config": config}
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    with naming_plugin(plugins):
        step_parts = frontend_parts(
            plugins, fields, vocabulary, vocab_size, encode, clock, send_stats, tokenizer
        )
    with contextlib.ExitStack() as undo:
        undo.callback(step_parts.close)
        opening = Opening(config, plugins, spec.model_config, spec.max_model_len, new_tokenizer)
        opened: list[Companion] = []
        for open_companion in companions:
            opened.append(open_companion(opening))
            undo.callback(opened[-1].close)
        _check_parts(config, step_parts)
        undo.pop_all()
    return PreparedEngine(
        config,
        config_sources,
        hooks,
        spec,
        tokenizer,
        clock,
        step_parts,
        opened,
        vocabulary() if vocabulary.cache_info().currsize else None,  # if a part has asked for it
        began,
    )


def _check_parts(config: EngineConfig, step_parts: FrontendParts) -> None:
    for field, kind, name in (
        ("reasoning.parser", "reasoning_parsers", config.reasoning.parser),
        ("tools.parser", "tool_parsers", config.tools.parser),
    ):
        if name not in ("auto", "none") and kind not in step_parts.named_components:
            raise ConfigError(
                f"{field}: expected an enabled step part that drives {kind}, for {name!r}, got "
                'none; enable "output_parsing", of the distribution hardpoint'
            )
    if config.stats.on and not step_parts.observers:
        raise ConfigError(
            "stats: expected an enabled step part that gathers statistics, got none; enable "
            '"statistics", of the distribution hardpoint, or leave stats at its defaults'
        )


def _resolve(
    config: EngineConfig,
    config_sources: ConfigSources,
    progress: Progress,
    passed_plugins: Sequence[InstalledPlugin],
) -> tuple[HookSet, WorkerSpec]:
    log_opening(config, config_sources)
    # Imported here, so that an engine process is started before torch takes its second, and before
    # plugins import torch.
    with short_spin():
        from hardpoint.core.engine.prepare import prepare_worker  # noqa: PLC0415
    plugins = resolve_plugins(config, config_sources, passed_plugins=passed_plugins)
    _announce(plugins)
    hooks = plugins.hooks()
    with naming_plugin(plugins):
        spec = prepare_worker(config.without_tables(), plugins, config_sources, progress)
    return hooks, spec


def _start_hooks(parts: EngineParts, prepared: PreparedEngine, close: Callable[[], None]) -> None:
    info = {
        "model": parts.config.model,
        "dtype": str(prepared.spec.dtype).removeprefix("torch."),
        "max_model_len": parts.config.max_model_len,
        "num_blocks": parts.config.kv_cache.num_blocks,
        "load_seconds": time.perf_counter() - prepared.began,
    }
    with contextlib.ExitStack() as undo:
        close_if_failed(undo, close)
        parts.hooks.call("engine_started", info=read_only(info), config=parts.config)
        undo.pop_all()


def _announce(plugins: PluginSet) -> None:
    for warning in plugins.warnings:
        _log.warning("%s", warning)
    if idle := plugins.not_enabled():
        _log.info(
            "installed plugins that are not enabled: %s", ", ".join(plugin.label for plugin in idle)
        )
    for entry, cls in plugins.logits_processors():
        with faults_as(PluginLoadError, f"{entry.source}: its uses"):
            is_used = cls.uses(SamplingParams())
        if is_used:
            _log.info("enabled for every request: %s", entry.source)


def _tokenizer(
    config: EngineConfig, plugins: PluginSet, model_files: ModelFiles, vocab_size: int
) -> Tokenizer:
    path = config.tokenizer.path
    files = find_files(path, "tokenizer.path") if path else model_files
    return open_tokenizer(plugins, plugins.one("tokenizers"), files, vocab_size)
