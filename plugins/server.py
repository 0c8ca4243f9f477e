"""Interfaces between an HTTP server, the engine it serves, and plugins that extend the server.

`AsyncLLM` is an `AsyncGenerator`; the built-in server knows nothing else of the engine. Plugins add
routes, middleware, transforms and authenticators through the hook `server_extensions`.
"""

from __future__ import annotations

import collections.abc as c
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack

import msgspec

from hardpoint.errors import EngineDeadError
from hardpoint.typed import Strict

from .config import EngineConfig
from .manifest import Manifest
from .params import PoolingParams, SamplingParams
from .request_options import ChatOptions, ChatRequestOptions, RequestOptions
from .requests import PoolingRequestOutput, Prompt, RequestOutput, ToolCall
from .scheduling_policy import SchedulingPolicy
from .stats import Health, PluginMeter, SchedulerStats
from .step_record import LiveRequest
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

__all__ = [
    "AsyncGenerator",
    "Authenticator",
    "Call",
    "Client",
    "InstalledExtension",
    "LiveRequest",
    "Middleware",
    "Route",
    "ServerContext",
    "ServerExtension",
    "ToolCall",
    "Transform",
]

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)

PauseModeName = Literal["abort", "wait", "keep"]


class AsyncGenerator(Protocol):
    """An open model that generates for the tasks of one event loop; `AsyncLLM` is one.

    `ControlCalls` of the engine documents the control calls, from `pause` on.
    """

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def takes_images(self) -> bool:
        """Whether prompts and conversations may have images."""

    @property
    def is_running(self) -> bool:
        """True while the engine serves, as far as is known; false during a restart."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that ended the engine, if it is dead and is not restarted."""

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any: those that the model's files recommend."""

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

    @property
    def supported_tasks(self) -> Sequence[str]:
        """The tasks of the model, such as "generate" and "embed"."""

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> c.AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt; yield one output. Errors are those of `generate`."""

    async def call_part(
        self, part: str, method: str, arguments: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a step part that answers calls; return what it answers."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> c.AsyncGenerator[RequestOutput, None]:
        """Answer a conversation by the model's chat template; yield outputs as they come."""

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids."""

    async def prompt_tokens(self, prompt: Mapping[str, Any]) -> list[int]:
        """Return the tokens of what `apply_chat_template` returned, those of images included."""

    async def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; a long text is tokenised in another thread."""

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids; unknown ids are ignored."""

    async def set_policy(
        self, use: str | type[SchedulingPolicy], options: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the scheduling policy; no request is lost."""

    async def update_weights(
        self,
        weights: str | PathLike[str] | Mapping[str, Any],
        *,
        version: str | None = None,
        mode: PauseModeName = "keep",
        recompute: bool = True,
    ) -> str:
        """Replace weights of the model; return their version."""

    async def health(self) -> Health:
        """Return the faults of plugins, the quarantined plugins, and the number of restarts.

        Raises:
            EngineDeadError: the engine is dead and is not restarted.
        """

    async def metrics(self) -> str:
        """Return the exports of the enabled stat sinks, in Prometheus's text format."""

    def server_extensions(self, server: ServerContext) -> Sequence[InstalledExtension]:
        """Call the hook of the same name; return what plugins add, in order of enabling.

        Raises:
            PluginError: a plugin failed, or returned something else.
        """

    def argument_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the JSON schema of each enabled plugin's arguments, by the plugin's name."""

    async def aclose(self) -> None:
        """End the engine; callers that wait for it get EngineClosedError."""

    async def pause(self, mode: PauseModeName = "abort", *, clear_cache: bool = True) -> None:
        """Stop generating until `resume`; return once no step is under way."""

    async def resume(self) -> None:
        """Continue after a pause."""

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""

    async def sleep(self, level: int = 1, mode: PauseModeName = "abort") -> None:
        """Pause, then release memory until `wake_up`."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Reallocate memory that `sleep` released."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine is asleep."""

    async def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Clear the prefix cache."""

    async def reset_encoder_cache(self) -> None:
        """Clear the embeddings of images and the like."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """Call a method of every worker; return the results in rank order."""

    async def start_profile(self) -> None:
        """Start profiling the workers."""

    async def stop_profile(self) -> list[str]:
        """Stop profiling; return the files that were written."""

    async def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return the cost of each logits processor, by name."""

    async def scheduler_stats(self) -> SchedulerStats:
        """Return how many requests run and wait, and the state of the KV cache."""

    async def live_requests(self, external_ids: Sequence[str] | None = None) -> list[LiveRequest]:
        """Return live completions: all, or those of some requests by the user's ids."""


class Client(Strict):
    """Who makes a call: what an authenticator found out, and the bounds of it.

    Attributes:
        name: for logs and statistics.
        cache_salt: hashed together with the `cache_salt` of each request, so that clients share no
            cached prompts; empty shares them.
        tags: tags of each request; a request's own never replace them.
        min_priority: the smallest, which is the most important, that requests may have.
        max_priority: the largest.
        max_timeout: seconds that requests may run; also the timeout of those that have none. None
            is no limit.
        kv_transfer: whether requests may bring `kv_transfer_params`.
        admin: whether it may use the admin address.
    """

    name: str
    cache_salt: str = ""
    tags: dict[str, str] = {}
    min_priority: int = 0
    max_priority: int = 2**31 - 1
    max_timeout: float | None = None
    kv_transfer: bool = False
    admin: bool = False


@dataclass(frozen=True)
class Call:
    """One HTTP request that a transform sees.

    Attributes:
        request_id: id of the HTTP request.
        path: path of the route, such as "/v1/chat/completions".
        client: who makes it.
        headers: by lower-case name, without credentials.
    """

    request_id: str
    path: str
    client: Client
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route of a server.

    A route that a plugin adds may take the place of the server's own only if
    `server.replace_routes` lists its path; otherwise the server does not start.

    Attributes:
        path: such as "/acme/usage" or "/acme/users/{name}".
        endpoint: takes starlette's request, whose `state.client` is the Client, and returns its
            response, or a struct, which is sent as JSON. A HardpointError or starlette's
            HTTPException that it raises becomes an answer, any other error an answer 500 that
            names the plugin.
        methods: methods that it answers; GET answers HEAD too.
        admin: whether it is on the admin address instead of the users'.
        summary: one line for the OpenAPI document.
        request_type, response_type: types of JSON bodies, for the OpenAPI document.
    """

    path: str
    endpoint: Callable[[HTTPRequest], Awaitable[Response | msgspec.Struct]]
    methods: Sequence[str] = ("GET",)
    admin: bool = False
    summary: str = ""
    request_type: type[msgspec.Struct] | None = None
    response_type: type[msgspec.Struct] | None = None


@dataclass(frozen=True, kw_only=True)
class Middleware:
    """An ASGI middleware around all routes of the users' address; it runs after authentication.

    `scope["state"]["client"]` is the Client. It answers a request, or calls the application inside
    once. To refuse a request it raises starlette's HTTPException or a RequestError; any other
    error, two answers or none end that request alone with 500, which names the plugin. So does a
    pause of more than `server.extension_seconds` outside of the application inside. The server's
    own `/health` and `/ready` pass no middleware, so that no plugin fails a probe.

    Attributes:
        wrap: takes an application and returns another one; called once, when the server starts.
        before, after: names of plugins whose middleware runs inside of it, or around it.
    """

    wrap: Callable[[ASGIApp], ASGIApp]
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Changes the JSON bodies of routes that generate; each part may be left out.

    An error that one raises answers that request alone: of `request`, a RequestError as 400 and
    starlette's HTTPException with its status; any other as 500, which names the plugin.

    Attributes:
        request: takes a decoded body without its nulls, returns the one that is checked and
            answered.
        response: takes the body of a whole answer, returns the one that is sent.
        event: takes the data of one event of a stream, returns the one that is sent, or None to
            leave it out. It is called per token and slows streams down.
        before, after: names of plugins whose transforms run after it, or before it. Requests pass
            transforms in that order, answers in the reverse one.
    """

    request: Callable[[Call, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None
    response: Callable[[Call, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None
    event: Callable[[Call, dict[str, Any]], dict[str, Any] | None] | None = None
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Authenticator:
    """Finds out who makes a call. With at least one, every closed route needs a client.

    An error that one raises refuses that request: starlette's HTTPException with its status, any
    other with 500, which names the plugin.

    Attributes:
        authenticate: takes the headers by lower-case name, and the path; returns the client, or
            None if it knows none, and the next authenticator is asked. With none left, it is 401.
        before, after: names of plugins that are asked after it, or before it.
    """

    authenticate: Callable[[Mapping[str, str], str], Awaitable[Client | None]]
    before: Sequence[str] = ()
    after: Sequence[str] = ()


ServerExtension = Route | Middleware | Transform | Authenticator


@dataclass(frozen=True)
class InstalledExtension:
    """An extension and the plugin that adds it.

    Attributes:
        plugin: its name, for the order.
        source: the plugin and its distribution, for messages.
    """

    plugin: str
    source: str
    extension: ServerExtension


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

        The limits and the messages of errors are those of the server's own routes; members
        that are null are left out. Transforms do not see it.

        Args:
            request: request of the route.
            type_: type of the body; derived from `hardpoint.typed.Strict` it refuses unknown
                fields.

        Raises:
            RequestError: naming the field, its value and what would be right.
            Exception: the body is no JSON, is too long, or stops; the server answers it.
        """

    def model(self, name: str | None) -> str:
        """Return the name of the model for an answer to a request that names one, or none.

        Raises:
            Exception: the server has no such model; the server answers it with 404.
        """

    def check_prompt(self, *parts: Any, name: str = "prompt") -> None:
        """Check the size of what a prompt is made of, before anything is made of it.

        Args:
            parts: texts, or plain data that holds texts.
            name: field that has them.

        Raises:
            RequestError: they have more characters than `server.limits` allows.
        """

    def options(self, request: HTTPRequest, asked: Any) -> RequestOptions:
        """Return the options of a request to the engine, within the bounds of who calls.

        They are those of the server's own routes: the salt and the tags of the client's key, its
        bounds of priority and time, and the trace.

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
            generates: whether it counts as a request that is being answered, as those of the
                server's own routes do: `server.limits.requests` bounds it, and it is refused while
                the engine is paused or the server ends.

        Raises:
            Exception: raised by the work; the client is gone, or the server takes no requests,
                which the server answers.
        """
