"""Interfaces between an HTTP server, the engine it serves, and plugins that extend the server.

`AsyncLLM` is an `AsyncGenerator`; the built-in server knows nothing else of the engine. Plugins add
routes, middleware, transforms and authenticators through the hook `server_extensions`. A server may
run in several worker processes: event loops in front of the same engines.
"""

from __future__ import annotations

import collections.abc as c
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack

import msgspec

from hardpoint.errors import EngineDeadError
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config.engine import EngineConfig
from hardpoint.plugins.requests.options import ChatRequestOptions, RequestOptions
from hardpoint.plugins.requests.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.plugins.requests.params import PoolingParams, Prompt, SamplingParams
from hardpoint.plugins.requests.stats import Health, PluginMeter
from hardpoint.plugins.text.tokenizer import Tokenizer

from .extension import Client, InstalledExtension
from .groups import (
    AdapterControl,
    DebugControl,
    EngineControl,
    ModelControl,
    PauseModeName,
    WeightControl,
)

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response as HTTPResponse

__all__ = ["AsyncGenerator", "ServerContext", "WorkerPlan"]

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class OpenConversation(Protocol):
    """A conversation that stays open; `AsyncConversation` is one."""

    @property
    def seconds_left(self) -> float | None:
        """The rest of its lease; None while a turn runs, and once it has ended."""

    async def append(self, prompt: Prompt) -> None:
        """Add a part, which is computed with the next turn."""

    def commit(
        self, sampling_params: SamplingParams | None = None
    ) -> c.AsyncGenerator[RequestOutput, None]:
        """Begin a turn; yield its outputs as they come."""

    async def cancel(self) -> None:
        """End the turn that runs, if one does."""

    async def aclose(self) -> None:
        """End the conversation."""


class PluginControl(Protocol):
    """The plugins of an open model."""

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""

    async def change(
        self,
        *,
        enable: Sequence[str] = (),
        disable: Sequence[str] = (),
        replace: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        config: Mapping[str, Any] | None = None,
        running: Literal["finish", "end"] = "finish",
        origin: str = "plugins.change()",
    ) -> Manifest:
        """Change plugins and settings while requests run: in all processes, or in none."""

    async def set_policy(
        self,
        use: str | type[Any],
        options: Mapping[str, Any] | None = None,
        *,
        origin: str = "set_policy()",
    ) -> None:
        """Replace the scheduling policy by a plugin or a `SchedulingPolicy`; no request is lost."""

    async def health(self) -> Health:
        """Return the faults of plugins, the quarantined plugins, and the number of restarts.

        Raises:
            EngineDeadError: the engine is dead and is not restarted.
        """

    async def meters(self) -> dict[str, PluginMeter]:
        """Return the cost of each logits processor, by name."""

    async def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of components that have one, by name; see `Component.dump_state`."""

    async def call_part(
        self, part: str, method: str, arguments: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a method of a step part; return its result."""

    async def process(
        self,
        data: Any,
        io_processor: str | None = None,
        *,
        as_json: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Return the output of an IO processor for an input; its JSON with `as_json`.

        Args:
            io_processor: its name; None is the only one.

        Raises:
            RequestError: the input is wrong, or there is no such processor.
            RequestEndedError: a request to the model ended without a result.
            PluginFaultError: the processor failed.
        """

    def io_processor_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the JSON schema of the inputs of each enabled IO processor, by name."""

    def argument_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the JSON schema of each enabled plugin's arguments, by the plugin's name."""

    def server_extensions(self, server: ServerContext) -> Sequence[InstalledExtension]:
        """Call the hook of the same name; return the extensions in order of enabling.

        Raises:
            PluginError: a plugin failed, or returned something else.
        """


class AsyncGenerator(Protocol):
    """An open model that generates for the tasks of one event loop; `AsyncLLM` is one."""

    @property
    def adapters(self) -> AdapterControl:
        """The adapters (LoRA)."""

    @property
    def engines(self) -> EngineControl:
        """The engines: control calls, number, load and settings."""

    @property
    def weights(self) -> WeightControl:
        """The weights."""

    @property
    def plugins(self) -> PluginControl:
        """The plugins."""

    @property
    def debug(self) -> DebugControl:
        """Profiles."""

    @property
    def model(self) -> ModelControl:
        """The model: tasks, default parameters, tokens of prompts."""

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def is_running(self) -> bool:
        """True while the engine serves, as far as is known; false during a restart."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that ended the engine, if it is dead and is not restarted."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> c.AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yield outputs as they come. Closing it aborts the request.

        Raises:
            RequestError: prompt or parameters are wrong.
            OverloadedError: too many requests wait.
            EngineDeadError: the engine died; the request may be sent again.
        """

    def fork(
        self, request_id: str, token_ids: Sequence[int]
    ) -> c.AsyncGenerator[RequestOutput, None]:
        """Go on with other outputs in a copy of a request of `generate`; yield the copy's outputs.

        The copy is one more completion of the same prompt, with a number of its own; `abort` ends
        all of that request id. The source's stream has begun and is not closed.

        Args:
            token_ids: all output tokens so far.

        Raises:
            RequestError: no request of that id is open, or the copy cannot go on after `token_ids`.
        """

    def open_conversation(
        self,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        keep_last: bool = True,
        **options: Unpack[RequestOptions],
    ) -> OpenConversation:
        """Open a session: each prompt continues after the previous answer.

        Raises:
            RequestError: parameters or options are wrong for a conversation.
            OverloadedError: too many are open.
        """

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> c.AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt; yield one output. Errors are the same as for `generate`."""

    async def encode_batch(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        names: Sequence[str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]:
        """Pool the prompts of one call, in one message; errors call them by `names`."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> c.AsyncGenerator[RequestOutput, None]:
        """Answer a conversation by the model's chat template; yield outputs as they come."""

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids; unknown ids are ignored."""

    async def metrics(self) -> str:
        """Return the exports of the enabled stat sinks, in Prometheus's text format."""

    async def aclose(self) -> None:
        """End the engine; callers that wait for it get EngineClosedError."""

    async def sleep(self, level: int = 1, mode: PauseModeName = "abort") -> None:
        """Pause, then release memory until `wake_up`."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Reallocate memory that `sleep` released."""

    async def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Clear the prefix cache."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """Call a method of every worker; return the results in rank order."""


class ServerContext(Protocol):
    """The parts of a server that it gives to the plugins that extend it."""

    @property
    def engine(self) -> AsyncGenerator:
        """Engine that it serves."""

    @property
    def version(self) -> str:
        """Version of Hardpoint."""

    async def read(self, request: HTTPRequest, type_: type[StructT]) -> StructT:
        """Return the JSON body of a request to a route, checked.

        The limits and the messages of errors are the same as for the server's own routes; members
        that are null are left out. Transforms do not see it.

        Args:
            request: request of the route.
            type_: type of the body; derived from `hardpoint.typed.Strict` it rejects unknown
                fields.

        Raises:
            RequestError: naming the field, its value and the expectation.
            Exception: the body is no JSON, is too long, or stops; the server answers it.
        """

    def body_parts(self, request: HTTPRequest, max_bytes: int) -> c.AsyncGenerator[bytes, None]:
        """Yield the body of a request to a route as it comes in, within the server's time limits.

        For bodies that are no JSON, see `Route.body_types`, or too large for memory.

        Args:
            request: request of the route.
            max_bytes: size that it may have.

        Raises:
            Exception: the body is too long, or stops; the server answers it.
        """

    async def ask(self, client: Client, path: str, body: bytes) -> HTTPResponse:
        """Return the answer of a route of this server to a POST of JSON.

        It is answered like a request of a client, within the client's bounds and the server's
        limits, by middleware and transforms too; no key is asked for. Cancelling it ends the
        request. The answer has the status, the headers and the body; its status is 0 if it was
        cut.

        Args:
            client: who asks.
            path: path of a route that does not stream.
            body: JSON.
        """

    def model(self, name: str | None) -> str:
        """Return the name of the model for an answer to a request that names one, or none.

        Raises:
            Exception: the server has no such model; the server answers it with 404.
        """

    def check_prompt(self, *parts: Any, name: str = "prompt") -> None:
        """Check the size of a prompt's inputs before they are processed.

        Args:
            parts: texts, or plain data that holds texts.
            name: field that has them.

        Raises:
            RequestError: they have more characters than `server.limits` allows.
        """

    def options(self, request: HTTPRequest, asked: Any) -> RequestOptions:
        """Return the options of a request to the engine, within the bounds of who calls.

        They are the same as for the server's own routes: the salt and the tags of the client's key,
        its bounds of priority and time, and the trace.

        Args:
            request: request of the route.
            asked: body, of which the fields `priority`, `timeout`, `tags`, `cache_salt`,
                `kv_transfer_params` and `truncate_prompt_tokens` count, where it has them.

        Raises:
            RequestError: one is out of bounds.
            Exception: the client may not give it; the server answers it with 403.
        """

    async def while_connected(
        self, request: HTTPRequest, work: Coroutine[Any, Any, T], *, generates: bool = False
    ) -> T:
        """Return the result of work for a route, which is cancelled when the client goes.

        A route that generates runs it so, after it has read the body; nothing else ends it. Its
        time does not count for `server.extension_seconds`.

        Args:
            generates: whether it counts as a request that is being answered, like requests of the
                server's own routes do: `server.limits.requests` bounds it, and it is rejected while
                the engine is paused or the server ends.

        Raises:
            Exception: raised by the work; the client is gone, or the server takes no requests,
                which the server answers.
        """


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """A function that worker processes run, and its inputs.

    Attributes:
        run: function that each calls with its `CommandWorker`, as `package.module:function`; it
            returns the exit code.
        num_workers: number of processes.
        files: file descriptors; each process gets duplicates.
        data: plain data for each.
    """

    run: str
    num_workers: int
    files: Sequence[int] = ()
    data: Any = None


class CommandWorker(Protocol):
    """The engine and the inputs of a worker process."""

    @property
    def index(self) -> int:
        """Its number, from 0; a process that replaces it has the same."""

    @property
    def engine(self) -> AsyncGenerator:
        """The engines, which it shares with the other processes."""

    @property
    def version(self) -> str:
        """The version of Hardpoint."""

    @property
    def files(self) -> Sequence[int]:
        """Its duplicates of the plan's."""

    @property
    def data(self) -> Any:
        """The plan's."""

    async def announce_ready(self) -> None:
        """Notify the process that started it that it serves."""


Worker = CommandWorker
"""Name of `CommandWorker` in packages of authors."""


class WorkerGroup(Protocol):
    """The engines of several worker processes, and these, in the process that started both."""

    @property
    def engine(self) -> AsyncGenerator:
        """The engines."""

    async def start(self, plan: WorkerPlan) -> None:
        """Start the workers; return once all are ready.

        A process that ends before it is asked to is replaced; its requests end, other requests go
        on.

        Raises:
            HardpointError: one could not start; all are ended.
        """

    def replaced(self) -> Sequence[int]:
        """Return the numbers of workers that were replaced since the last call."""

    def send_signal(self, number: int) -> None:
        """Send all workers a signal. A worker that ends after SIGTERM or SIGINT is not replaced."""

    async def wait(self) -> int:
        """Wait until all have ended; return the highest exit code, 0 or more.

        Workers that ended too often are not replaced; then the others get SIGTERM.
        """

    async def aclose(self) -> None:
        """End the workers that are left, and the engines."""
