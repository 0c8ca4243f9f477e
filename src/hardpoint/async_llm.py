"""AsyncLLM: a model in a process of its own, for programs that run an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import msgspec

from hardpoint.core.frontend.frontend import listed_ids
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.prompts import Params, Prompt
from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary.parts.states import joined_states
from hardpoint.host.registry.configuration import config_from
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.registry.references import handed_over
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
    WaitReason,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import STREAMING_STEP_MILLISECONDS
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.request_options import ChatOptions, ChatRequestOptions, RequestOptions
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.requests.stats import Health
from hardpoint.plugins.server import InstalledExtension, ServerContext
from hardpoint.process.build import OpenRemoteClient, build_async_engine

from .calls.adapter_resolvers import AdapterResolvers
from .calls.engines import AsyncEngineCalls, Restart, engines_of, with_restart
from .calls.forks import AsyncForkCalls
from .calls.live_changes import AsyncLiveChanges
from .calls.sessions import AsyncSessionCalls
from .calls.traces import AsyncTraceCalls
from .calls.weights import AsyncWeightCalls
from .chat import Chat, Messages
from .conversations.parts import ConversationOptions, PromptPart, check_options
from .conversations.turns import AsyncConversation
from .images import ImageThreads, has_unread_images
from .open_model import COMPANIONS, AsyncProcessorCalls
from .progress import ProgressDisplay
from .requests import check_generates, make_extras, takes_options

__all__ = ["AsyncLLM"]


class AsyncLLM(
    AsyncProcessorCalls,
    AsyncForkCalls,
    AsyncSessionCalls,
    AsyncTraceCalls,
    AsyncWeightCalls,
    AsyncLiveChanges,
    AsyncEngineCalls,
):
    """A model that generates text for many tasks of one event loop at once.

    The model runs in a process of its own, so tokenising, streaming and all other work of the
    program overlap with it. It may be made outside of an event loop; it belongs to the one in which
    it is used first.

    Example:
        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | Mapping[str, Any] | EngineConfig | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
        plugins: Sequence[object] = (),
        restart: Restart | None = None,
    ) -> None:
        """Start the engine process and load the model; blocks until it is ready.

        Args:
            model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
            config: everything else: the path of a TOML file, a mapping or an EngineConfig.
            dtype, max_model_len, seed: short for the configuration fields of the same names.
            tokenizer: short for `tokenizer.path`.
            plugins: as for `LLM`. The engine's process imports components; hooks of requests are
                called on the very objects.
            restart: "on_failure" restarts an engine that died, with the same weights and the latest
                configuration, at most `engine.max_restarts_per_minute` times. Requests that are
                in flight go on there, as later ones do.

        Raises:
            ConfigError, PluginError, ModelError: with the engine's own message.
            EngineDeadError: the engine ended without an error message, or was not ready in time.
        """
        overrides = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "tokenizer.path": tokenizer,
            "engine.restart": restart,
        }
        handed = handed_over(plugins, "AsyncLLM")
        resolved, config_sources = config_from(config, overrides, caller="AsyncLLM", handed=handed)
        self._open(resolved, config_sources, handed)

    @classmethod
    def from_resolved(
        cls,
        config: EngineConfig,
        config_sources: ConfigSources,
        *,
        restart: Restart | None = None,
        open_client: OpenRemoteClient | None = None,
    ) -> AsyncLLM:
        """Open one from a configuration read elsewhere.

        With `open_client`, which opens the client of engines that others start, none is started.
        """
        llm = cls.__new__(cls)
        if restart is not None:
            config = with_restart(config, restart)
        llm._open(config, config_sources, open_client=open_client)
        return llm

    def _open(
        self,
        config: EngineConfig,
        config_sources: ConfigSources,
        handed: Sequence[InstalledPlugin] = (),
        **opening: Any,
    ) -> None:
        origin = config_sources.of("engine.in_process")
        if config.engine.in_process and origin != "default":
            raise ConfigError(
                "engine.in_process: expected false, for AsyncLLM always runs its engine in a "
                f"process of its own, got true (from {origin})"
            )
        engine, scheduler = config.engine, config.scheduler
        engine = msgspec.structs.replace(engine, in_process=False)
        if scheduler.step_milliseconds is None:
            limit = STREAMING_STEP_MILLISECONDS if scheduler.chunked_prefill else 0.0
            scheduler = msgspec.structs.replace(scheduler, step_milliseconds=limit)
        config = msgspec.structs.replace(config, engine=engine, scheduler=scheduler)
        if opening.get("open_client") is None:
            config, opening["open_client"] = engines_of(config, config_sources)
            opening["starts_engine"] = config.parallel.num_local > 0
        else:
            opening["starts_engine"] = False
        how = {"companions": COMPANIONS, **opening}
        with ProgressDisplay() as display:
            built = build_async_engine(
                config, config_sources, progress=display.report, handed=handed, **how
            )
        self._begin(built)
        self._image_threads = ImageThreads(built.parts)

    @takes_options
    def generate(
        self,
        prompt: Prompt | AsyncIterable[Prompt | PromptPart],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yield outputs of `sampling_params.output_kind` as they come.

        A prompt that goes on comes in parts: each is answered in a turn of its own, as
        `AsyncConversation.generate` does, and the outputs have the number of the turn.

        Outputs that the consumer is too slow for are merged into one, so nothing piles up.
        Leaving the loop early, or cancelling the task that runs it, aborts the request.

        Args:
            prompt: as `LLM.generate` takes it, or an asynchronous iterator of parts.
            sampling_params: never changed; None is what the model's files recommend, see
                `default_sampling_params`.
            request_id: outputs carry it; None numbers them. Live requests may share one.
            options: `RequestOptions`.

        Raises:
            RequestError: prompt or parameters are wrong.
            OverloadedError: more would wait than `scheduler.max_waiting`.
            EngineDeadError: the engine died; the request may be sent again.
            EngineClosedError: the engine was closed.
        """
        check_generates(sampling_params)
        if isinstance(prompt, AsyncIterable):
            return self._converse(prompt, sampling_params, request_id, options)
        return self._generate(prompt, sampling_params, request_id, options)

    @takes_options
    def open_conversation(
        self,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        keep_last: bool = True,
        **options: Unpack[ConversationOptions],
    ) -> AsyncConversation:
        """Open a conversation, whose prompt goes on after each answer.

        Args:
            sampling_params: parameters of its turns, until one has others; None is what the model's
                files recommend.
            request_id: id of its turns; None numbers them. `abort` ends the conversation by it.
            keep_last: whether the last token of an answer is part of the conversation; its keys and
                values are computed with the next turn.
            options: `ConversationOptions`: `RequestOptions` of each turn, and tools.

        Raises:
            RequestError: parameters or options are wrong for a conversation.
            OverloadedError: `conversations.max_open` are open.
        """
        check_options(options)
        _, of_turns = Chat.taken_from(options)
        return AsyncConversation(
            functools.partial(self._conversations.open, request_id, keep_last=keep_last),
            self._engine.parts.model_config.vocab_size,
            self.default_sampling_params(),
            sampling_params,
            encode=self._encode,
            generate=lambda name, prompt, params: self._generate(prompt, params, name, of_turns),
            abort=self._engine.abort,
        )

    async def _encode(self, text: str, is_first: bool) -> list[int]:
        return await self._engine.tokenise(text, add_special_tokens=is_first)

    async def _converse(
        self,
        parts: AsyncIterable[Prompt | PromptPart],
        params: SamplingParams | None,
        request_id: str | None,
        options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer the parts of a prompt in a conversation that ends with them."""
        async with (
            self.open_conversation(params, request_id, **options) as conversation,
            contextlib.aclosing(conversation.generate(parts)) as outputs,
        ):
            async for output in outputs:
                yield output

    @takes_options
    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt, by default to a vector; yield one output.

        Args:
            prompt, pooling_params: as `LLM.encode` takes them, for one prompt.
            request_id: as for `generate`.
            options: `RequestOptions`.

        Raises:
            RequestError: prompt or parameters are wrong, or the model cannot do the task.
            OverloadedError, EngineDeadError, EngineClosedError: as `generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise RequestError(
                f"pooling_params: expected PoolingParams, got {type(params).__name__}"
            )
        return self._generate(prompt, params, request_id, options)

    @takes_options
    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation by the model's chat template; yield outputs as they come.

        The template is rendered in another thread.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`.
            sampling_params, request_id: as for `generate`.
            options: `ChatOptions` and `RequestOptions`.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages; tools are
                malformed, or there is no tool parser.
            OverloadedError, EngineDeadError, EngineClosedError: as `generate`.
        """
        check_generates(sampling_params)
        chat, of_request = Chat.taken_from(options)
        prompt = await self._image_threads.rendered(chat.rendered, messages)
        outputs = self._generate(prompt, sampling_params, request_id, of_request)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def _generate(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Any, None]:
        if options.get("lora_request") is None:
            return self._outputs(prompt, params, request_id, make_extras(**options))
        return self._generate_adapted(prompt, params, request_id, options)

    async def _generate_adapted(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Any, None]:
        """Generate, or pool, with an adapter, which is found, or loaded, first."""
        extras = make_extras(**await self._with_adapters(options))
        outputs = self._outputs(prompt, params, request_id, extras)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def _outputs(
        self, prompt: Prompt, params: Params | None, request_id: str | None, extras: RequestExtras
    ) -> AsyncGenerator[Any, None]:
        if has_unread_images(prompt):
            return self._outputs_of_images(prompt, params, request_id, extras)
        opened = self._open_requests.opener(params)
        return self._engine.generate(prompt, params, request_id, extras, opened)

    async def _outputs_of_images(
        self, prompt: Prompt, params: Params | None, request_id: str | None, extras: RequestExtras
    ) -> AsyncGenerator[Any, None]:
        """Generate, or pool, with images, which are decoded first, in another thread."""
        read = await self._image_threads.prompt(prompt)
        opened = self._open_requests.opener(params)
        outputs = self._engine.generate(read, params, request_id, extras, opened)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    @takes_options
    async def apply_chat_template(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids.

        The template is rendered in another thread.

        Args:
            messages: as for `chat`.
            options: `ChatOptions`, of which `parallel_tool_calls` changes nothing.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        return await self._image_threads.rendered(Chat(**options).rendered, messages)

    async def prompt_tokens(self, prompt: Mapping[str, Any]) -> list[int]:
        """Return the tokens that a prompt would have, read as `generate` reads it.

        Raises:
            RequestError: it is malformed.
        """
        ids = prompt.get("prompt_token_ids")
        is_empty = isinstance(ids, list) and not ids  # as that of a template may be
        return [] if is_empty else await self._engine.prompt_tokens(prompt)

    async def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; a long text is tokenised in another thread.

        Raises:
            RequestError: the text cannot be encoded.
        """
        return await self._engine.tokenise(text, add_special_tokens=add_special_tokens)

    def server_extensions(self, server: ServerContext) -> list[InstalledExtension]:
        """Call the hook of the same name; return what plugins add to a server.

        Raises:
            PluginError: a plugin failed, or returned something else.
        """
        return self._engine.server_extensions(server)

    def argument_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each enabled plugin's arguments, by the plugin's name."""
        return self._engine.parts.plugins.argument_schemas()

    async def resolve_adapter(self, name: str) -> Path | LoRARequest | None:
        """Return the adapter that a resolver finds for a name; None if no resolver knows it.

        Raises:
            RequestError: one refuses the name.
            PluginFaultError: one failed, or took longer than `adapters.resolve_seconds`.
        """
        return await self._engine.parts.companion(AdapterResolvers).resolve(name)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids; each yields what it has, with finish reason "abort".

        A conversation with one of the ids ends too, whether a turn runs or not. Others are ignored.
        """
        listed = listed_ids(request_ids)
        self._conversations.end(listed, "it was aborted")
        self._open_requests.aborted(listed)
        await self._engine.abort(listed)

    @property
    def engine_pid(self) -> int:
        """The process id of the engine; another one after a restart."""
        return self._engine.engine_pid

    @property
    def is_running(self) -> bool:
        """True while the engine serves, as far as is known; false during a restart."""
        return self._engine.is_running

    @property
    def errored(self) -> bool:
        """True once the engine is dead and is not restarted."""
        return self._engine.errored

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that ended the engine, if it is dead."""
        return self._engine.dead_error

    async def health(self) -> Health:
        """Return the faults of plugins, the quarantined plugins, and the number of restarts.

        Raises:
            EngineDeadError: the engine is dead and is not restarted.
        """
        return await self._engine.health()

    async def metrics(self) -> str:
        """Return the metrics that sinks such as "prometheus" export, as Prometheus reads them.

        Empty without such a sink, and once closed. It answers within about a second, also while
        the engine is dead or busy: with the last metrics that it reported.
        """
        return await self._engine.metrics()

    async def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for those that got some; completions that ended are left out.

        Raises:
            RequestError: no live request has that id.
        """
        return await self._engine.why_waiting(request_id)

    def close(self) -> None:
        """End the engine; callers that wait for it get EngineClosedError. Twice does nothing.

        It blocks for a moment; `aclose` does not block the event loop.
        """
        self._conversations.end_all("the engine was closed")
        self._image_threads.close()
        self._engine.close()
        self._weight_files.keep(())

    async def aclose(self) -> None:
        """Do the same in another thread."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncLLM:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()

    async def _call_utility(self, method: str, *args: Any) -> Any:
        answer = await self._engine.call_utility(method, *args)
        return joined_states(answer, self._engine.states()) if method == "plugin_states" else answer
