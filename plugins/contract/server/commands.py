"""Commands of the `hardpoint` program, added through the `cli_commands` hook."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hardpoint.errors import RequestError
from hardpoint.plugins.config.engine import ConfigSources, EngineConfig
from hardpoint.plugins.requests.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.plugins.requests.params import PoolingParams, Prompt, SamplingParams
from hardpoint.typed.describing import FieldDoc

from .groups import PromptControl
from .journals import JournalUse

if TYPE_CHECKING:
    from .generator import AsyncGenerator, WorkerGroup

__all__ = ["Command", "CommandContext"]


@dataclass(frozen=True, kw_only=True)
class ComponentInfo:
    """One component that is installed or enabled.

    Attributes:
        kind: extension point; possibly unknown to this version.
        name: under which it is enabled, or can be.
        value: `package.module:Qual.Name`, or a module.
        package: distribution and version; the module where no distribution offers it.
        enabled: whether it is part of the engine.
        reason: the setting that enabled it, or the reason why it is not enabled.
        place: position among the enabled components of its kind, from 1; None where the kind has
            no order.
        phase: phase of an enabled logits processor.
        adapter: name of the adapter that runs it, if it is enabled and written for another engine.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    package: str
    enabled: bool
    reason: str
    place: int | None = None
    phase: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class ComponentDetails:
    """One component with the declarations of its class and its configuration.

    Attributes:
        summary: first paragraph of its docstring.
        interface: name of the class that it derives from; the kind's name for hooks.
        contract: version of the kind's contract that it states.
        stability: stability of the kind's contract, "stable" or "provisional".
        phase: phase of a logits processor.
        adapter: name of the adapter that runs it, if it was written for another engine.
        hooks: names of the hooks that it implements.
        methods: names of its interface's methods that it defines.
        params_fields: fields of SamplingParams that are its arguments.
        options: values in effect, by name; empty unless it is enabled.
        option_sources: by option that the configuration sets, where the value came from.
        option_fields: declared options; None for hooks without any.
        argument_fields: declared arguments of a request; None where the kind has none.
        options_schema: JSON Schema of the options.
        arguments_schema: JSON Schema of the arguments.
        problem: why loading rejects it, if it is not enabled; empty if it passes every check.
        input_fields: declared input of an IO processor; None where the kind has none.
        input_schema: JSON Schema of the input.
        others: the other components of its kind that have its name.
    """

    info: ComponentInfo
    summary: str
    interface: str
    contract: int
    stability: str
    phase: str | None
    adapter: str | None
    hooks: Sequence[str]
    methods: Sequence[str]
    params_fields: Sequence[str]
    options: Mapping[str, Any]
    option_sources: Mapping[str, str]
    option_fields: Sequence[FieldDoc] | None
    argument_fields: Sequence[FieldDoc] | None
    options_schema: Mapping[str, Any] | None
    arguments_schema: Mapping[str, Any] | None
    problem: str = ""
    others: Sequence[ComponentInfo] = ()
    input_fields: Sequence[FieldDoc] | None = None
    input_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Weights that the files store in one way and that are held in one way.

    Attributes:
        stored: name of a quantization scheme or dtype; None if the files do not state it.
        held: the same, in memory.
        count: number of weights.
        num_params: number of parameters of all of them.
        stored_bytes: bytes in the files; None if they do not state it.
        held_bytes: bytes in memory, of all ranks together.
    """

    stored: str | None
    held: str
    count: int
    num_params: int
    stored_bytes: int | None
    held_bytes: int


@dataclass(frozen=True, kw_only=True)
class ContextMemory:
    """Memory that requests of one length need of the KV cache.

    Attributes:
        num_tokens: number of tokens of a request, including generated ones.
        one_request: bytes.
        all_requests: bytes of `scheduler.max_num_seqs` such requests.
        fits: whether the cache has room for one.
    """

    num_tokens: int
    one_request: int
    all_requests: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A model and the memory that it would need; none of its weights were read.

    Bytes refer to the rank with the least room, unless stated otherwise.

    Attributes:
        model: its name, as configured.
        path: path of its files.
        loader: name of the plugin that reads them, "gguf" for example.
        architecture: name of the plugin that computes it.
        provider: distribution and version of that plugin.
        device: the device that it would run on.
        dtype: dtype of hidden states.
        operations: name of the operations.
        attention: name of the attention backend.
        cache_dtype: `kv_cache.dtype`.
        num_params: number of parameters of the whole model.
        weights: weights of the whole model, the most bytes first.
        vocab_size: width of a row of logits.
        windows: sliding window of each attention layer in tokens; None is unlimited.
        max_position_embeddings: longest context that the model was made for.
        max_model_len: longest context that is configured.
        max_num_seqs: requests that run at once, at most.
        num_ranks: number of ranks that share the model.
        weights_bytes: bytes of the loaded weights.
        loading_bytes: bytes that loading them takes besides, for a while.
        step_bytes: bytes of the largest step.
        cache_bytes: bytes of the KV cache that would be allocated; 0 if the model does not fit.
        contexts: KV cache requirements of requests.
        available: bytes that may be allocated.
        limit: the limit behind that number.
        longest: the longest request that fits; 0 if none does.
        problem: why the model does not fit into memory; empty if it does.
        implementation: name of the `models` plugin that computes it: the architecture's own, or
            "transformers".
        heads: heads, heads of keys and values, and size of a head, by attention layer.
        token_bytes: bytes of a token in the KV caches of all layers that see it.
        num_state_layers: layers that keep a state in place of keys and values.
    """

    model: str
    path: Path
    loader: str
    architecture: str
    provider: str
    device: str
    dtype: str
    operations: str
    attention: str
    cache_dtype: str
    num_params: int
    weights: Sequence[WeightGroup]
    vocab_size: int
    windows: Sequence[int | None]
    max_position_embeddings: int
    max_model_len: int
    max_num_seqs: int
    num_ranks: int
    weights_bytes: int
    loading_bytes: int
    step_bytes: int
    cache_bytes: int
    contexts: Sequence[ContextMemory]
    available: int
    limit: str
    longest: int
    problem: str = ""
    implementation: str = ""
    heads: Sequence[tuple[int, int, int]] = ()
    token_bytes: int = 0
    num_state_layers: int = 0


class PluginCatalog(Protocol):
    """The components that are installed or enabled under one configuration."""

    def components(self) -> Sequence[ComponentInfo]:
        """Return all components in the order of kinds; import none that is not enabled."""

    def details(self, name: str) -> ComponentDetails:
        """Return the details of `name`, `kind/name` or an FQCN; an enabled component comes first.

        Imports the component, and checks all that loading it would check.

        Raises:
            PluginError: no component or several have that name, or it cannot be loaded.
        """


class PromptTrace(Protocol):
    """A trace, `hardpoint.toolkit.trace.Trace`."""

    @property
    def errors(self) -> Sequence[str]:
        """The errors that ended completions."""

    def json(self) -> str:
        """Return it as JSON."""

    def table(self, width: int = ...) -> str:
        """Return it as text for a terminal of so many columns."""

    def html(self) -> str:
        """Return it as one HTML page."""


class TraceControl(Protocol):
    """Traces of prompts by an open model."""

    def trace(self, prompt: Prompt, params: SamplingParams | None = None) -> PromptTrace:
        """Complete a prompt; return how each token of its completions was chosen.

        Raises:
            RequestError: it is rejected.
        """


class Generator(Protocol):
    """An open model."""

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""

    @property
    def debug(self) -> TraceControl:
        """Traces of prompts."""

    @property
    def model(self) -> PromptControl:
        """The model: default parameters, chat template."""

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of a prompt as increments of text and tokens.

        Prompts with outputs that are read at the same time, or one after another, share a batch.
        """

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of a conversation as increments of text and tokens."""

    def generate_unordered(
        self, requests: Iterable[tuple[Prompt, SamplingParams | None]]
    ) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Yield each prompt's whole output once it is finished, with its position.

        Prompts are taken from the iterable when the engine has room for them, so there may be any
        number. A thread may take them, so a slow iterable delays no output. A rejected prompt
        yields its error, and the others go on.
        """

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
    ) -> Sequence[PoolingRequestOutput]:
        """Return a vector for each prompt.

        Raises:
            RequestError: one is rejected, or the model has no vectors; the message has its index.
        """

    def close(self) -> None:
        """Release the model."""


def _print_error(message: str) -> None:
    print(f"hardpoint: error: {' '.join(message.split())}", file=sys.stderr)


OpenAsync = Callable[
    [EngineConfig, ConfigSources, Literal["never", "on_failure"]], "AsyncGenerator"
]
"""Opens a model for an event loop; the last argument is when a dead engine is restarted."""


InspectModel = Callable[[EngineConfig, ConfigSources, Sequence[int]], ModelReport]
"""Estimates the memory of the configured model, for requests of some lengths or of usual ones;
reads no weights.

It raises the same errors as opening the model before its weights are read, except that the model
does not fit into memory.
"""


OpenWorkers = Callable[[EngineConfig, ConfigSources, Literal["never", "on_failure"]], "WorkerGroup"]
"""Opens a model for several worker processes; the arguments are the same as for `OpenAsync`."""


CheckPlugin = Callable[
    [EngineConfig, ConfigSources, str, Mapping[str, float], Mapping[str, Any], int | None],
    Iterator[Mapping[str, Any]],
]
"""Runs the suites of an installed plugin in a child process; yields records, see the page on the
conformance kit. Arguments after the configuration: the name, the limits, options that replace the
configured ones, and the required version of the contract, None for any.
"""


ResolvePlugins = Callable[[EngineConfig, ConfigSources], Any]
"""Resolves a configuration's plugins; returns a `PluginSet` of the registry."""


CheckConfig = Callable[[], tuple[Sequence[str], Sequence[str]]]
"""Returns the errors and the warnings of a configuration."""


JoinEngine = Callable[..., None]
"""Runs engines for the program at an address: configuration, sources of its values, the address,
and by name `keys`, the folder of its keys or None, `rank`, the rank to take or None, and `once`,
whether to end with the first one.
"""


Simulate = Callable[..., Iterator[Mapping[str, Any]]]
"""Runs a load under several configurations on a virtual clock; yields records, see the page on
simulations. Configurations by name, the fields of the load, and by name `cost`, a file of
`hardpoint calibrate`, `objective`, by its fields, and `processes`, how many run at a time.
"""

Calibrate = Callable[[EngineConfig, ConfigSources, float], Iterator[Mapping[str, Any]]]
"""Measures the steps of the configured model for so many seconds; yields records; the last one has
`cost`, the input of `hardpoint simulate --cost`.
"""


Measure = Callable[..., Iterator[Mapping[str, Any]]]
"""Measures starts; yields records. The argument has the fields of `hardpoint.bench.StartupPlan`."""


MakeApplication = Callable[["AsyncGenerator", str], Any]
"""Returns an ASGI application that serves an engine; the text is Hardpoint's version."""

ServeOnRay = Callable[
    [EngineConfig, ConfigSources, MakeApplication, Mapping[str, str], tuple[str, int]], int
]
"""Serves a model by Ray Serve; its last arguments are the options of hardpoint.ray_serve, as text,
and the host and port to listen on. Returns the exit code.
"""


class _Absent(dict[str, Any]):
    """By name, a replacement of each function that a context was made without."""

    def __missing__(self, name: str) -> Any:
        def fail(*_: object, **__: object) -> Any:
            raise NotImplementedError(f"this CommandContext was made without {name}")

        return fail


_ABSENT = _Absent()


@dataclass(frozen=True)
class CommandContext:
    """Functions and facts that a command may use.

    Attributes:
        load_config: returns the configuration and the source of each value, as the command line,
            environment and file give it. Its arguments, such as
            "scheduler.policy=fair", and its `model` come after those of the command line.
        load_catalog: resolves a configuration's plugins; returns the installed and enabled plugins.
        open_model: loads the configured model; shows progress on a terminal.
        version: version of Hardpoint.
        quiet: whether `--quiet` asked for errors alone: no progress and no remarks.
        show_error: prints an error in one line on standard error, as `--log-format` asks for. Only
            for an error after which the command goes on; an error that ends it is raised as a
            HardpointError.
        open_async: loads the configured model for a program that runs an event loop, in a process
            of its own; the last argument is when a dead engine is restarted.
        open_workers: loads the configured model for worker processes that the command starts, each
            with an event loop of its own.
        inspect_model: reports the configured model and its needs, without reading its weights.
        config_type: returns the type of the configuration with the tables of the enabled plugins;
            of the plugins enabled by default, if the configuration is wrong.
        check_plugin: runs the conformance suites of an installed plugin in a process with limits.
        join_engine: runs engines for a program on another machine, until a signal ends it.
        serve_on_ray: serves the configured model by Ray Serve until a signal.
        simulate: runs a load under several configurations on a virtual clock.
        calibrate: measures the costs of steps of the configured model.
        open_journal: opens a journal of an engine.
        measure_startup: starts engines, and measures the stages of it.
        resolve_plugins: resolves a configuration's plugins, for `load_plugins`.
        check_config: returns all errors of the configuration, and then all warnings, as the command
            line, environment and file give it.
    """

    load_config: Callable[..., tuple[EngineConfig, ConfigSources]]
    load_catalog: Callable[[EngineConfig, ConfigSources], PluginCatalog]
    open_model: Callable[[EngineConfig, ConfigSources], Generator]
    version: str
    quiet: bool = False
    show_error: Callable[[str], None] = _print_error
    open_async: OpenAsync = _ABSENT["open_async"]
    open_workers: OpenWorkers = _ABSENT["open_workers"]
    inspect_model: InspectModel = _ABSENT["inspect_model"]
    config_type: Callable[[], type[EngineConfig]] = lambda: EngineConfig
    check_plugin: CheckPlugin = _ABSENT["check_plugin"]
    join_engine: JoinEngine = _ABSENT["join_engine"]
    serve_on_ray: ServeOnRay = _ABSENT["serve_on_ray"]
    simulate: Simulate = _ABSENT["simulate"]
    calibrate: Calibrate = _ABSENT["calibrate"]
    open_journal: Callable[[str, bool], JournalUse] = _ABSENT["open_journal"]
    measure_startup: Measure = _ABSENT["measure_startup"]
    resolve_plugins: ResolvePlugins = _ABSENT["resolve_plugins"]
    check_config: CheckConfig = _ABSENT["check_config"]

    def load_plugins(self, config: EngineConfig, config_sources: ConfigSources) -> Any:
        """Resolve a configuration's plugins; `load_catalog` replaces it.

        Returns:
            A `PluginSet` of the registry.
        """
        return self.resolve_plugins(config, config_sources)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: as typed after `hardpoint`: letters, digits, `-` and `_`.
        summary: one line of help.
        configure: adds arguments to the command's parser, which already has `--config`, `--model`,
            `--set`, `-q/--quiet`, `-v/--verbose` and `--log-format`.
        run: runs the command and returns the exit code, 0 to 255. A HardpointError becomes one line
            on standard error and exit code 2.
        application: returns the ASGI application of a command that serves an engine over HTTP, for
            a program in which somebody else listens; None for all other commands.
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, CommandContext], int]
    application: MakeApplication | None = None
