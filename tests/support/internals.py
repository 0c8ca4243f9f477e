"""Access of tests to parts of engines without a public name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from hardpoint import LLM, AsyncLLM
from hardpoint.core.engine.core import EngineCore
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.outputs.output_processor import OutputProcessor
from hardpoint.core.frontend.requests.input_processor import InputProcessor
from hardpoint.plugins import EngineConfig, OutputParser
from hardpoint.process.async_engine import AsyncEngine
from hardpoint.process.client.event_loop import SendQueue
from hardpoint.process.client.process_client import ProcessClient
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.toolkit.limited import LimitedProcess


def engine_of(llm: LLM | AsyncLLM) -> Any:
    """Return the engine behind an LLM or AsyncLLM."""
    return llm._engine


def client_of(llm: LLM | AsyncLLM) -> ProcessClient:
    """Return the client with which the frontend reaches its engine process."""
    return llm._engine._client


def send_queue_of(llm: AsyncLLM) -> SendQueue:
    """Return the queue of tasks that wait to send a request."""
    return llm._engine._send_queue


def sockets_of(client: ProcessClient) -> EngineSockets:
    """Return the sockets that connect a client to its engine process."""
    return client._sockets


def calls_of(sockets: EngineSockets) -> dict[int, Any]:
    """Return the utility calls that the engine has not answered."""
    return sockets._calls


def set_timeout(waiter: ProcessClient | SendQueue, seconds: float) -> None:
    """Change the timeout of a client's calls, or of the requests in a send queue."""
    waiter._timeout_s = seconds


def core_of(engine: LLMEngine) -> EngineCore:
    """Return the engine core that runs in this process."""
    return engine.parts.client._core


def use_client(engine: LLMEngine, client: Any) -> AbstractContextManager[Any]:
    """Let an engine reach its core, and others, by another client."""
    return mock.patch.object(engine, "_client", client)


def config_of(engine: LLMEngine) -> EngineConfig:
    """Return the configuration of an engine core that runs in this process."""
    return core_of(engine)._parts.config


def scheduler_of(engine: LLMEngine) -> Any:
    """Return the scheduler of an engine core that runs in this process."""
    return core_of(engine)._scheduler


def worker_of(engine: LLMEngine) -> Any:
    """Return the worker of an engine core that runs in this process."""
    return core_of(engine)._executor._worker


def input_processor_of(engine: LLMEngine | AsyncEngine) -> InputProcessor:
    """Return the processor that makes requests of prompts."""
    return engine._frontend.input


def output_processor_of(engine: LLMEngine | AsyncEngine) -> OutputProcessor:
    """Return the processor that makes outputs of tokens."""
    return engine._frontend.output


def parsers_of(engine: LLMEngine | AsyncEngine) -> list[str]:
    """Return the names of the output parsers of all requests, each once."""
    components = engine.parts.step_parts.components
    return [parser.name for parser in components if isinstance(parser, OutputParser)]


def states_of(output: OutputProcessor) -> dict[str, Any]:
    """Return the states that an output processor keeps, by internal request id."""
    return output._states


def keeps_nothing(output: OutputProcessor) -> bool:
    """Whether an output processor has forgotten all requests."""
    return output._states == output._by_parent == output._by_external == {}


def open_calls_of(llm):
    """Return the calls of an LLM that wait for outputs."""
    return llm._requests.calls


def open_conversations_of(llm):
    """Return the open conversations of an LLM or AsyncLLM."""
    return llm._conversations


def limited_process_of(owner: Any) -> LimitedProcess:
    """Return the limited process of a chat renderer or image decoder."""
    return owner._process


def set_time_limit(process: Any, seconds: float) -> None:
    """Change the time limit of each request to a process, or of a grammar compiler."""
    process._seconds = seconds
