"""The types of the tables of the configuration; `EngineConfig` has them as fields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from hardpoint.typed import Strict

Reference = Annotated[
    str, Meta(min_length=1, description="An entry-point name, or an FQCN `package.module:Class`.")
]

Name = Annotated[str, Meta(min_length=1, description="The name of an enabled component.")]

Count = Annotated[int, Meta(ge=1)]

T = TypeVar("T")

CHANGE = "change"
"""Key of `Meta.extra`: how a setting changes, "live" or, as without it, "restart"."""

Live = Annotated[T, Meta(extra={CHANGE: "live"})]
"""A setting that `set_config` changes while the engine runs; all others need a restart."""


# Timers of the system take no more.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

PositiveSeconds = Annotated[float, Meta(gt=0, le=1e9)]

_STORES = "stores"
"""Name of the connector that drives stores."""


class PluginUse(Strict):
    """A component to enable, and its name.

    Attributes:
        use: entry-point name or FQCN.
        name: under which it is enabled; by default the entry point's, or the class's in snake_case.
    """

    use: Reference
    name: Annotated[str, Meta(min_length=1)] | None = None


class PluginsConfig(Strict):
    """Which components are enabled in addition to the built-in defaults.

    Attributes:
        enable: components to enable.
        disable: names or FQCNs of built-in defaults, and of the program's components, to disable.
        replace: the component that replaces an enabled one, by the name of the latter.
        on_error: scope of a fault, by the name of the plugin: "request", the requests that use it,
            "step", its decision in that step, or "engine"; by default, that of its kind.
        quarantine_after: number of distinct requests that a third-party logits processor, or calls
            that an IO processor, may end before it is rejected; 0 is no limit.
        slow_seconds: time that a plugin's methods may take in one step, for which all requests
            wait; a longer one is counted in `LLM.plugins.health()` and logged. 0 is no limit.
        io_rounds: maximum number of rounds of prompts in a call of an IO processor.
        io_prompts: maximum number of prompts in all rounds of a call of an IO processor.
        foreign_groups: entry-point groups of other engines to search for logits processors.
        live: names of the plugins that a live change over HTTP may enable, also as replacements.
        change_seconds: time that all processes together have to prepare a live change.
        require_proof: reject third-party packages without a proof of `hardpoint plugins check
            --attest`, or with other files than it states; "signed" requires a signature, too.
        proof_signers: the issuer of each trusted identity that signs proofs.
        proof_trusted_root: path of a Sigstore trusted root; empty for that of the package sigstore.
    """

    enable: Live[list[Reference | PluginUse]] = []
    disable: Live[list[str]] = []
    replace: Live[dict[str, Reference]] = {}
    on_error: dict[str, Literal["request", "step", "engine"]] = {}
    quarantine_after: Live[Annotated[int, Meta(ge=0)]] = 3
    slow_seconds: Annotated[float, Meta(ge=0)] = 1.0
    io_rounds: Live[Count] = 16
    io_prompts: Live[Count] = 65536
    foreign_groups: list[Literal["vllm.logits_processors"]] = []
    live: list[Name] = []
    change_seconds: Live[PositiveSeconds] = 30.0
    require_proof: bool | Literal["signed"] = False
    proof_signers: dict[str, str] = {}
    proof_trusted_root: str = ""


STREAMING_STEP_MILLISECONDS = 150.0
"""Default of `scheduler.step_milliseconds` in `AsyncLLM` and the server."""


class SchedulerConfig(Strict):
    """The scheduler, its policy and its limits.

    Attributes:
        use: scheduler, by entry-point name or FQCN `package.module:Class`.
        policy: scheduling policy, by entry-point name or FQCN.
        max_num_seqs: maximum number of running requests; their block tables are allocated at start.
        max_num_batched_tokens: maximum number of tokens in a step.
        chunked_prefill: compute a prompt in several steps if the token budget requires it.
        long_prefill_token_threshold: maximum tokens of one prompt in a step; 0 is no limit.
        max_waiting: maximum number of waiting requests; further ones are rejected as "overloaded".
            None is no limit.
        max_waiting_tokens: maximum tokens of waiting prompts and of uncomputed tokens of running
            requests; a further prompt is rejected as "overloaded" until there is room for it,
            unless none waits. None is no limit.
        asynchronous: plan the next step while the device computes one; needs an executor with two
            steps in flight. "auto": on CUDA with one rank in "uniproc".
        step_milliseconds: maximum predicted time of a step with prompts while other requests
            generate. 0 is no limit; None is 150 in `AsyncLLM` and the server, 0 in `LLM`.
    """

    use: Reference = "default"
    policy: Live[Reference] = "fcfs"
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536)] = 64
    max_num_batched_tokens: Count = 2048
    chunked_prefill: bool = True
    long_prefill_token_threshold: Live[Annotated[int, Meta(ge=0)]] = 0
    max_waiting: Live[Count | None] = None
    max_waiting_tokens: Live[Count | None] = None
    asynchronous: bool | Literal["auto"] = "auto"
    step_milliseconds: Annotated[float, Meta(ge=0)] | None = None


class KVCacheConfig(Strict):
    """The paged KV cache.

    Attributes:
        block_size: tokens per block; a power of two.
        dtype: how keys and values are stored: "auto" is the model's dtype; "int8" and "fp8"
            (float8 e4m3) are codes of 8 bits with a scale for each token and head, which take
            about half the memory of 16 bits.
        num_blocks: size of the cache in blocks, including blocks for states of layers; None derives
            it from `memory_bytes`.
        memory_bytes: size of each rank's cache in bytes, at most; None fits `max_num_seqs`
            requests of full length, at most `memory_fraction`.
        memory_fraction: maximum share of the available memory for the cache, if neither of the
            above is set; None is 0.4 on a CPU and 0.9 on a GPU.
        prefix_caching: reuse the blocks of common prefixes.
        hash_algorithm: algorithm of the prefix hashes of blocks.
        eviction: eviction policy, which chooses the cached content to discard for new blocks.
        watermark: share of the blocks that stays free when a request is admitted next to
            running requests, so that these can grow.
        window_groups: layers with a sliding window have blocks of their own, which are released as
            the window passes them; if not, they keep the blocks of all tokens, as other layers do.
    """

    block_size: Count = 16
    dtype: Literal["auto", "fp8", "int8"] = "auto"
    num_blocks: Count | None = None
    memory_bytes: Count | None = None
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    prefix_caching: bool = True
    hash_algorithm: Literal["sha256", "blake2b"] = "sha256"
    eviction: Reference = "lru"
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    window_groups: bool = True


class KVEventsConfig(Strict):
    """Publication of KV cache events.

    Attributes:
        publishers: components that publish the events; none by default.
    """

    publishers: list[Reference] = []


class KVConnectorConfig(Strict):
    """The KV connector, which loads and saves blocks outside of the KV cache; nothing by default.

    Attributes:
        use: the connector; None is "stores" if there are `stores`, and none otherwise.
        stores: KV stores of the connector "stores", nearest first. `{ use = "disk", name = "ssd" }`
            renames a store, with options in `[plugin.ssd]`.
        on_load_failure: "recompute" computes blocks that could not be loaded; "error" ends the
            request with an error.
        load_seconds: maximum time of a lookup, and of a load.
        lease_seconds: maximum time that blocks are kept for another engine.
        engine_id: name of this engine for other engines that exchange blocks; None offers no
            blocks. Replicas (`parallel.data`) append `-RANK`, except the first.
    """

    use: Reference | None = None
    stores: list[Reference | PluginUse] = []
    on_load_failure: Literal["recompute", "error"] = "recompute"
    load_seconds: PositiveSeconds = 10.0
    lease_seconds: PositiveSeconds = 30.0
    engine_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")] | None = None

    def __post_init__(self) -> None:
        """Let the built-in connector drive the stores."""
        if self.stores and self.use is None:
            msgspec.structs.force_setattr(self, "use", _STORES)
        if self.use == _STORES and not self.stores:
            raise ValueError(
                f'the connector {_STORES!r} needs stores to drive: stores = ["memory"], for example'
            )


class StatsConfig(Strict):
    """Statistics. None are collected unless a sink or `request_metrics` needs them.

    Attributes:
        sinks: components that receive the statistics; none by default.
        request_metrics: whether the last output of a request carries `metrics`.
        interval_seconds: time between two reports of the sinks.
    """

    sinks: Live[list[Reference]] = []
    request_metrics: bool = False
    interval_seconds: PositiveSeconds = 10.0

    @property
    def on(self) -> bool:
        """Whether statistics are needed."""
        return bool(self.sinks) or self.request_metrics


class MetricsConfig(Strict):
    """The metrics that sinks such as "prometheus" export.

    Attributes:
        aliases: engines that give the metrics further names, for dashboards and gateways.
        model_name: label of all metrics; None is the model as configured.
    """

    aliases: list[Literal["vllm"]] = []
    model_name: Annotated[str, Meta(min_length=1)] | None = None


class EngineProcessConfig(Strict):
    """Where the engine runs, and how it starts and ends.

    Attributes:
        in_process: run in the caller's process instead of one of its own.
        start_timeout_seconds: maximum time to start an engine process and load the model.
        call_timeout_seconds: maximum time for a utility call to the engine.
        drain_seconds: time for requests to finish after SIGTERM; 0 aborts them at once.
        watchdog_seconds: duration of a step after which the stacks of all threads are written to
            stderr; 0 is never.
        watchdog_exits: whether such a step also ends the engine.
        hung_process_seconds: time after which an engine process that gives no sign of life, such
            as a stopped one, counts as dead; 0 is never. Long steps and loading do not count: any
            Python thread that runs is a sign of life.
        hung_step_seconds: duration of a step after which its engine process counts as dead; 0 is
            never. Loading and utility calls are not steps.
        log_steps: log each step's requests, token counts and duration.
        long_collection_seconds: duration of a collection of garbage in the engine's process from
            which on it is logged; 0 is never.
        profile_dir: folder for profiles; None disables profiling.
        random_request_ids: give requests random internal ids, so that several live ones may have
            the same id; otherwise a second live request with an id is rejected.
        stream_interval: new tokens per output of a streamed request; its first and last output
            do not wait.
        restart: "on_failure" replaces an engine process that died.
        max_restarts_per_minute: maximum number of restarts per minute.
        resume: migrate requests of a dead engine: "exact" only with equal tokens, "any" also to an
            engine that differs, for example in its weights; "off" ends them.
        max_resumes: maximum number of migrations of a request.
        journal: file that records the inputs of the engine for `hardpoint replay`, with prompts,
            outputs and options of plugins; None records nothing.
        journal_bytes: maximum size of that file.
        journal_ring: keep the end of the journal in memory, and write it when a step fails or the
            engine ends.
    """

    in_process: bool = True
    start_timeout_seconds: PositiveSeconds = 600.0
    call_timeout_seconds: PositiveSeconds = 60.0
    drain_seconds: Seconds = 0.0
    watchdog_seconds: Seconds = 300.0
    watchdog_exits: bool = False
    hung_process_seconds: Seconds = 300.0
    hung_step_seconds: Seconds = 1800.0
    log_steps: bool = False
    long_collection_seconds: Seconds = 0.0
    profile_dir: str | None = None
    random_request_ids: bool = True
    stream_interval: Live[Count] = 1
    restart: Literal["never", "on_failure"] = "never"
    max_restarts_per_minute: Annotated[int, Meta(ge=1)] = 3
    resume: Literal["exact", "any", "off"] = "exact"
    max_resumes: Annotated[int, Meta(ge=0)] = 1
    journal: Annotated[str, Meta(min_length=1)] | None = None
    journal_bytes: Annotated[int, Meta(ge=1 << 16)] = 1 << 30
    journal_ring: bool = False


class ExecutorConfig(Strict):
    """The executor, which runs the workers.

    Attributes:
        use: executor, by entry-point name or FQCN.
        threads: CPU threads of each worker. "auto" is the number of cores in the affinity and
            control group of the process, limited by OMP_NUM_THREADS and `torch.set_num_threads`;
            fewer if they are faster at start, or if other programs use the CPUs.
        enforce_eager: do not record and repeat steps, such as CUDA graphs.
    """

    use: Reference = "uniproc"
    enforce_eager: bool = False
    threads: Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"] = "auto"


class SamplerConfig(Strict):
    """The sampler, which chooses tokens from processed logits.

    Attributes:
        use: sampler, by entry-point name or FQCN.
        logprobs: compute log-probabilities from the model's logits ("raw") or from the
            sampler's inputs ("processed").
    """

    use: Reference = "default"
    logprobs: Literal["raw", "processed"] = "raw"


class SpeculationConfig(Strict):
    """Speculation: drafts of tokens that the next step verifies. They change no output.

    Attributes:
        use: speculators; none by default. The first is the default of requests without
            `SamplingParams.speculator`. `{ use = "ngram", name = "long" }` renames one, with
            options in `[plugin.long]`.
        num_draft_tokens: maximum number of drafts per request and step.
        adaptive: reduce the number of drafts if more would not save time, by acceptance rate and
            step time.
    """

    use: list[Reference | PluginUse] = []
    num_draft_tokens: Annotated[int, Meta(ge=1, le=256)] = 5
    adaptive: bool = True


def absolute_path(path: str) -> str:
    """Return a path as it is in every process, whatever its directory."""
    return str(Path(os.path.expanduser(path)).absolute())


class AdaptersConfig(Strict):
    """Low-rank adapters of linear layers (LoRA), which requests name.

    Attributes:
        max_loras: maximum number of adapters in a batch, allocated on the device at start; 0, the
            default, disables LoRA.
        max_lora_rank: maximum rank of an adapter.
        max_cpu_loras: number of adapters that each worker keeps in CPU memory; others are read
            again when a request needs them. None is `max_loras`.
        paths: PEFT directories of adapters that are loaded at start, by name. Relative paths and
            "~" are resolved when the configuration is made.
        resolvers: adapter resolvers for names that are not loaded, in order; none by default.
            `{ use = "folder", name = "shared" }` renames one, with options in `[plugin.shared]`.
        resolve_seconds: time limit of a resolver for a name.
    """

    max_loras: Annotated[int, Meta(ge=0, le=1024)] = 0
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_cpu_loras: Count | None = None
    paths: dict[Annotated[str, Meta(min_length=1)], Annotated[str, Meta(min_length=1)]] = {}
    resolvers: list[Reference | PluginUse] = []
    resolve_seconds: PositiveSeconds = 10.0

    def __post_init__(self) -> None:
        """Complete the paths, and check that the named adapters fit the limits."""
        paths = {name: absolute_path(path) for name, path in self.paths.items()}
        msgspec.structs.force_setattr(self, "paths", paths)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError("max_cpu_loras has to be at least max_loras")
        if len(self.paths) > self.num_cpu_loras:
            key = "max_cpu_loras" if self.max_loras else "max_loras"
            raise ValueError(f"paths names {len(self.paths)} adapters, which is more than {key}")

    @property
    def num_cpu_loras(self) -> int:
        """Adapters that each worker keeps in CPU memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class AttentionConfig(Strict):
    """The attention backend; "auto" selects the default of `backend`."""

    use: Reference = "auto"


class ModelsConfig(Strict):
    """The plugin that computes the model.

    Attributes:
        use: name of a `models` plugin; "auto" selects it by the architecture, else the fallback.
        fallback: `models` plugin of architectures without their own, or "none".
    """

    use: Reference = "auto"
    fallback: Reference = "transformers"


class OpsConfig(Strict):
    """The operations of models; "auto" selects the default of `backend`."""

    use: Reference = "auto"


class ReasoningConfig(Strict):
    """Reasoning in the model's output.

    Attributes:
        parser: name of a reasoning parser; "auto" selects it by the model's chat template,
            if possible, and "none" disables reasoning parsing.
    """

    parser: Name = "auto"


class ToolsConfig(Strict):
    """Calls of tools in the model's output.

    Attributes:
        parser: name of a tool parser; "auto" selects it by the model's chat template, if
            possible, and "none" disables tool parsing.
    """

    parser: Name = "auto"


class GrammarConfig(Strict):
    """Structured output.

    Attributes:
        use: name of the grammar backend of requests that name none.
        compile_seconds: maximum time to compile a grammar; then the request ends with an error.
        max_bytes: maximum size of a request's schema, grammar or other description.
        cache_size: number of cached compiled grammars; the least recently used ones are dropped.
    """

    use: Name = "llguidance"
    compile_seconds: PositiveSeconds = 10.0
    max_bytes: Count = 1 << 20
    cache_size: Count = 128


class TokenizerConfig(Strict):
    """The tokenizer.

    Attributes:
        use: name of a tokenizer; "none" reads no files, so that prompts and outputs are token ids.
        path: its directory or file; by default the model's.
    """

    use: Reference = "transformers"
    path: str | None = None


class LoadConfig(Strict):
    """How weights are read.

    Attributes:
        use: name of a loader; "auto" selects the first that recognises the files.
        updates: safetensors files, or folders of them, with tensors that replace the model's;
            the last file wins. `update_weights` adds to them.
        version: version of the weights, see `CompletionOutput.weight_versions`.
    """

    use: Name = "auto"
    updates: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    version: Annotated[str, Meta(min_length=1, max_length=128)] = "0"


class QuantizationConfig(Strict):
    """Quantized weights.

    Attributes:
        use: "auto" multiplies the weights as the checkpoint stores them; "none" dequantizes them;
            the name of a scheme such as "int8" quantizes the matrices of any checkpoint. The name
            of a scheme that only reads requires it.
        skip: patterns of weights in the model's dtype; `lm_head.*` also names a tied embedding.
        activations: "int8" or "int16" rounds the inputs of products with quantized weights.
    """

    use: Name = "auto"
    skip: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    activations: Literal["none", "int8", "int16"] = "none"


class WeightCacheConfig(Strict):
    """The weight cache: files of packed weights, from which later starts are quick.

    Attributes:
        path: its folder, or "off"; None is `hardpoint` in `$XDG_CACHE_HOME`, by default ~/.cache.
        max_bytes: limit of all files together; the least recently used ones are removed.
            The ranks of a host keep their parts of a model only if all parts together are smaller.
    """

    path: Annotated[str, Meta(min_length=1)] | None = None
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 34
