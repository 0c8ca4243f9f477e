"""Tools for tests of plugins and of the engine: the scripted model, and the conformance suites.

The scripted model needs the engine only. The suites need pytest and hypothesis
(`pip install '/path/to/hardpoint[testing]'`) and are enabled by a line in `conftest.py`:
`pytest_plugins = ["hardpoint.testing"]`.

PYTEST_DONT_REWRITE: no `assert` of this module has to be explained by pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .pytest_hooks import (
    pytest_report_header,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_terminal_summary,
)
from .scripted import (
    EOS,
    HistoryAttention,
    ScriptedClock,
    ScriptedModel,
    history_hash,
    scripted_config,
    scripted_engine,
    write_scripted_model,
)

if TYPE_CHECKING:
    from hardpoint.testing.adapter_resolver_suite import AdapterResolverSuite
    from hardpoint.testing.balancing.balancer_suite import LoadBalancerSuite
    from hardpoint.testing.balancing.engines import ScriptedEngines, scripted_request
    from hardpoint.testing.component_adapter_suite import ComponentAdapterSuite
    from hardpoint.testing.engine_access import load_ops
    from hardpoint.testing.hidden_states.pooler_suite import PoolerSuite
    from hardpoint.testing.hidden_states.tap_suite import ActivationTapSuite
    from hardpoint.testing.io_processor_suite import IOProcessorSuite
    from hardpoint.testing.kv.connector_suite import KVConnectorSuite
    from hardpoint.testing.kv.peer_suite import PeerKVStoreSuite
    from hardpoint.testing.kv.store_suite import KVStoreSuite
    from hardpoint.testing.logits.suite import LogitsProcessorSuite
    from hardpoint.testing.model.attention.suite import AttentionBackendSuite
    from hardpoint.testing.model.loader_suite import WeightLoaderSuite
    from hardpoint.testing.model.model_suite import ModelSuite
    from hardpoint.testing.model.quantization_rules import QuantizedSample
    from hardpoint.testing.model.quantization_suite import QuantizationSuite
    from hardpoint.testing.model.rank_threads import run_ranks
    from hardpoint.testing.ops.ops_suite import OpsSuite
    from hardpoint.testing.reporting.publisher_suite import KVEventPublisherSuite
    from hardpoint.testing.reporting.sink_suite import StatSinkSuite
    from hardpoint.testing.running.command_suite import CommandSuite
    from hardpoint.testing.running.communicator_suite import CommunicatorSuite
    from hardpoint.testing.running.executor_suite import ExecutorSuite
    from hardpoint.testing.running.hook_suite import HookSuite
    from hardpoint.testing.running.scripted_drafts import ScriptedDrafts, ScriptedSpeculator
    from hardpoint.testing.running.scripted_parts import ScriptedAdapters, ScriptedEmbeddings
    from hardpoint.testing.running.serving import ServerAnswer, TestServer, serve
    from hardpoint.testing.running.step_parts.suite import StepPartSuite
    from hardpoint.testing.sampling_suite import SamplerSuite
    from hardpoint.testing.scheduling.cache_replay import measure_hit_rate
    from hardpoint.testing.scheduling.eviction_suite import EvictionPolicySuite
    from hardpoint.testing.scheduling.policy_suite import SchedulingPolicySuite
    from hardpoint.testing.scheduling.scheduler_suite import SchedulerSuite
    from hardpoint.testing.scheduling.simulator import SchedulerSimulator
    from hardpoint.testing.speculator_suite import SpeculatorSuite
    from hardpoint.testing.text.grammar_suite import GrammarSample, GrammarSuite
    from hardpoint.testing.text.output_parser_suite import OutputParserSuite, OutputSample
    from hardpoint.testing.text.tokenizer_suite import TokenizerSuite

__all__ = [
    "EOS",
    "ActivationTapSuite",
    "AdapterResolverSuite",
    "AttentionBackendSuite",
    "CommandSuite",
    "CommunicatorSuite",
    "ComponentAdapterSuite",
    "EvictionPolicySuite",
    "ExecutorSuite",
    "GrammarSample",
    "GrammarSuite",
    "HistoryAttention",
    "HookSuite",
    "IOProcessorSuite",
    "KVConnectorSuite",
    "KVEventPublisherSuite",
    "KVStoreSuite",
    "LoadBalancerSuite",
    "LogitsProcessorSuite",
    "ModelSuite",
    "OpsSuite",
    "OutputParserSuite",
    "OutputSample",
    "PeerKVStoreSuite",
    "PoolerSuite",
    "QuantizationSuite",
    "QuantizedSample",
    "SamplerSuite",
    "SchedulerSimulator",
    "SchedulerSuite",
    "SchedulingPolicySuite",
    "ScriptedAdapters",
    "ScriptedClock",
    "ScriptedDrafts",
    "ScriptedEmbeddings",
    "ScriptedEngines",
    "ScriptedModel",
    "ScriptedSpeculator",
    "ServerAnswer",
    "SpeculatorSuite",
    "StatSinkSuite",
    "StepPartSuite",
    "TestServer",
    "TokenizerSuite",
    "WeightLoaderSuite",
    "history_hash",
    "load_ops",
    "measure_hit_rate",
    "pytest_report_header",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_terminal_summary",
    "run_ranks",
    "scripted_config",
    "scripted_engine",
    "scripted_request",
    "serve",
    "write_scripted_model",
]


_LAZY = {
    "AdapterResolverSuite": "adapter_resolver_suite",
    "AttentionBackendSuite": "model.attention.suite",
    "EvictionPolicySuite": "scheduling.eviction_suite",
    "CommandSuite": "running.command_suite",
    "ComponentAdapterSuite": "component_adapter_suite",
    "CommunicatorSuite": "running.communicator_suite",
    "ExecutorSuite": "running.executor_suite",
    "GrammarSample": "text.grammar_suite",
    "GrammarSuite": "text.grammar_suite",
    "HookSuite": "running.hook_suite",
    "IOProcessorSuite": "io_processor_suite",
    "KVConnectorSuite": "kv.connector_suite",
    "KVEventPublisherSuite": "reporting.publisher_suite",
    "KVStoreSuite": "kv.store_suite",
    "LoadBalancerSuite": "balancing.balancer_suite",
    "LogitsProcessorSuite": "logits.suite",
    "ModelSuite": "model.model_suite",
    "OpsSuite": "ops.ops_suite",
    "OutputParserSuite": "text.output_parser_suite",
    "OutputSample": "text.output_parser_suite",
    "PeerKVStoreSuite": "kv.peer_suite",
    "QuantizationSuite": "model.quantization_suite",
    "QuantizedSample": "model.quantization_rules",
    "SamplerSuite": "sampling_suite",
    "SchedulerSimulator": "scheduling.simulator",
    "SchedulerSuite": "scheduling.scheduler_suite",
    "SchedulingPolicySuite": "scheduling.policy_suite",
    "ScriptedAdapters": "running.scripted_parts",
    "ScriptedEmbeddings": "running.scripted_parts",
    "ScriptedEngines": "balancing.engines",
    "ScriptedDrafts": "running.scripted_drafts",
    "ScriptedSpeculator": "running.scripted_drafts",
    "ServerAnswer": "running.serving",
    "PoolerSuite": "hidden_states.pooler_suite",
    "SpeculatorSuite": "speculator_suite",
    "ActivationTapSuite": "hidden_states.tap_suite",
    "StatSinkSuite": "reporting.sink_suite",
    "StepPartSuite": "running.step_parts.suite",
    "TestServer": "running.serving",
    "TokenizerSuite": "text.tokenizer_suite",
    "load_ops": "engine_access",
    "run_ranks": "model.rank_threads",
    "scripted_request": "balancing.engines",
    "serve": "running.serving",
    "measure_hit_rate": "scheduling.cache_replay",
    "WeightLoaderSuite": "model.loader_suite",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, because the scripted model needs neither pytest nor hypothesis.
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
