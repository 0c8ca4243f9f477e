"""The table of extension points. Loader, command line, tests and reference are made from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hardpoint.plugins.component import Component, ComponentAdapter
from hardpoint.plugins.config import EngineConfig
from hardpoint.plugins.executor import Executor
from hardpoint.plugins.grammars import GrammarBackend
from hardpoint.plugins.kv_cache import EvictionPolicy, KVEventPublisher
from hardpoint.plugins.kv_connector import KVConnector
from hardpoint.plugins.kv_store import KVStore
from hardpoint.plugins.model import Model
from hardpoint.plugins.model.attention import AttentionBackend
from hardpoint.plugins.model.loader import WeightLoader
from hardpoint.plugins.model.ops import Ops
from hardpoint.plugins.output_parser import OutputParser, Role
from hardpoint.plugins.parallel import Communicator
from hardpoint.plugins.process.balancer import LoadBalancer
from hardpoint.plugins.quantization import Quantization
from hardpoint.plugins.sampling.activation_tap import ActivationTap
from hardpoint.plugins.sampling.logits import (
    BatchLogitsProcessor,
    LogitsPlugin,
    LogitsProcessor,
    SparseLogitsProcessor,
)
from hardpoint.plugins.sampling.pooler import Pooler
from hardpoint.plugins.sampling.sampler import Sampler
from hardpoint.plugins.scheduling.policy import SchedulingPolicy
from hardpoint.plugins.scheduling.scheduler import Scheduler
from hardpoint.plugins.server.adapter_resolver import AdapterResolver
from hardpoint.plugins.server.stat_sink import StatSink
from hardpoint.plugins.step_part import StepPart
from hardpoint.plugins.step_part.speculator import Speculator
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.plugins.text.io_processor import IOProcessor
from hardpoint.plugins.text.tokenizer import Tokenizer

__all__ = ["KINDS", "FaultScope", "Number", "PluginKind", "Process", "Stability", "value_at"]


class Number(Enum):
    """How many components of a kind an engine has."""

    ONE = "one"
    """The one that the configuration chooses; none if it may choose none, and does."""
    MANY = "many"
    """All that are enabled, in order."""
    BY_NAME = "by name"
    """Loaded when a model or request names it."""


class Process(Enum):
    """A process in which a component runs."""

    FRONTEND = "frontend"
    ENGINE = "engine"
    WORKER = "worker"


class FaultScope(Enum):
    """Scope of a fault: the work that a fault of a component ends."""

    REQUEST = "request"
    """The requests that use it."""
    STEP = "step"
    """Nothing: the built-in default decides this step, or the one call is skipped."""
    ENGINE = "engine"
    """The engine."""


class Stability(Enum):
    """How far authors may rely on a kind's interface."""

    STABLE = "stable"
    """It changes only with the kind's contract version, and the version before is accepted."""
    PROVISIONAL = "provisional"
    """Any release may change it; its notes describe how."""


@dataclass(frozen=True)
class PluginKind:
    """One extension point.

    Attributes:
        name: also the entry-point group's, after `hardpoint.`.
        interface: base class of components; None for hooks, which pluggy checks.
        role: role that an output parser of it has to have.
        forms: the interface's own abstract forms, if an author derives from one of several.
        suite: the class in `hardpoint.testing` that checks its components.
        contract: current version; the engine accepts it and the one before.
        chosen_by: the configuration path that names the component, or the list of them for
            Number.MANY; None if `plugins.enable` names it.
        idle_at: a configuration path, and the value at which the component that is chosen by
            default is not imported at the start, since it has no work.
        named_by: the configuration path that names one of the enabled components, of
            Number.BY_NAME; an FQCN there enables it.
        restart: why its components cannot be enabled, disabled and replaced while an engine runs;
            None if they can, unless their class states otherwise.
    """

    name: str
    interface: type[Component] | None
    number: Number
    processes: tuple[Process, ...]
    fault_scope: FaultScope
    summary: str
    suite: str
    contract: int = 1
    stability: Stability = Stability.PROVISIONAL
    chosen_by: str | None = None
    named_by: str | None = None
    restart: str | None = None
    idle_at: tuple[str, Any] | None = None
    role: Role | None = None
    forms: tuple[type[Component], ...] = ()

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"hardpoint.{self.name}"

    @property
    def scope_can_be_raised(self) -> bool:
        """Whether `plugins.on_error` may let faults of its components end the engine."""
        return self.name == "logits_processors" or self.fault_scope is FaultScope.STEP

    @property
    def changes_live(self) -> bool:
        """Whether its components can be changed while an engine runs."""
        return self.restart is None

    def can_change(self, cls: Any) -> bool:
        """Return whether a component can be changed while an engine runs; None is any class."""
        return self.changes_live and bool(getattr(cls, "changes_live", True))

    @property
    def takes_arguments(self) -> bool:
        """Whether requests may give arguments for its components."""
        return self.interface is not None and issubclass(self.interface, ComponentWithArguments)

    @property
    def interface_names(self) -> list[str]:
        """Names of the classes that an author may derive from."""
        if self.interface is None:
            return []
        return [form.__name__ for form in self.forms or (self.interface,)]

    def idle_default(self, config: EngineConfig) -> str | None:
        """Return the name of the chosen component if it is the default one, and has no work."""
        if self.idle_at is None or self.chosen_by is None:
            return None
        path, value = self.idle_at
        chosen: str = value_at(config, self.chosen_by)
        is_default = chosen == value_at(EngineConfig(), self.chosen_by)
        return chosen if is_default and value_at(config, path) == value else None


def value_at(config: EngineConfig, path: str) -> Any:
    """Return the value of a configuration at a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


KINDS: dict[str, PluginKind] = {
    kind.name: kind
    for kind in (
        PluginKind(
            name="logits_processors",
            stability=Stability.STABLE,
            interface=LogitsPlugin,
            forms=(LogitsProcessor, SparseLogitsProcessor, BatchLogitsProcessor),
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.WORKER),
            fault_scope=FaultScope.REQUEST,
            summary="Change the logits of the requests that use the processor.",
            suite="LogitsProcessorSuite",
        ),
        PluginKind(
            name="samplers",
            restart="its noise is that of requests which have begun",
            interface=Sampler,
            number=Number.ONE,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.ENGINE,
            chosen_by="sampler.use",
            summary="Choose a token from the processed logits.",
            suite="SamplerSuite",
        ),
        PluginKind(
            name="schedulers",
            restart="it has the live requests and their blocks; its policy and limits change live",
            interface=Scheduler,
            number=Number.ONE,
            processes=(Process.ENGINE,),
            fault_scope=FaultScope.ENGINE,
            chosen_by="scheduler.use",
            summary="Assign each step's token budget to requests.",
            suite="SchedulerSuite",
            contract=2,
        ),
        PluginKind(
            name="speculators",
            restart="workers leave room for drafts when they start",
            interface=Speculator,
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.WORKER),
            fault_scope=FaultScope.STEP,
            chosen_by="speculation.use",
            summary="Draft tokens; the next step verifies each draft.",
            suite="SpeculatorSuite",
        ),
        PluginKind(
            name="poolers",
            restart="the tasks of a model are known when it starts",
            interface=Pooler,
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.WORKER),
            fault_scope=FaultScope.REQUEST,
            summary="Compute vectors from the hidden states of a prompt.",
            suite="PoolerSuite",
        ),
        PluginKind(
            name="activation_taps",
            restart="the layers and keys of cached blocks that it asks for are read when the "
            "model is loaded",
            interface=ActivationTap,
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.ENGINE, Process.WORKER),
            fault_scope=FaultScope.REQUEST,
            summary="Read or change hidden states in the model, for requests that ask.",
            suite="ActivationTapSuite",
        ),
        PluginKind(
            name="step_parts",
            interface=StepPart,
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.ENGINE, Process.WORKER),
            fault_scope=FaultScope.REQUEST,
            summary="Take part in each step: gate requests, count resources, mask, read results.",
            suite="StepPartSuite",
        ),
        PluginKind(
            name="scheduling_policies",
            stability=Stability.STABLE,
            interface=SchedulingPolicy,
            number=Number.ONE,
            processes=(Process.ENGINE,),
            fault_scope=FaultScope.STEP,
            chosen_by="scheduler.policy",
            summary="Order waiting requests and choose whom to preempt.",
            suite="SchedulingPolicySuite",
        ),
        PluginKind(
            name="eviction_policies",
            restart="it keeps the order of all cached blocks",
            stability=Stability.STABLE,
            interface=EvictionPolicy,
            number=Number.ONE,
            processes=(Process.ENGINE,),
            fault_scope=FaultScope.STEP,
            chosen_by="kv_cache.eviction",
            summary="Choose the cached content to discard when a block is needed.",
            suite="EvictionPolicySuite",
            contract=2,
        ),
        PluginKind(
            name="kv_event_publishers",
            restart="its subscribers follow the cache from the start",
            interface=KVEventPublisher,
            number=Number.MANY,
            processes=(Process.ENGINE,),
            fault_scope=FaultScope.STEP,
            chosen_by="kv_events.publishers",
            summary="Publish the events of the KV cache.",
            suite="KVEventPublisherSuite",
        ),
        PluginKind(
            name="kv_connectors",
            restart="it has the KV cache from when it is allocated",
            interface=KVConnector,
            number=Number.ONE,
            processes=(Process.ENGINE, Process.WORKER),
            fault_scope=FaultScope.STEP,
            chosen_by="kv_connector.use",
            summary="Load and save blocks of the KV cache outside of it.",
            suite="KVConnectorSuite",
        ),
        PluginKind(
            name="kv_stores",
            restart="a tier holds blocks that requests may be loading",
            interface=KVStore,
            number=Number.MANY,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.STEP,
            chosen_by="kv_connector.stores",
            summary="Keep blocks of the KV cache by key: in memory, on disk, on other machines.",
            suite="KVStoreSuite",
        ),
        PluginKind(
            name="executors",
            restart="it has the workers",
            interface=Executor,
            number=Number.ONE,
            processes=(Process.ENGINE,),
            fault_scope=FaultScope.ENGINE,
            chosen_by="executor.use",
            summary="Run the workers that hold the model.",
            suite="ExecutorSuite",
            contract=2,
        ),
        PluginKind(
            name="communicators",
            restart="the workers meet by it when they start",
            interface=Communicator,
            number=Number.ONE,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.ENGINE,
            chosen_by="parallel.communicator",
            summary="Move tensors between the workers that share a model.",
            suite="CommunicatorSuite",
        ),
        PluginKind(
            name="models",
            restart="it has the weights",
            interface=Model,
            number=Number.BY_NAME,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.ENGINE,
            summary="Compute hidden states and logits of one architecture.",
            suite="ModelSuite",
        ),
        PluginKind(
            name="loaders",
            restart="it has read the weights",
            interface=WeightLoader,
            number=Number.BY_NAME,
            processes=(Process.FRONTEND, Process.WORKER),
            fault_scope=FaultScope.ENGINE,
            named_by="load.use",
            summary="Read a model's configuration and weights from one format.",
            suite="WeightLoaderSuite",
        ),
        PluginKind(
            name="quantizations",
            restart="the weights are stored in its form",
            interface=Quantization,
            number=Number.BY_NAME,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.ENGINE,
            named_by="quantization.use",
            summary="Quantize the weight matrices of a model.",
            suite="QuantizationSuite",
        ),
        PluginKind(
            name="attention_backends",
            restart="the KV cache has its layout",
            interface=AttentionBackend,
            number=Number.ONE,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.ENGINE,
            chosen_by="attention.use",
            summary="Store keys and values in blocks and compute attention over them.",
            suite="AttentionBackendSuite",
        ),
        PluginKind(
            name="ops",
            restart="the model is built of it",
            interface=Ops,
            number=Number.ONE,
            processes=(Process.WORKER,),
            fault_scope=FaultScope.ENGINE,
            chosen_by="ops.use",
            summary="Compute the products, norms and other operations of models.",
            suite="OpsSuite",
        ),
        PluginKind(
            name="tokenizers",
            restart="live requests have its token ids",
            interface=Tokenizer,
            number=Number.ONE,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.REQUEST,
            chosen_by="tokenizer.use",
            summary="Turn text into token ids and back.",
            suite="TokenizerSuite",
        ),
        PluginKind(
            name="grammars",
            restart="compiled grammars of live requests are its own",
            interface=GrammarBackend,
            number=Number.BY_NAME,
            processes=(Process.FRONTEND, Process.ENGINE),
            fault_scope=FaultScope.REQUEST,
            named_by="grammar.use",
            summary="Constrain the next token to structured output.",
            suite="GrammarSuite",
        ),
        PluginKind(
            name="reasoning_parsers",
            interface=OutputParser,
            number=Number.BY_NAME,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.REQUEST,
            named_by="reasoning.parser",
            summary="Separate a model's reasoning from its answer.",
            suite="OutputParserSuite",
            contract=2,
            role="reasoning",
        ),
        PluginKind(
            name="tool_parsers",
            interface=OutputParser,
            number=Number.BY_NAME,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.REQUEST,
            named_by="tools.parser",
            summary="Find the tool calls in the output of a model.",
            suite="OutputParserSuite",
            contract=2,
            role="tools",
        ),
        PluginKind(
            name="adapter_resolvers",
            restart="adapters that it has found stay loaded by its name",
            interface=AdapterResolver,
            number=Number.MANY,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.REQUEST,
            chosen_by="adapters.resolvers",
            summary="Find the files of an adapter that a request names.",
            suite="AdapterResolverSuite",
        ),
        PluginKind(
            name="io_processors",
            restart="prompts and outputs of a request have to be of the same one",
            interface=IOProcessor,
            number=Number.BY_NAME,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.REQUEST,
            summary="Convert other inputs to prompts, and results to other outputs.",
            suite="IOProcessorSuite",
        ),
        PluginKind(
            name="balancers",
            interface=LoadBalancer,
            number=Number.ONE,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.STEP,
            chosen_by="parallel.balancer",
            idle_at=("parallel.data", 1),
            summary="Choose the engine that runs a request, if there are several.",
            suite="LoadBalancerSuite",
        ),
        PluginKind(
            name="stat_sinks",
            stability=Stability.STABLE,
            interface=StatSink,
            number=Number.MANY,
            processes=(Process.FRONTEND,),
            fault_scope=FaultScope.STEP,
            chosen_by="stats.sinks",
            summary="Receive the engine's statistics.",
            suite="StatSinkSuite",
        ),
        PluginKind(
            name="component_adapters",
            restart="what it adapts is loaded when the engine starts",
            interface=ComponentAdapter,
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.ENGINE, Process.WORKER),
            fault_scope=FaultScope.ENGINE,
            summary="Adapt classes that were written for another engine.",
            suite="ComponentAdapterSuite",
        ),
        PluginKind(
            name="hooks",
            restart="each process binds their calls, a server its routes and commands, when "
            "it starts",
            interface=None,
            number=Number.MANY,
            processes=(Process.FRONTEND, Process.ENGINE),
            fault_scope=FaultScope.REQUEST,
            summary="Observe lifecycle and requests; add commands and routes.",
            suite="HookSuite",
        ),
    )
}
