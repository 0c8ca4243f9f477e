"""The configuration tree and where each of its values came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from .typed import Strict

__all__ = [
    "AttentionConfig",
    "ConfigSources",
    "EngineConfig",
    "EngineProcessConfig",
    "ExecutorConfig",
    "KVCacheConfig",
    "KVEventsConfig",
    "LoadConfig",
    "PluginUse",
    "PluginsConfig",
    "ReasoningConfig",
    "SamplerConfig",
    "SchedulerConfig",
    "StatsConfig",
    "TokenizerConfig",
]

Reference = Annotated[
    str,
    Meta(
        min_length=1,
        description="An entry-point name, or an FQCN `package.module:Class`.",
    ),
]
Name = Annotated[str, Meta(min_length=1, description="The name of a component that is on.")]
Count = Annotated[int, Meta(ge=1)]


class PluginUse(Strict):
    """A component to enable, with the name that it shall have.

    Attributes:
        use: entry-point name or FQCN.
        name: its name here; by default the entry point's, or the class's in snake_case.
    """

    use: Reference
    name: Annotated[str, Meta(min_length=1)] | None = None


class PluginsConfig(Strict):
    """Which components are on beside the built-in defaults.

    Attributes:
        enable: components to switch on.
        disable: names of built-in defaults to switch off.
        replace: a name that is on to the component that takes its place.
        on_error: by plugin name, what a fault of it ends: "request", the requests that use it,
            "step", nothing but its say in that decision, or "engine". A plugin has the scope of
            its kind, or "engine".
        quarantine_after: so many distinct requests that a third-party plugin ended, and requests
            that use it are refused; 0 never does.
        foreign_groups: entry-point groups of other engines to look into for logits processors,
            "vllm.logits_processors" for example.
    """

    enable: list[Reference | PluginUse] = []
    disable: list[str] = []
    replace: dict[str, Reference] = {}
    on_error: dict[str, Literal["request", "step", "engine"]] = {}
    quarantine_after: Annotated[int, Meta(ge=0)] = 3
    foreign_groups: list[Literal["vllm.logits_processors"]] = []


class SchedulerConfig(Strict):
    """The scheduler, its policy and its limits.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of one step.
        chunked_prefill: compute a prompt over several steps where the budget asks for it.
        long_prefill_token_threshold: most tokens of one prompt in a step; 0 is no limit.
        max_waiting: most requests that wait; further ones are refused as "overloaded". None is
            no limit.
    """

    use: Reference = "default"
    policy: Reference = "fcfs"
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 2048
    chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Meta(ge=0)] = 0
    max_waiting: Count | None = None


class KVCacheConfig(Strict):
    """The paged KV cache.

    Attributes:
        block_size: tokens of a block; a power of two.
        num_blocks: size of the cache in blocks; None is what `memory_bytes` says.
        memory_bytes: size of the cache in bytes; None is what `max_num_seqs` requests of full
            length need, at most `memory_fraction`.
        memory_fraction: most of the available memory that the cache may take, where neither of
            the above is given; None is 0.4 on a CPU and 0.9 on a GPU.
        prefix_caching: keep what was computed, for requests that begin alike.
        hash_algorithm: what cached blocks are found by.
        eviction: what chooses the cached content that goes when a block is needed.
        watermark: share of the blocks that must stay free when a request is admitted beside
            others, so that running ones can grow.
    """

    block_size: Count = 16
    num_blocks: Count | None = None
    memory_bytes: Count | None = None
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    prefix_caching: bool = True
    hash_algorithm: Literal["sha256", "blake2b"] = "sha256"
    eviction: Reference = "lru"
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01


class KVEventsConfig(Strict):
    """Who is told what the KV cache holds.

    Attributes:
        publishers: components that take the events; none by default.
    """

    publishers: list[Reference] = []


class StatsConfig(Strict):
    """Who is told how the engine does. What nobody asks for is not gathered.

    Attributes:
        sinks: components that take the figures; none by default.
        request_metrics: whether outputs carry `metrics` when they finish.
        interval_seconds: how often sinks are asked to show what they gathered.
    """

    sinks: list[Reference] = []
    request_metrics: bool = False
    interval_seconds: Annotated[float, Meta(gt=0)] = 10.0

    @property
    def on(self) -> bool:
        """Whether anybody asks for figures."""
        return bool(self.sinks) or self.request_metrics


class EngineProcessConfig(Strict):
    """Where the engine runs, and how it starts and ends.

    Attributes:
        in_process: in the caller's process; else in one of its own.
        start_timeout_seconds: how long loading may take there.
        call_timeout_seconds: how long the engine may take to answer a question about itself.
        drain_seconds: how long requests may go on after SIGTERM; 0 aborts them at once.
        watchdog_seconds: a step that takes longer has the stacks of all threads written to
            stderr; 0 watches nothing.
        watchdog_exits: whether such a step also ends the engine.
        log_steps: log a line for each step: who computed how much, and how long it took.
        profile_dir: the folder that profiles are written to; None is that none can be made.
        random_request_ids: requests go by ids of their own inside, so that several live ones may
            have one id; else by the caller's, and a second live one is refused.
        stream_interval: most outputs of a streamed request wait for so many new tokens; its first
            and last do not.
        max_restarts_per_minute: where `AsyncLLM` shall restart a dead engine, how often.
    """

    in_process: bool = True
    start_timeout_seconds: Annotated[float, Meta(gt=0)] = 600.0
    call_timeout_seconds: Annotated[float, Meta(gt=0)] = 60.0
    drain_seconds: Annotated[float, Meta(ge=0)] = 0.0
    watchdog_seconds: Annotated[float, Meta(ge=0)] = 300.0
    watchdog_exits: bool = False
    log_steps: bool = False
    profile_dir: str | None = None
    random_request_ids: bool = True
    stream_interval: Count = 1
    max_restarts_per_minute: Annotated[int, Meta(ge=1)] = 3


class ExecutorConfig(Strict):
    """What runs the workers."""

    use: Reference = "uniproc"


class SamplerConfig(Strict):
    """What chooses tokens from processed logits.

    Attributes:
        logprobs: log-probabilities are of the logits as the model gave them ("raw"), or as the
            sampler saw them ("processed").
    """

    use: Reference = "default"
    logprobs: Literal["raw", "processed"] = "raw"


class AttentionConfig(Strict):
    """What attends over the KV cache."""

    use: Reference = "torch"


class ReasoningConfig(Strict):
    """How the model thinks aloud.

    Attributes:
        parser: name of a reasoning parser; None is a model that does not.
    """

    parser: Name | None = None


class TokenizerConfig(Strict):
    """The tokenizer.

    Attributes:
        path: its directory or file, where that is not the model's.
    """

    use: Reference = "transformers"
    path: str | None = None


class LoadConfig(Strict):
    """How weights are read.

    Attributes:
        use: name of a loader; "auto" asks each loader whether it knows the files.
    """

    use: Name = "auto"


class EngineConfig(Strict):
    """Everything that an engine is told.

    Attributes:
        model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
        dtype: of weights, hidden states and KV cache; "auto" is the checkpoint's own, or
            bfloat16 where that is unknown.
        device: "auto" is cuda where there is one, else cpu.
        max_model_len: longest prompt plus output; None is what the model was made for, "auto" is
            what fits into the KV cache, at most what the model was made for.
        seed: of everything that a request does not seed itself; None draws one.
        plugin: options of one plugin, by its name.
    """

    model: Annotated[str, Meta(min_length=1)] = "smollm2"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Count | Literal["auto"] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    plugins: PluginsConfig = PluginsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    stats: StatsConfig = StatsConfig()
    engine: EngineProcessConfig = EngineProcessConfig()
    executor: ExecutorConfig = ExecutorConfig()
    sampler: SamplerConfig = SamplerConfig()
    attention: AttentionConfig = AttentionConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    load: LoadConfig = LoadConfig()
    plugin: dict[str, dict[str, Any]] = {}


class ConfigSources:
    """Where each configuration value came from."""

    def __init__(self, by_path: Mapping[str, str] | None = None) -> None:
        """`by_path` maps a dotted path to words such as `file hardpoint.toml`."""
        self.by_path = dict(by_path or {})

    def of(self, path: str) -> str:
        """Return the origin of a path, of its nearest parent that has one, or "default"."""
        while path:
            if path in self.by_path:
                return self.by_path[path]
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return "default"

    def locate(self, message: str) -> str:
        """Append the origin of the path that a message starts with."""
        return f"{message} (from {self.of(message.split(': ', 1)[0])})"
