"""The only module of the conformance suites that imports engine internals.

The suites run plugins in the engine's own loader, logits pipeline, batch and caches. Whatever a
change of the engine breaks here is mended here; the suites themselves use `hardpoint.plugins`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from hardpoint import typed
from hardpoint.configuration.catalog import Catalog
from hardpoint.configuration.loading import default_config_type
from hardpoint.core.kv_cache import BlockManager, BlockMetadata, Eviction
from hardpoint.core.weights.quantized_weights import QuantizedWeights
from hardpoint.core.worker.input_batch import InputBatch
from hardpoint.core.worker.sampling.pipeline import LogitsPipeline
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.faults import FaultReporter as FaultReporter
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import guard as guard
from hardpoint.host.boundary.logits.fault_isolation import FaultIsolation
from hardpoint.host.boundary.logits.processor_runner import ProcessorError, ProcessorRunner
from hardpoint.host.boundary.logits.rows import ProcessorRows
from hardpoint.host.boundary.parts.components import Components
from hardpoint.host.boundary.parts.components import call_declared as call_declared
from hardpoint.host.boundary.parts.components import describe_fault as describe_fault
from hardpoint.host.boundary.policy import PolicyArguments
from hardpoint.host.registry.adapt import load_component
from hardpoint.host.registry.adapters.contract_1 import context_for
from hardpoint.host.registry.discovery import installed_version
from hardpoint.host.registry.hooks import HookSet as HookSet
from hardpoint.host.registry.kinds import KINDS, Number
from hardpoint.host.registry.loading import check_component, snake_case
from hardpoint.host.registry.plugin_options import checked_options, declared_tables
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.host.registry.references import provided_by
from hardpoint.host.registry.request_arguments import convert_arguments, prepare_arguments, prepares
from hardpoint.host.registry.selection import BACKEND_KINDS
from hardpoint.host.system import torch_state as torch_state
from hardpoint.plugins import (
    BatchLogitsProcessor,
    BatchUpdate,
    Command,
    CommandContext,
    EngineConfig,
    EvictionPolicy,
    Finish,
    LogitsProcessor,
    LogitsRequest,
    Model,
    ModelFiles,
    Ops,
    OpsContext,
    PolicyContext,
    PrepareContext,
    Quantization,
    QuantizationContext,
    RequestFault,
    SamplingParams,
    Scheduler,
    SchedulingPolicy,
    SparseLogitsProcessor,
    Tokenizer,
    TokenizerContext,
)
from hardpoint.plugins.commands import Generator, PluginCatalog
from hardpoint.plugins.component import Component, Context, Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import WorkerLaunch
from hardpoint.plugins.kv_cache import KVCacheGroup, KVCacheManager
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.step_part.components import ComponentFactory
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.process.server_extensions import server_extensions as server_extensions
from hardpoint.process.worker_process import LaunchedWorker
from hardpoint.toolkit.encoder_cache import EncoderCacheManager
from hardpoint.toolkit.logits_calls.states import distributions_of

from .scripted import scripted_engine, write_scripted_model

_ABORT_STEP = 9

EvictionFactory = Callable[..., EvictionPolicy]
"""Creates an eviction policy, given `blocks`, `history` and `clock` of its context."""


def plugin_name(cls: type[Component]) -> str:
    """Return the name under which a plugin class is enabled by default."""
    return snake_case(cls.__name__)


def check_plugin_class(cls: type[Component], kind: str, name: str) -> None:
    """Check a plugin class as the loader does.

    Raises:
        PluginContractError: the loader rejects it.
    """
    check_component(cls, KINDS[kind], _source(cls, name))


def complete_context(context: Any, kind: str, cls: type) -> Any:
    """Return the context of a class under test as the engine makes it.

    It builds the components that the class wraps, and is that of the class's contract.
    """

    def create(use: str) -> Component:
        named = use if ":" in use else {"use": use, "name": use}  # a class may have several names
        tree: dict[str, Any] = {"plugins": {"enable": [named]}}
        if path := KINDS[kind].chosen_by:
            table, _, key = path.partition(".")
            tree = {table: {key: use if KINDS[kind].number is Number.ONE else [use]}}
        plugins = _resolved(msgspec.json.encode(tree))
        expected, available = ({f.name for f in dataclasses.fields(c)} for c in (Context, context))
        fields = {name: getattr(context, name) for name in available - expected}
        if kind in BACKEND_KINDS:
            built: Component = plugins.create_for_device(kind, type(context), **fields)
            return built
        *_, entry = (e for e in plugins.entries(kind) if use in (e.name, e.value))
        component: Component = plugins.create(entry, type(context), **fields)
        return component

    return context_for(cls, dataclasses.replace(context, creator=create))


def engine_config(extra: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that a table makes, with the defaults for the rest.

    Raises:
        ConfigError: it is not valid.
    """
    config: EngineConfig = typed.convert(dict(extra), EngineConfig, path="")
    return config


def installed_components(config: EngineConfig) -> ComponentFactory:
    """Return the factory of the components that a configuration enables, for a step part."""
    plugins = _resolved(msgspec.json.encode(config))
    return Components(plugins, functools.partial(PluginCalls, Activity(compares_settings=False)))


def fault_counter(config: EngineConfig) -> StepFaults:
    """Return a counter of faults, as the engine hands it to step parts."""
    return StepFaults.under(config.plugins, Activity(compares_settings=False))


def load_default_scheduler() -> type[Scheduler]:
    """Return the class of the default scheduler."""
    plugins = _plugins("fcfs")
    cls: type[Scheduler] = plugins.target(plugins.one("schedulers"))
    return cls


def load_policy(name: str) -> SchedulingPolicy:
    """Return a new instance of an installed scheduling policy.

    Raises:
        PluginError: none of that name is installed.
    """
    plugins = _plugins(name)
    return plugins.create(plugins.one("scheduling_policies"), PolicyContext)


def prepare_request_arguments(
    cls: type[ComponentWithArguments], name: str, options: Any, values: Any, vocab_size: int
) -> Any:
    """Return the prepared arguments of a component for the arguments of a request.

    Raises:
        RequestError: they do not fit; its cause is a ValueError if `prepare` refuses the request.
    """
    source, path = _source(cls, name), f"plugin_args.{name}"
    arguments = convert_arguments(source, cls.Arguments, values, path)
    if not prepares(cls):
        return arguments
    context = PrepareContext(
        options=options,
        params=SamplingParams(),
        prompt_token_ids=[1],
        stop_token_ids=[],
        vocab_size=vocab_size,
        tokenizer=None,
    )
    return prepare_arguments(source, cls, arguments, context, path)


def policy_arguments(policy: SchedulingPolicy) -> PolicyArguments:
    """Return the converter of requests' arguments for a policy."""
    source = _source(type(policy), policy.name)
    entry = PluginEntry(
        kind="scheduling_policies",
        name=source.name,
        value=source.value,
        distribution=source.distribution,
        version=source.version,
    )
    return PolicyArguments(entry, type(policy), policy.options, vocab_size=257)


def load_ops(dtype: torch.dtype, device: torch.device | None = None, use: str = "torch") -> Ops:
    """Return the installed operations of a name, for a component that is built by hand.

    Raises:
        HardpointError: there are none of that name, or they cannot run here.
    """
    plugins = _resolved(msgspec.json.encode({"ops": {"use": use}}))
    device = device or torch.device("cpu")
    return plugins.create_for_device("ops", OpsContext, dtype=dtype, device=device)


def load_quantization(name: str, dtype: torch.dtype, config: Mapping[str, Any]) -> Quantization:
    """Return the installed quantization scheme of a name.

    Args:
        name: name of the scheme.
        dtype: dtype of hidden states.
        config: the `quantization_config` of the checkpoint.

    Raises:
        HardpointError: there is none of that name, or it refuses the config.
    """
    plugins = _resolved(b"{}")
    entry = plugins.get("quantizations", name)
    context: dict[str, Any] = {"dtype": dtype, "device": torch.device("cpu"), "config": config}
    return plugins.create(entry, QuantizationContext, **context)


def load_quantized(
    model: Model,
    weights: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    scheme: Quantization,
    use: str,
) -> None:
    """Load weights into a model as a worker does.

    Args:
        model: with its `weight_cuts`.
        weights: those that it needs, tensors cut.
        scheme: the scheme that reads or makes its matrices.
        use: `quantization.use`.

    Raises:
        HardpointError: they cannot be loaded.
    """
    config = typed.convert({"quantization": {"use": use}}, EngineConfig, path="")
    source = _source(type(scheme), scheme.name)
    stream = QuantizedWeights(config, model, model.weight_cuts(), lambda _: (scheme, source))
    model.load_weights(stream.pass_on(weights))


@functools.cache
def logits_ops(device: torch.device) -> Ops:
    """Return the operations that processors and samplers get by default on a device."""
    return load_ops(torch.float32, device, "auto")


@functools.cache
def load_tokenizer(path: Path | str | None) -> Tokenizer:
    """Return the default tokenizer of a folder or file; None is one token per byte, and EOS.

    Raises:
        ModelError: there is no tokenizer.
    """
    plugins = _plugins("fcfs")
    with tempfile.TemporaryDirectory() as folder:
        path = write_scripted_model(Path(folder)) if path is None else Path(path)
        files = ModelFiles(name=path.name, path=path)
        return plugins.create(plugins.one("tokenizers"), TokenizerContext, files=files)


def create_encoder_cache(num_tokens: int) -> EncoderCacheManager:
    """Return an empty encoder cache for `num_tokens` embeddings."""
    return EncoderCacheManager(num_tokens)


def create_kv_cache_manager(
    num_blocks: int,
    block_size: int,
    *,
    windows: Sequence[int | None],
    prefix_caching: bool,
    eviction: EvictionFactory | None,
    clock: Callable[[], float],
    fault: FaultReporter,
) -> KVCacheManager:
    """Return the engine's KV cache manager.

    Args:
        num_blocks: number of blocks.
        block_size: tokens per block.
        windows: attention window per KV cache group.
        prefix_caching: whether blocks are shared by content.
        eviction: None evicts in the order of release.
        clock: for the eviction policy.
        fault: called with a message and a cause when `eviction` fails.
    """
    metadata = BlockMetadata(clock)
    policy = eviction and eviction(blocks=metadata, history=metadata.start_history, clock=clock)
    return BlockManager(
        num_blocks,
        block_size,
        groups=tuple(KVCacheGroup(window=window) for window in windows),
        prefix_caching=prefix_caching,
        eviction=Eviction(policy, fault),
        metadata=metadata,
    )


def create_batch(max_rows: int, max_tokens: int) -> InputBatch:
    """Return an empty worker batch for requests of up to `max_tokens` tokens."""
    return InputBatch(max_rows, max_tokens, block_size=16)


class ProcessorFailedError(Exception):
    """A logits processor raised for all its rows; `__cause__` is its exception."""


class _WatchedState(dict[str, Any]):
    """The states of a request by processor; notes when one is read."""

    read: list[str]

    def __getitem__(self, name: str) -> Any:
        self.read.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.append(name)
        return super().get(name, default)


class ProcessorPipeline:
    """A logits processor in a pipeline of its own.

    Attributes:
        processor: the instance.
        name: the name under which requests carry its arguments.
        device: where its logits are.
        method_name: the method that changes logits, "apply" or "edits".
    """

    def __init__(
        self, processor: LogitsPlugin, name: str, device: torch.device, max_rows: int
    ) -> None:
        source = _source(type(processor), name)
        self._runner = ProcessorRunner(processor, source, device, max_rows)
        self._pipeline = LogitsPipeline([self._runner], device)
        self.processor = processor
        self.name = self._runner.name
        self.device = device
        self.method_name = self._runner.method_name

    @property
    def num_steps(self) -> int:
        """Return the number of steps in which the processor ran."""
        return self._runner.meter.steps

    @property
    def update_error(self) -> BaseException | None:
        """Return the error of the processor's update_state; None if there was none."""
        return self._runner.broken

    def start(
        self, request: LogitsRequest, observed: Sequence[float] = ()
    ) -> RequestFault | Finish | None:
        """Create the states of a request in its row; return its end, if any."""
        return self._pipeline.start(request, observed)

    def update(self, update: BatchUpdate | None) -> None:
        """Pass the changes of the batch since the last step."""
        self._pipeline.update(update)

    def apply(self, logits: torch.Tensor, requests: list[LogitsRequest]) -> torch.Tensor:
        """Run the processor on all rows at once, in place.

        Raises:
            ProcessorFailedError: it raised, or its result is unusable.
        """
        try:
            return self._pipeline.apply(logits, requests)
        except ProcessorError as error:
            raise ProcessorFailedError(str(error.cause)) from error.cause

    def apply_row_by_row(
        self, logits: torch.Tensor, requests: list[LogitsRequest]
    ) -> tuple[torch.Tensor, dict[str, RequestFault]]:
        """Run the processor on every row apart, as after a fault; return logits and faults."""
        isolation = FaultIsolation(self._pipeline, requests, logits.clone)
        isolation.isolate(self._runner)
        return isolation.run(logits.clone()), isolation.faults

    @property
    def observes(self) -> bool:
        """Return whether the processor's state depends on logits."""
        return self._runner.observes

    def advance(
        self, requests: Sequence[LogitsRequest], tokens: Sequence[int], processed: torch.Tensor
    ) -> dict[str, RequestFault | Finish]:
        """Advance the states of each request by one token; return the ends of requests.

        Args:
            requests: requests of the last `apply`.
            tokens: one per request.
            processed: the logits that it returned, [requests, vocab].
        """
        faults = self._pipeline.advance(requests, tokens, torch.tensor(list(tokens)))
        rows = self._pipeline.observing_rows(requests)
        chosen = [tokens[row] for row in rows]
        seen = distributions_of(processed[rows], chosen)
        return faults | self._pipeline.observe([requests[row] for row in rows], chosen, seen)

    def finish(self, request_id: str) -> None:
        """Forget the kept states of a request that has ended."""
        self._pipeline.observed_states.drop([request_id])

    def draft_view(
        self,
        source: LogitsRequest,
        draft: int,
        scratch_row: int,
        processed: torch.Tensor | None = None,
    ) -> LogitsRequest:
        """Return a view of a request after one more draft token.

        Args:
            source: the request, or its view after the drafts before.
            draft: the token.
            scratch_row: beyond the batch, another one for each view.
            processed: the processed logits of `source`, [vocab], for a processor that observes.
        """
        self._pipeline.check_drafts()
        seen = None if processed is None else distributions_of(processed.unsqueeze(0), [draft])[0]
        view = self._pipeline.fork(source, draft, scratch_row, seen)
        self._pipeline.fork_device_state([(source, view, draft)])
        return view

    def device_state(self, request: LogitsRequest) -> dict[str, torch.Tensor] | None:
        """Return the request's rows of the device state; None if there are none."""
        state = self._runner.device_state
        if not state or not request.arguments:
            return None
        return {name: state.gather(name, [request]) for name in self.processor.device_state()}

    @contextmanager
    def watching_state(self, requests: Sequence[LogitsRequest]) -> Iterator[list[str]]:
        """Yield a list that gets an item whenever the state of a request is read in the body."""
        read: list[str] = []
        device_state, gather = self._runner.device_state, self._runner.device_state.gather

        def gathered(name: str, rows: Sequence[LogitsRequest]) -> torch.Tensor:
            read.append(name)
            return gather(name, rows)

        for request in requests:
            state = _WatchedState(request.state)
            state.read = read
            object.__setattr__(request, "state", state)  # as processors get a frozen request
        with mock.patch.object(device_state, "gather", gathered):
            yield read

    def call(self, logits: torch.Tensor, requests: Sequence[LogitsRequest]) -> None:
        """Call the processor's methods of one step directly, without checks of the result."""
        processor, state = self.processor, self._runner.device_state
        rows = ProcessorRows(self.name, requests, 0, self.device, state)
        if isinstance(processor, SparseLogitsProcessor):
            processor.edits(rows)
        elif isinstance(processor, LogitsProcessor):
            processor.apply(logits, rows)
        elif isinstance(processor, BatchLogitsProcessor):
            processor.apply(logits)
        if state:
            tokens = torch.empty(len(requests), dtype=torch.int64, device=self.device)
            state.advance(requests, lambda t: processor.advance_rows(rows, tokens, t))


def _plugins(policy: str) -> PluginSet:
    tree = {"scheduler": {"use": "default", "policy": policy}}
    return _resolved(msgspec.json.encode(tree))


@functools.cache
def _resolved(tree: bytes) -> PluginSet:
    """Return the plugins of a configuration, a JSON object, resolved once: suites ask per case."""
    return resolve_plugins(typed.convert(msgspec.json.decode(tree), EngineConfig, path=""))


def _source(target: Any, name: str) -> Source:
    module: str = getattr(target, "__module__", "") or getattr(target, "__name__", name)
    value = f"{module}:{target.__qualname__}" if isinstance(target, type) else module
    return Source(name, value, "under test", "0", "default")


def start_worker_process(
    launch: WorkerLaunch, run: str, pass_fds: Sequence[int] = ()
) -> LaunchedWorker:
    """Start a process for a worker, as `ExecutorContext.start_process` of an engine does."""
    return LaunchedWorker(launch, run, pass_fds, _plugins("fcfs").manifest)


def executor_tokens(extra: Mapping[str, Any], *, crowded: bool = False) -> dict[str, list[int]]:
    """Return the tokens of a few requests in an engine with the scripted model, by request id.

    Args:
        extra: configuration.
        crowded: chunk the prompts, preempt some requests, and abort "r3" after a few steps.
    """
    settings = dict(extra)
    if crowded:
        settings["kv_cache"] = {"block_size": 4, "num_blocks": 16}
        settings["scheduler"] = {"max_num_batched_tokens": 8}
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted_model(Path(folder), max_position_embeddings=64)
        engine = scripted_engine(model, settings)
        try:
            ids: list[str] = []
            for index in range(6):
                params = SamplingParams(
                    temperature=float(index % 2), seed=index, max_tokens=12, ignore_eos=True
                )
                prompt = [(97 + 7 * index + place) % 250 for place in range(1 + 3 * index)]
                ids.append(engine.add_request(f"r{index}", prompt, params))
            tokens: dict[str, list[int]] = {}
            for step in itertools.count():
                if not engine.has_unfinished_requests():
                    return tokens
                for output in engine.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
                if crowded and step == _ABORT_STEP:
                    engine.abort_requests(ids[3])
            raise AssertionError("the loop ends with the requests")
        finally:
            engine.close()


@contextmanager
def interrupted_executor(method: str) -> Iterator[None]:
    """Interrupt one call of a method of the default executor in the body, as Ctrl-C does.

    Outside of the main thread, which alone gets signals, nothing is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    plugins = _plugins("fcfs")
    cls = plugins.target(plugins.one("executors"))
    call = getattr(cls, method)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    left = [signal.SIGINT]

    def interrupted(*args: Any) -> Any:
        if left:
            signal.raise_signal(left.pop())
        return call(*args)

    try:
        with mock.patch.object(cls, method, interrupted):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def open_hooks(target: Any, name: str, options: Mapping[str, Any]) -> tuple[HookSet, EngineConfig]:
    """Return the hooks of a module, class or object, checked as the loader does.

    With them comes a configuration that has the table which they declare, if they do.

    Args:
        target: the module, class or object.
        name: under which it is enabled.
        options: as an operator would set them.

    Raises:
        PluginError: the loader rejects it.
    """
    source = _source(target, name)
    check_component(target, KINDS["hooks"], source)
    hooks = HookSet()
    hooks.add(target, source, checked_options(target, options, f"plugin.{name}"))
    return hooks, default_config(declared_tables([(target, source)]))


def provided_components(target: Any, name: str) -> dict[str, str]:
    """Return the FQCNs of components that hooks provide, by `kind/name`; the loader checks them.

    Raises:
        PluginError: the loader rejects one.
    """
    adapters = resolve_plugins(EngineConfig()).adapters
    offers = provided_by(target, _source(target, name), (), adapters, "")
    for offer in offers:
        load_component(KINDS[offer.kind], offer.source("default"), adapters=adapters)
    return {f"{offer.kind}/{offer.name}": offer.value for offer in offers}


def default_config(tables: Mapping[str, type[typed.Strict]], **fields: Any) -> EngineConfig:
    """Return a configuration with some tables and the tables of plugins enabled by default.

    Args:
        tables: by name.
        fields: other fields of the configuration.
    """
    known = dict(default_config_type().tables)
    return EngineConfig.with_tables({**known, **tables})(**fields)


def builtin_commands() -> dict[str, Command]:
    """Return the built-in commands by name."""
    hooks = resolve_plugins(EngineConfig()).hooks()
    return {
        command.name: command for commands in hooks.call("cli_commands") for command in commands
    }


def command_context(generator: Generator, **tables: type[typed.Strict]) -> CommandContext:
    """Return the context of a command under the default configuration and a model that is open.

    Args:
        generator: the open model.
        tables: tables of the configuration that the command's plugin declares, by name.
    """
    config = default_config(tables, model="scripted")

    def load_catalog(config: EngineConfig, config_sources: ConfigSources) -> PluginCatalog:
        return Catalog(resolve_plugins(config, config_sources), config, config_sources)

    return CommandContext(
        load_config=lambda *_settings, **_model: (config, ConfigSources()),
        load_catalog=load_catalog,
        open_model=lambda _config, _config_sources: generator,
        version=installed_version(),
        config_type=lambda: type(config),
        resolve_plugins=resolve_plugins,
    )
