"""Builds an engine and its frontend from a configuration."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.core.client.base import EngineCoreClient, InprocClient, RemoteClient
from hardpoint.core.client.event_loop import EventLoopBridge
from hardpoint.core.client.process_client import EngineStart, ProcessClient, Sink
from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.core.engine_process.process import EngineProcess
from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.engine_parts import Companion, EngineParts, Opening
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.outputs.output_parsers import OutputParsers
from hardpoint.core.frontend.statistics import Statistics, open_statistics
from hardpoint.errors import PluginConflictError, PluginLoadError
from hardpoint.host.boundary.errors import naming_plugin
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts, frontend_parts
from hardpoint.host.boundary.text_guards import open_parser, open_tokenizer
from hardpoint.host.registry.blame import close_if_failed, faults_as
from hardpoint.host.registry.discovery import InstalledPlugin, installed_version
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.registry.model_files import find_files
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.host.system.process.launch import Interpreter
from hardpoint.host.system.resources import check_descriptors
from hardpoint.host.system.threads import short_spin
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    ModelFiles,
    OutputParser,
    RequestError,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component.base import Progress, no_progress
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.typed import join_path, read_only

from .kv_cache import CacheSize

if TYPE_CHECKING:
    from .engine.inputs import OpenInputs
    from .weights.worker_spec import WorkerSpec

_log = logging.getLogger("hardpoint")

OpenCompanion = Callable[[Opening], Companion]
OpenStatistics = Callable[[EngineConfig, PluginSet, Callable[[], float]], Statistics | None]

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


OpenClient = Callable[[EngineStart, Sink | None, EngineProcess | None, PluginSet], RemoteClient]
"""Opens a client with what its engine is started with, what gets its outputs, its process, which
waits for the launch (None if it has none yet), and the plugins.
"""


def open_process_client(
    start: EngineStart, sink: Sink | None, process: EngineProcess | None, plugins: PluginSet
) -> RemoteClient:
    """Return the client of one engine, which is not restarted."""
    del plugins
    return ProcessClient(start, sink, process)


def build_engine(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    *,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.monotonic,
    handed: Sequence[InstalledPlugin] = (),
    open_client: OpenClient = open_process_client,
    companions: Sequence[OpenCompanion] = (),
    open_inputs: OpenInputs | None = None,
) -> LLMEngine:
    """Resolve the plugins, find the model, do all cheap checks, then load.

    Args:
        config: the configuration.
        config_sources: sources of its values.
        progress: receives the progress of long work.
        clock: clock of the engine and the frontend, in seconds.
        handed: the plugins that the program hands over, see `handed_over`.
        open_client: opens the client of an engine in a process of its own, or of several.
        companions: open what the program has next to the engine.
        open_inputs: as of `build_core`, for an engine in this process; None is its default.

    Raises:
        ConfigError, PluginError: before any weight is read.
        ModelError: the model is missing, damaged or unsupported.
        EngineDeadError: the engine's process ended or was not ready in time.
    """
    began = time.perf_counter()
    sources = config_sources or ConfigSources()
    prepare = functools.partial(_prepare, config, sources, progress, clock, handed, companions)
    if config.engine.in_process:
        if config.kv_events.publishers:  # which open sockets
            check_descriptors()
        prepared = prepare()
        with prepared.closed_on_error(), naming_plugin(prepared.spec.plugins):
            from hardpoint.core.engine.build import build_core  # noqa: PLC0415 - needs torch
            from hardpoint.core.engine.inputs import EngineInputs  # noqa: PLC0415 - as above

            built = build_core(
                prepared.spec,
                prepared.hooks,
                prepared.config_sources,
                clock,
                vocabulary=prepared.vocabulary,
                open_inputs=open_inputs or EngineInputs,
            )
            parts = prepared.parts(InprocClient(built.core, built.info.process_id), built.size)
    else:
        with _spawned() if config.parallel.num_local else contextlib.nullcontext() as spawned:
            prepared = prepare()
            parts = _in_own_process(prepared, spawned, None, open_client)
    engine = LLMEngine(parts)
    _start_hooks(parts, prepared, engine.close, time.perf_counter() - began)
    return engine


def build_async_engine(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    *,
    progress: Progress = no_progress,
    handed: Sequence[InstalledPlugin] = (),
    open_client: OpenClient = open_process_client,
    companions: Sequence[OpenCompanion] = (),
    starts_engine: bool = True,
    open_statistics: OpenStatistics = open_statistics,
) -> AsyncEngine:
    """Build an engine for an event loop; it always has a process of its own.

    Args:
        config, config_sources, progress, handed, open_client, companions: as for `build_engine`.
        starts_engine: whether a process is started; the client of another one has its own.
        open_statistics: opens what gathers figures of requests.

    Raises:
        ConfigError, PluginError, ModelError, EngineDeadError: as `build_engine`.
    """
    began = time.perf_counter()
    bridge = EventLoopBridge()
    with _spawned() if starts_engine else contextlib.nullcontext() as spawned:
        sources = config_sources or ConfigSources()
        given = handed, companions, open_statistics
        prepared = _prepare(config, sources, progress, time.monotonic, *given)
        parts = _in_own_process(prepared, spawned, bridge, open_client)
    engine = AsyncEngine(parts, bridge)
    _start_hooks(parts, prepared, engine.close, time.perf_counter() - began)
    return engine


@dataclass(frozen=True)
class _Prepared:
    """The parts of an engine that do not depend on its process."""

    config: EngineConfig
    config_sources: ConfigSources
    hooks: HookSet
    spec: WorkerSpec
    tokenizer: Tokenizer
    parsers: OutputParsers
    clock: Callable[[], float]
    statistics: Statistics | None
    step_parts: FrontendParts
    companions: Sequence[Companion]
    vocabulary: Vocabulary | None

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the plugins of the frontend if the body fails."""
        with contextlib.ExitStack() as undo:
            for companion in self.companions:
                undo.callback(companion.close)
            if self.statistics is not None:
                undo.callback(self.statistics.close)
            undo.callback(self.step_parts.close)
            yield
            undo.pop_all()

    def parts(self, client: EngineCoreClient, size: CacheSize) -> EngineParts:
        """Return the parts of an engine of that size; its client is closed if calling it fails.

        Raises:
            EngineDeadError: the engine's process has ended since it was ready.
        """
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
            parsers=self.parsers,
            client=client,
            supported_tasks=tuple(tasks),
            components=[spec.loader, self.tokenizer, *self.parsers.components],
            clock=self.clock,
            statistics=self.statistics,
            step_parts=self.step_parts,
            companions=self.companions,
        )


def _prepare(
    config: EngineConfig,
    config_sources: ConfigSources,
    progress: Progress,
    clock: Callable[[], float],
    handed: Sequence[InstalledPlugin],
    companions: Sequence[OpenCompanion],
    open_statistics: OpenStatistics = open_statistics,
) -> _Prepared:
    log_opening(config, config_sources)
    # Imported here, so that an engine process is started before torch takes its second, and before
    # plugins import torch.
    with short_spin():
        from hardpoint.core.engine.prepare import prepare_worker  # noqa: PLC0415
    plugins = resolve_plugins(config, config_sources, handed=handed)
    _announce(plugins)
    hooks = plugins.hooks()
    with naming_plugin(plugins):
        spec = prepare_worker(config.without_tables(), plugins, config_sources, progress)

    def new_tokenizer() -> Tokenizer:
        files, vocab_size = spec.loader.context.files, spec.model_config.vocab_size
        return _tokenizer(config, plugins, files, vocab_size)

    tokenizer = new_tokenizer()
    parsers = _output_parsers(config, plugins, tokenizer, spec.model_config.vocab_size)
    vocabulary = _AskedVocabulary(tokenizer)
    with naming_plugin(plugins):
        step_parts = frontend_parts(
            plugins,
            spec.for_parts | {"config": config},
            vocabulary,
            spec.model_config.vocab_size,
            functools.partial(tokenizer.encode, add_special_tokens=False),
        )
    with contextlib.ExitStack() as undo:
        undo.callback(step_parts.close)
        opening = Opening(config, plugins, spec.model_config, spec.max_model_len, new_tokenizer)
        opened: list[Companion] = []
        for open_companion in companions:
            opened.append(open_companion(opening))
            undo.callback(opened[-1].close)
        statistics = open_statistics(config, plugins, clock)
        undo.pop_all()
    return _Prepared(
        config,
        config_sources,
        hooks,
        spec,
        tokenizer,
        parsers,
        clock,
        statistics,
        step_parts,
        opened,
        vocabulary.found,
    )


@contextlib.contextmanager
def _spawned() -> Iterator[tuple[EngineProcess, Interpreter]]:
    check_descriptors()
    interpreter = Interpreter.current()
    process = EngineProcess.spawn(interpreter)
    try:
        yield process, interpreter
    except BaseException:
        process.close(grace_s=0)
        raise


def _in_own_process(
    prepared: _Prepared,
    spawned: tuple[EngineProcess, Interpreter] | None,
    sink: Sink | None,
    open_client: OpenClient,
) -> EngineParts:
    spec, (process, interpreter) = prepared.spec, spawned or (None, Interpreter.current())
    start = EngineStart(
        config=spec.config,
        config_sources=prepared.config_sources,
        manifest=spec.plugins.manifest,
        log_level=logging.getLevelName(_log.getEffectiveLevel()),
        interpreter=interpreter,
        vocab_size=spec.model_config.vocab_size,
        vocabulary=prepared.vocabulary,
    )
    with prepared.closed_on_error():
        client = open_client(start, sink, process, spec.plugins)
        size = CacheSize(client.ready.num_gpu_blocks, client.ready.max_model_len)
        return prepared.parts(client, size)


def _start_hooks(
    parts: EngineParts, prepared: _Prepared, close: Callable[[], None], seconds: float
) -> None:
    """Call the hooks for a ready engine; close it if one of them fails."""
    info = {
        "model": parts.config.model,
        "dtype": str(prepared.spec.dtype).removeprefix("torch."),
        "max_model_len": parts.config.max_model_len,
        "num_blocks": parts.config.kv_cache.num_blocks,
        "load_seconds": seconds,
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
            "installed plugins that are not enabled: %s", ", ".join(found.label for found in idle)
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


class _AskedVocabulary:
    """The vocabulary of the tokenizer, for frontend halves of step parts.

    Attributes:
        found: the vocabulary; None if none has asked, or the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.found: Vocabulary | None = None

    def __call__(self) -> Vocabulary:
        """Return the vocabulary.

        Raises:
            NotImplementedError: the tokenizer has none; with the reason.
        """
        if self.found is None:
            self.found = self._tokenizer.vocabulary()
        return self.found


def _output_parsers(
    config: EngineConfig, plugins: PluginSet, tokenizer: Tokenizer, vocab_size: int
) -> OutputParsers:
    opened: dict[tuple[str, str], OutputParser] = {}
    by_kind = {}
    for kind, name in (
        ("reasoning_parsers", config.reasoning.parser),
        ("tool_parsers", config.tools.parser),
    ):
        entry = _named_parser(kind, name, plugins, tokenizer)
        if entry is None:
            continue
        key = (entry.name, entry.value)  # a class of both roles is one component
        try:
            if key not in opened:
                opened[key] = open_parser(plugins, entry, tokenizer, vocab_size)
        except ConfigError as cause:
            if name != "auto":
                raise
            _log.warning(
                "%s: the chat template shows %r, which is left out: %s", kind, entry.name, cause
            )
            continue
        by_kind[kind] = opened[key]

    def of_any_model() -> OutputParser | None:
        for entry in plugins.entries("tool_parsers"):
            if plugins.target(entry).any_model:
                return open_parser(plugins, entry, tokenizer, vocab_size)
        return None

    has_format = "tool_parsers" in by_kind or config.tools.parser != "auto"
    parsers = OutputParsers(tokenizer, by_kind, (), None if has_format else of_any_model)
    _log_text_markers(parsers, tokenizer)
    return parsers


def _log_text_markers(parsers: OutputParsers, tokenizer: Tokenizer) -> None:
    if parsers.reasoning is None:
        return
    special = set(tokenizer.special_tokens.values())
    try:
        markers = parsers.reasoning.markers()
    except RequestError:  # each request is refused with it
        return
    texts = [
        repr(tokenizer.decode(marker, skip_special_tokens=False))
        for marker in (*markers.start, *markers.end)
        if not special.intersection(marker)
    ]
    if texts:
        _log.info(
            "reasoning_parsers: %s: %s: no special tokens of this tokenizer, so that any text with "
            "them counts; thinking budgets and grammars go by their usual tokens",
            parsers.reasoning.name,
            ", ".join(texts),
        )


def _named_parser(
    kind: str, name: str, plugins: PluginSet, tokenizer: Tokenizer
) -> PluginEntry | None:
    if name == "none":
        return None
    if name != "auto":
        return plugins.get(kind, name)
    template = "".join(tokenizer.chat_templates.values())
    fitting = [
        (sum(map(len, marks)), entry)
        for entry in plugins.entries(kind)
        if template and (marks := plugins.target(entry).template_marks)
        if all(mark in template for mark in marks)
    ]
    if not fitting:
        return None
    _, entry = max(fitting, key=operator.itemgetter(0))
    _log.info("%s: %s, for the model's chat template shows its markers", kind, entry.name)
    return plugins.get(kind, entry.name, PluginConflictError)
