"""AsyncLLM: a model in a process of its own, for programs that run an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from hardpoint.configuration.handed_over import handed_over
from hardpoint.configuration.loading import config_from
from hardpoint.core.engine.utility_calls import ControlCalls
from hardpoint.core.frontend.frontend import listed_ids
from hardpoint.errors import EngineDeadError
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.system.control_calls import AsyncCaller
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config_tables import STREAMING_STEP_MILLISECONDS
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.request_options import ChatRequestOptions, RequestOptions
from hardpoint.plugins.requests import PoolingRequestOutput, Prompt
from hardpoint.process.build import OpenRemoteClient, build_async_engine

from .calls.adapters import AsyncAdapterGroup
from .calls.debug import AsyncDebugGroup
from .calls.engines import AsyncEngineGroup, Restart, engines_of, with_restart
from .calls.groups import COMPANIONS, async_groups
from .calls.model import AsyncModelGroup, ShownModel, chat_params
from .calls.plugins import AsyncPluginGroup
from .calls.reloading import watching_plugins
from .calls.weights import AsyncWeightUpdateGroup, WeightFiles
from .chat import Chat, Messages
from .conversations.parts import ConversationOptions, PromptPart, check_options
from .conversations.states import open_conversations
from .conversations.turns import AsyncConversation
from .old_names.members import ASYNC_NAMES, ModelClass, old_member
from .progress import ProgressDisplay
from .requests import check_generates, takes_options

__all__ = ["AsyncLLM", "open_resolved"]


class AsyncLLM(ShownModel, AsyncCaller, metaclass=ModelClass):
    """A model that generates text for many tasks of one event loop at once.

    | Member | Use |
    |---|---|
    | `generate`, `chat` | complete a prompt, or answer a conversation; yield outputs as they come |
    | `fork` | go on with other outputs in a copy of a request |
    | `abort` | end requests by their ids |
    | `open_conversation` | open a conversation whose prompt goes on after each answer |
    | `encode`, `encode_batch` | pool a prompt, or several in one message |
    | `model` | tasks, default parameters, chat template, tokens of prompts |
    | `adapters` | LoRA adapters: `add`, `remove`, `list`, `pin`, `resolve` |
    | `engines` | engines by rank: `pause`, `resume`, `scale`, `retire`, `load`, `settings` |
    | `weights` | weights: `update`, `version` |
    | `plugins` | plugins: `enable`, `disable`, `change`, `set_policy`, `health`, `meters` |
    | `debug` | `trace` of tokens, profiles, `why_waiting` |
    | `sleep`, `wake_up` | release memory, and allocate it again |
    | `reset_prefix_cache` | clear the prefix cache |
    | `collective_rpc` | call a method of every worker |
    | `metrics` | the metrics of the stat sinks, in Prometheus's text format |
    | `config`, `tokenizer` | the configuration; the model's tokenizer |
    | `is_running`, `errored`, `dead_error` | state of the engine, and the error that ended it |
    | `close`, `aclose` | end the engine |

    The engine runs in a process of its own, so tokenizing, streaming and all other work of the
    program overlap with it. An AsyncLLM may be made outside of an event loop; it belongs to the
    event loop in which it is used first.

    Example:
        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)
    """

    def __init__(  # noqa: PLR0913 - all have names and defaults
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
        reload_plugins: bool = False,
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
            reload_plugins: replace plugins when their files are saved, for development.

        Raises:
            ConfigError, PluginError, ModelError: with the engine's own message.
            EngineDeadError: the engine ended without an error message, or was not ready in time.
        """
        overrides = {"model": model, "dtype": dtype, "seed": seed, "tokenizer.path": tokenizer}
        overrides |= {"max_model_len": max_model_len, "engine.restart": restart}
        passed_plugins = handed_over(plugins, "AsyncLLM")
        resolved, config_sources = config_from(
            config, overrides, caller="AsyncLLM", passed_plugins=passed_plugins
        )
        with watching_plugins(enabled=reload_plugins) as watch:
            self._open(resolved, config_sources, passed_plugins)
            watch(self.plugins)

    def _open(
        self,
        config: EngineConfig,
        config_sources: ConfigSources,
        passed_plugins: Sequence[InstalledPlugin] = (),
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
                config, config_sources, progress=display.report, handed=passed_plugins, **how
            )
        self._engine, self._files = built, WeightFiles(built.parts.config.load.updates)
        self._requests, self._groups = async_groups(built, self._files)
        self._conversations = open_conversations(built.parts.config, built.parts.clock)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return old_member(self, "AsyncLLM", name, ASYNC_NAMES)

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
                `model.default_sampling_params`.
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
        return self._requests.outputs(prompt, sampling_params, request_id, options)

    def fork(
        self, request_id: str, token_ids: Sequence[int]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on with other outputs in a copy of a request; yield the copy's outputs as they come.

        The copy is one more completion of the same prompt, as those of `n`: with the same
        parameters, a number of its own, `outputs[0].index`, and the same request id, by which
        `abort` ends all; there are no forks after it. Logits processors and grammars get
        `token_ids` as if they had been sampled; the prefix cache shares full blocks of them that
        the source has computed. Otherwise it is a request as any other, which waits for its turn.
        Closing its stream ends the copy alone.

        Args:
            request_id: as `generate` was called with. Its stream has begun and is not closed: it
                may have yielded its last output.
            token_ids: all output tokens before those to come: as a rule, some of the source, then
                another one. May be empty.

        Raises:
            RequestError: no request of that id is open, or several are; tokens are wrong, or end
                the request; a logits processor cannot go on after outputs.
            OverloadedError, EngineDeadError, EngineClosedError: as `generate`.
        """
        return self._requests.fork(request_id, token_ids)

    @takes_options
    def open_conversation(
        self,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        keep_last: bool = True,
        **options: Unpack[ConversationOptions],
    ) -> AsyncConversation:
        """Open a conversation: a prompt that continues after each answer.

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
            EngineDeadError, EngineClosedError: as `generate`.
        """
        self._engine.check_open()
        check_options(options)
        _, of_turns = Chat.taken_from(options)
        return AsyncConversation(
            functools.partial(self._conversations.open, request_id, keep_last=keep_last),
            self._engine.parts.model_config.vocab_size,
            self.model.default_sampling_params(),
            sampling_params,
            encode=self._requests.encode_text,
            generate=lambda name, prompt, params: self._requests.outputs(
                prompt, params, name, of_turns
            ),
            abort=self._engine.abort,
        )

    async def _converse(
        self,
        parts: AsyncIterable[Prompt | PromptPart],
        params: SamplingParams | None,
        request_id: str | None,
        options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
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
        return self._requests.outputs(prompt, params, request_id, options)

    @takes_options
    async def encode_batch(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        names: Sequence[str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]:
        """Pool the prompts of one call, which travel to the engine in one message.

        Cancelling the task ends all.

        Args:
            prompts: as `LLM.encode` takes them.
            pooling_params: parameters of all.
            request_id: id of all; None numbers them.
            names: names of the prompts in errors; by default `prompts[0]` and so on.
            options: `RequestOptions` of all.

        Returns:
            Their outputs, in order. One that a fault of a pooler, a timeout or `abort` ended has no
            `outputs`; its `finish_reason` gives the reason.

        Raises:
            RequestError: one is wrong, by its name, or the model cannot do the task; none runs.
            OverloadedError, EngineDeadError, EngineClosedError: as `generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise RequestError(
                f"pooling_params: expected PoolingParams, got {type(params).__name__}"
            )
        return await self._requests.pool(prompts, params, request_id, names, options)

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
        prompt = await self._requests.rendered(messages, chat)
        params = chat_params(sampling_params, self._engine.default_sampling_params())
        outputs = self._requests.outputs(prompt, params, request_id, of_request)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    @property
    def adapters(self) -> AsyncAdapterGroup:
        """The adapters (LoRA)."""
        return self._groups.adapters

    @property
    def engines(self) -> AsyncEngineGroup:
        """The engines by rank (`parallel.data`): control calls, number, load and settings."""
        return self._groups.engines

    @property
    def weights(self) -> AsyncWeightUpdateGroup:
        """The weights."""
        return self._groups.weights

    @property
    def plugins(self) -> AsyncPluginGroup:
        """The plugins."""
        return self._groups.plugins

    @property
    def debug(self) -> AsyncDebugGroup:
        """Traces, profiles, and why requests wait."""
        return self._groups.debug

    @property
    def model(self) -> AsyncModelGroup:
        """The model: tasks, default parameters, chat template, tokens of prompts."""
        return self._groups.model

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""
        return self._engine.parts.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.parts.tokenizer

    sleep = ControlCalls.sleep
    wake_up = ControlCalls.wake_up
    reset_prefix_cache = ControlCalls.reset_prefix_cache
    collective_rpc = ControlCalls.collective_rpc

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids; each yields its output so far, with finish reason "abort".

        A conversation with one of the ids ends too, whether a turn runs or not. Others are ignored.
        """
        listed = listed_ids(request_ids)
        self._conversations.end(listed, "it was aborted")
        self._requests.open.aborted(listed)
        await self._engine.abort(listed)

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

    async def metrics(self) -> str:
        """Return the metrics that sinks such as "prometheus" export, as Prometheus reads them.

        Empty without such a sink, and once closed. It answers within about a second, also while
        the engine is dead or busy: with the last metrics that it reported.
        """
        return await self._engine.metrics()

    def close(self) -> None:
        """End the engine; callers that wait for it get EngineClosedError. Twice does nothing.

        It blocks for a moment; `aclose` does not block the event loop.
        """
        self.plugins.end_watch()
        self._conversations.end_all("the engine was closed")
        self._requests.images.close()
        self._engine.close()
        self._files.keep(())

    async def aclose(self) -> None:
        """Do the same in another thread."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args)


def open_resolved(
    config: EngineConfig,
    config_sources: ConfigSources,
    *,
    restart: Restart | None = None,
    open_client: OpenRemoteClient | None = None,
    cls: type[AsyncLLM] = AsyncLLM,
) -> AsyncLLM:
    """Open an AsyncLLM with a configuration that was read elsewhere.

    Args:
        open_client: opens the client of engines that others start; then none is started here.
    """
    llm = cls.__new__(cls)
    if restart is not None:
        config = with_restart(config, restart)
    llm._open(config, config_sources, open_client=open_client)
    return llm
