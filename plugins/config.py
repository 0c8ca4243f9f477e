"""The configuration tree and the source of each of its values."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from hardpoint.errors import ConfigError
from hardpoint.typed import Strict

from .config_tables import (
    AdaptersConfig,
    AttentionConfig,
    Count,
    EngineProcessConfig,
    ExecutorConfig,
    GrammarConfig,
    KVCacheConfig,
    KVEventsConfig,
    LoadConfig,
    MetricsConfig,
    ModelsConfig,
    OpsConfig,
    PluginsConfig,
    PositiveSeconds,
    QuantizationConfig,
    ReasoningConfig,
    Reference,
    SamplerConfig,
    SchedulerConfig,
    SpeculationConfig,
    StatsConfig,
    TokenizerConfig,
    ToolsConfig,
    WeightCacheConfig,
)
from .config_tables import KVConnectorConfig as KVConnectorConfig
from .image_input import ImagesConfig
from .parallel_config import ParallelConfig

__all__ = ["ConfigSources", "EngineConfig"]

T = TypeVar("T", bound=Strict)


class ConversationsConfig(Strict):
    """Conversations that stay open.

    Attributes:
        lease_seconds: time without a part or a turn after which a conversation ends.
        max_open: conversations that are open at once; further ones are refused.
        max_tokens: tokens that all open conversations hold, 4 bytes each; further parts are
            refused. Turns that run may go over it.
    """

    lease_seconds: PositiveSeconds = 600.0
    max_open: Count = 16384
    max_tokens: Count = 1 << 25


class DebugConfig(Strict):
    """Checks of the engine itself, which cost time.

    Attributes:
        kv_canary: keep with the keys and values of each token whose they are, and compare that in
            each step with what the scheduler planned. A request for which it differs ends with an
            error that names the block and what was found in it.
    """

    kv_canary: bool = False


# Positional, so that `plugin`, which is not, comes after the tables that plugins declare.
class _CoreTables(Strict, kw_only=False):
    """The settings that every engine has."""

    model: Annotated[str, Meta(min_length=1)] = "smollm2"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Count | Literal["auto"] | None = None
    backend: Reference = "auto"
    seed: Annotated[int, Meta(ge=0)] | None = None
    plugins: PluginsConfig = PluginsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    kv_connector: KVConnectorConfig = KVConnectorConfig()
    stats: StatsConfig = StatsConfig()
    metrics: MetricsConfig = MetricsConfig()
    engine: EngineProcessConfig = EngineProcessConfig()
    executor: ExecutorConfig = ExecutorConfig()
    parallel: ParallelConfig = ParallelConfig()
    sampler: SamplerConfig = SamplerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    attention: AttentionConfig = AttentionConfig()
    ops: OpsConfig = OpsConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    tools: ToolsConfig = ToolsConfig()
    grammar: GrammarConfig = GrammarConfig()
    conversations: ConversationsConfig = ConversationsConfig()
    load: LoadConfig = LoadConfig()
    models: ModelsConfig = ModelsConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    weight_cache: WeightCacheConfig = WeightCacheConfig()
    debug: DebugConfig = DebugConfig()
    images: ImagesConfig = ImagesConfig()


class EngineConfig(_CoreTables):
    """The whole configuration of an engine.

    Plugins of kind `hooks` may declare tables of their own. Those of the enabled ones are fields,
    too, of the type of a loaded configuration.

    Attributes:
        model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
        dtype: dtype of weights, hidden states and KV cache; "auto" is the checkpoint's, bfloat16 if
            that is unknown.
        device: "auto" is cuda if available, else cpu.
        max_model_len: maximum length of prompt plus output; None is the model's own limit, "auto"
            what fits into the KV cache, up to the model's limit.
        backend: attention and operations of this name, as a pair; "auto" is the fastest built-in
            one of each that runs on the device.
        seed: for requests without a seed of their own; None draws one.
        plugin: options of plugins, by their names.
    """

    plugin: dict[str, dict[str, Any]] = {}

    tables: ClassVar[tuple[tuple[str, type[Strict]], ...]] = ()
    """Name and type of each table that a plugin declares."""

    @classmethod
    def with_tables(cls, tables: Mapping[str, type[Strict]]) -> type[EngineConfig]:
        """Return the type of a configuration with the tables of plugins, by their names."""
        return _with_tables(tuple(tables.items()))

    def without_tables(self) -> EngineConfig:
        """Return this configuration without the tables of plugins, as engines and workers get it.

        Plugins use their tables where requests come in, so other processes need not import them.
        """
        fields = EngineConfig.__struct_fields__
        return EngineConfig(**{name: getattr(self, name) for name in fields})

    def table(self, type_: type[T]) -> T:
        """Return the table of a type, such as the one that a plugin declares.

        Raises:
            ConfigError: no enabled plugin declares one.
        """
        for name in self.__struct_fields__:
            if type(table := getattr(self, name)) is type_:
                return table
        raise ConfigError(
            f"config: no enabled plugin declares a table of {type_.__module__}:{type_.__qualname__}"
        )

    def __reduce__(self) -> tuple[Callable[..., EngineConfig], tuple[Any, ...]]:
        """Pickle and copy it by the tables of its type, which no module has."""
        return _restored, (self.tables, {n: getattr(self, n) for n in self.__struct_fields__})


@functools.cache
def _with_tables(tables: tuple[tuple[str, type[Strict]], ...]) -> type[EngineConfig]:
    if not tables:
        return EngineConfig
    namespace = {
        "__module__": EngineConfig.__module__,
        "__doc__": EngineConfig.__doc__,
        "__annotations__": dict(tables),
        "tables": tables,
        **{name: type_() for name, type_ in tables},
    }

    def fill(body: dict[str, Any]) -> None:
        body.update(namespace)

    return types.new_class("EngineConfig", (EngineConfig,), {"kw_only": False}, fill)


def _restored(
    tables: tuple[tuple[str, type[Strict]], ...], fields: Mapping[str, Any]
) -> EngineConfig:
    return _with_tables(tables)(**fields)


class ConfigSources:
    """The source of each configuration value."""

    def __init__(self, by_path: Mapping[str, str] | None = None) -> None:
        """`by_path` maps a dotted path to a source such as `file hardpoint.toml`."""
        self.by_path = dict(by_path or {})

    def of(self, path: str) -> str:
        """Return the source of a path, those of its parts, or that of its nearest parent.

        It is "default" if none has one.
        """
        parts = (f"{path}.", f"{path}[")
        if path not in self.by_path and (
            of_parts := [s for name, s in self.by_path.items() if name.startswith(parts)]
        ):
            return " and ".join(dict.fromkeys(of_parts))
        while path:
            if path in self.by_path:
                return self.by_path[path]
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return "default"

    def locate(self, message: str) -> str:
        """Append the source of the path that a message starts with."""
        return f"{message} (from {self.of(message.split(': ', 1)[0])})"
