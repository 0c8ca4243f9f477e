"""The configuration tree and the source of each of its values."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, field

from hardpoint.errors import ConfigError
from hardpoint.typed import Strict

from .tables import (
    AdaptersConfig,
    AttentionConfig,
    Count,
    EngineProcessConfig,
    ExecutorConfig,
    GrammarConfig,
    KVCacheConfig,
    KVConnectorConfig,
    KVEventsConfig,
    Live,
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

__all__ = ["ConfigSources", "EngineConfig"]


class RayConfig(Strict):
    """The table `[parallel.ray]`: engines in actors of a Ray cluster.

    Attributes:
        address: `HOST:PORT` of the cluster. "auto" is the address in RAY_ADDRESS, else the cluster
            on this machine. A cluster that the program has joined itself is used.
        num_cpus: CPUs that each rank of an engine reserves.
        num_gpus: GPUs that each rank reserves; None is 1 if the cluster has GPUs, else 0.
        resources: resources of the cluster's own kinds that each rank reserves.
    """

    address: Annotated[str, Meta(min_length=1)] = "auto"
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    num_gpus: Annotated[int, Meta(ge=0, le=1)] | None = None
    resources: dict[str, Annotated[float, Meta(gt=0)]] = {}


class ParallelConfig(Strict):
    """How many workers share the model, and how they communicate.

    Attributes:
        tensor: number of tensor-parallel ranks.
        pipeline: number of pipeline stages, each of `tensor` ranks.
        expert: expert parallelism: each rank has whole experts of a mixture of experts, instead of
            a shard of each; with `data`, over the ranks of all engines.
        communicator: moves tensors between ranks; "auto" is shared memory between the CPU
            ranks of one host, and torch.distributed elsewhere.
        start_seconds: maximum time for the ranks to connect to each other.
        data: number of data-parallel engines (replicas), each in a process of its own, with the
            whole model, or with a part of its experts (`expert`).
        balancer: load balancer, which selects the engine of each request.
        join_address: `tcp://HOST:PORT` at which remote engines join; None has no remote engines.
            With `ray`, the address that its engines connect to; None is any port of this node.
        join_address_file: file that gets the address while engines may join, with the port that
            the system chose if `join_address` has port 0.
        local: number of engines on this machine, with the lowest ranks; the others are remote, or
            run on Ray. None is all engines, with `ray` no engine.
        ray: run the engines that are not local on a Ray cluster; None does not use Ray.
        keys: folder of the keys of remote engines (`hardpoint keys`), required unless
            `join_address` is a loopback address.
        join_seconds: maximum time to wait for each remote engine, or engine on Ray.
        heartbeat_seconds: silence after which an engine counts as dead, and after which a remote
            engine process ends.
    """

    tensor: Annotated[int, Meta(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Meta(ge=1, le=1024)] = 1
    expert: bool = False
    communicator: Reference = "auto"
    start_seconds: PositiveSeconds = 120.0
    data: Annotated[int, Meta(ge=1, le=1024)] = 1
    balancer: Live[Reference] = "least_cost"
    join_address: Annotated[str, Meta(min_length=1)] | None = None
    join_address_file: Annotated[str, Meta(min_length=1)] | None = None
    local: Annotated[int, Meta(ge=0, le=1024)] | None = None
    ray: RayConfig | None = None
    keys: Annotated[str, Meta(min_length=1)] | None = None
    join_seconds: PositiveSeconds = 600.0
    heartbeat_seconds: Annotated[float, Meta(ge=0.5, le=3600)] = 10.0

    @property
    def num_local(self) -> int:
        """Number of engines that are processes of this machine."""
        if self.local is None:
            return self.data if self.ray is None else 0
        return min(self.local, self.data)

    @property
    def world_size(self) -> int:
        """Number of ranks of an engine."""
        return self.tensor * self.pipeline

    @property
    def spreads_experts(self) -> bool:
        """Whether the engines share experts, so that each needs the others in every step."""
        return self.expert and self.data > 1

    @property
    def output_rank(self) -> int:
        """The rank that samples: tensor rank 0 of the last stage."""
        return self.world_size - self.tensor


Host = Annotated[str, Meta(pattern=r"^(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*$", max_length=253)]


class RemoteImagesConfig(Strict):
    """Images that requests name by an http or https URL, which this program then fetches.

    Attributes:
        enabled: whether they are fetched at all. Requests then make this host open connections to
            public addresses.
        hosts: hosts that images may come from, in lower case; "*.example.com" stands for all hosts
            below example.com. It holds for each redirect, too. None is any.
        ports: ports that URLs may have.
        seconds: maximum time to fetch an image, redirects included.
    """

    enabled: bool = False
    hosts: list[Host] | None = None
    ports: list[Annotated[int, Meta(ge=1, le=65535)]] = field(default_factory=lambda: [80, 443])
    seconds: PositiveSeconds = 10.0


class ImagesConfig(Strict):
    """Images in prompts: where they may come from, and their limits, checked before decoding.

    Attributes:
        max_items: images of a prompt.
        max_bytes: size of an encoded image.
        max_total_bytes: size of all encoded images of a prompt.
        max_pixels: width times height of an image. A process that decodes one may use 32 bytes for
            each, and 256 MiB.
        max_total_pixels: pixels of all images of a prompt.
        max_aspect_ratio: the longer side divided by the shorter one.
        max_queued: images of one key of a server that are being read or wait for it; a request
            above it is answered with 429. One request alone may have `max_items` in any case.
        decode_seconds: maximum time to decode an image, and to process it for the model.
        folders: folders with image files that prompts may name by a path or a `file:` URL; paths
            that are relative or begin with "~" are the program's. None by default.
        remote: images by http and https URLs.
    """

    max_items: Count = 16
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 16 << 20
    max_total_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 32 << 20
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 28)] = 1 << 25
    max_total_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 1 << 26
    max_aspect_ratio: Annotated[float, Meta(ge=1, le=65536)] = 200.0
    max_queued: Count = 128
    decode_seconds: PositiveSeconds = 10.0
    folders: list[Annotated[str, Meta(min_length=1)]] = []
    remote: RemoteImagesConfig = RemoteImagesConfig()


T = TypeVar("T", bound=Strict)


class ConversationsConfig(Strict):
    """Conversations that stay open.

    Attributes:
        lease_seconds: time without a part or a turn after which a conversation ends.
        max_open: conversations that are open at once; further ones are rejected.
        max_tokens: tokens that all open conversations hold, 4 bytes each; further parts are
            rejected. Turns that run may go over it.
    """

    lease_seconds: PositiveSeconds = 600.0
    max_open: Count = 16384
    max_tokens: Count = 1 << 25


class DebugConfig(Strict):
    """Checks of the engine itself, which cost time.

    Attributes:
        kv_canary: keep with the keys and values of each token their owner, and compare it in
            each step with the plan of the scheduler. A request with a difference ends with an
            error that names the block and its contents.
        watch_plugins: compare torch's settings (default dtype and device, number of threads,
            deterministic algorithms, inference mode, gradients) before and after each call of a
            third-party plugin in a step. A warning names the plugin, the method and the setting,
            which is restored at once. Without it, the engine restores them once per step.
    """

    kv_canary: bool = False
    watch_plugins: bool = False


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

    Plugins of kind `hooks` may declare tables of their own. Tables of enabled hooks are fields,
    too, of the type of a loaded configuration.

    Attributes:
        model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
        dtype: dtype of weights, hidden states and KV cache; "auto" is the checkpoint's, bfloat16 if
            that is unknown.
        device: "auto" is cuda if available, else cpu.
        max_model_len: maximum length of prompt plus output; None is the model's own limit, "auto"
            the length that fits into the KV cache, up to the model's limit.
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
        """Return the table of a type, such as a table that a plugin declares.

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
        """Return the source of a path: its own, the sources of its parts, or its nearest parent's.

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
