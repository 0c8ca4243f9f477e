"""LLM: a model for scripts and bigger programs that call and wait."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from hardpoint.core.build import build_engine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.prompts import Prompt
from hardpoint.errors import shown
from hardpoint.host.boundary.parts.states import joined_states
from hardpoint.host.registry.configuration import config_from
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.registry.references import handed_over
from hardpoint.journal import inputs_of
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.request_options import ChatOptions, ChatRequestOptions, RequestOptions
from hardpoint.plugins.requests.stats import Health
from hardpoint.typed import copied, is_list

from .calls.adapter_resolvers import SyncResolverCalls
from .calls.engines import SyncEngineCalls, engines_of
from .calls.forks import SyncForkCalls
from .calls.live_changes import SyncLiveChanges
from .calls.sessions import SyncSessionCalls
from .calls.streams import OutputStream, open_stream
from .calls.traces import SyncTraceCalls
from .calls.weights import SyncWeightCalls
from .chat import Chat, Messages
from .conversations.parts import ConversationOptions, check_options
from .conversations.turns import Conversation
from .open_model import COMPANIONS, ProcessorCalls
from .progress import ProgressDisplay, draw_outputs, shows_progress
from .requests import (
    ChatBatchOptions,
    GenerateOptions,
    OpenCalls,
    Request,
    UnorderedCall,
    check_generates,
    draws_progress,
    make_extras,
    make_requests,
    prompt_list,
    takes_options,
    with_output_kind,
)

__all__ = ["LLM"]


class LLM(
    ProcessorCalls,
    SyncForkCalls,
    SyncSessionCalls,
    SyncTraceCalls,
    SyncWeightCalls,
    SyncLiveChanges,
    SyncEngineCalls,
    SyncResolverCalls,
):
    """A model that generates text, or vectors of texts.

    It runs in this process, or in one of its own with `config={"engine": {"in_process": False}}`;
    results and errors are the same. Several engines (`parallel.data`), and those that are restarted
    (`engine.restart`), have processes of their own. Usable as a context manager; `close` frees its
    memory. Several threads may use it: their requests share a batch, and each gets the outputs of
    its own. A fork of the process cannot use it: every call there raises HardpointError.

    Example:
        with LLM("smollm2") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)
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
        progress: bool | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
            config: everything else: the path of a TOML file, a mapping or an EngineConfig. Nothing
                else is read: `hardpoint.toml` and the environment are the command line's.
            dtype, max_model_len, seed: short for the configuration fields of the same names.
            tokenizer: short for `tokenizer.path`.
            plugins: modules, classes and objects with hooks, and classes of components, enabled as
                if `plugins.enable` named them; components that other keys choose are offered under
                their names.
            progress: show progress; None shows bars on a terminal and lines in a notebook.

        Raises:
            ConfigError, PluginError, ModelError: before any weight is read, where that is possible.
        """
        overrides = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "tokenizer.path": tokenizer,
        }
        if not isinstance(progress, bool | None):
            raise ConfigError(f"progress: expected true, false or None, got {shown(progress)}")
        handed = handed_over(plugins, "LLM")
        resolved, config_sources = config_from(config, overrides, handed=handed)
        self._open(resolved, config_sources, progress, handed)

    @classmethod
    def from_resolved(
        cls, config: EngineConfig, config_sources: ConfigSources, *, progress: bool | None = None
    ) -> LLM:
        """Load a model from a configuration that was read elsewhere, with its config_sources."""
        llm = cls.__new__(cls)
        llm._open(config, config_sources, progress)
        return llm

    def _open(
        self,
        config: EngineConfig,
        config_sources: ConfigSources,
        progress: bool | None,
        handed: Sequence[InstalledPlugin] = (),
    ) -> None:
        self._draws_progress = shows_progress(sys.stderr) if progress is None else progress
        config, open_client = engines_of(config, config_sources)
        with ProgressDisplay(self._draws_progress) as display:
            built = build_engine(
                config,
                config_sources,
                progress=display.report,
                handed=handed,
                open_client=open_client,
                companions=COMPANIONS,
                open_inputs=inputs_of(config),
            )
        self._begin(built)
        self._calls = OpenCalls(self._engine)

    @takes_options
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Complete prompts, all in one running batch.

        Args:
            prompts: one prompt or a list. A prompt is text, token ids, `{"prompt": text}`,
                `{"prompt_token_ids": ids}` or, made ready elsewhere,
                `{"type": "token", "prompt_token_ids": ids, ...}`; or what a step part reads:
                `{"prompt_embeds": rows}` for example. A mapping may have images, too:
                `"multi_modal_data": {"image": [...]}`, one for each placeholder of the prompt.
            sampling_params: one for all, or one per prompt; never changed. None is what the
                model's files recommend, see `default_sampling_params`.
            options: `RequestOptions`, each one for all, or a list of one per prompt; and
                `use_tqdm`.

        Returns:
            One output per prompt, in the order asked.

        Raises:
            RequestError: a prompt or its parameters are wrong; then none of them runs.
            OverloadedError: more would wait than `scheduler.max_waiting`; then none of them runs.
            EnginePausedError: the engine is paused.
            EngineDeadError: the engine's process has ended.
        """
        draws = draws_progress(options, default=self._draws_progress)
        requests = self._batch(prompt_list(prompts), sampling_params, options)
        return self._run(self._calls.add(requests), draws=draws)

    @takes_options
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatBatchOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, by the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a list of such lists. Content
                may be parts: `{"type": "text", "text": ...}` and, of a model that takes images,
                `{"type": "image_url", "image_url": {"url": ...}}` and `{"type": "image", "image":
                ...}`.
            sampling_params: one for all, or one per conversation.
            options: `ChatOptions` of all conversations, and options as for `generate`.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages; tools are
                malformed, or there is no tool parser.
        """
        if not is_list(messages):
            raise RequestError(
                "messages: expected a list of messages, or a list of such lists, got "
                f"a {type(messages).__name__}"
            )
        draws = draws_progress(options, default=self._draws_progress)
        listed = copied(messages, "messages")
        single = not listed or isinstance(listed[0], Mapping)
        conversations: Sequence[Any] = [listed] if single else listed
        chat, of_requests = Chat.taken_from(options)
        prompts = [self._rendered(conversation, chat) for conversation in conversations]
        requests = self._batch(prompts, sampling_params, of_requests)
        return self._run(self._calls.add(requests), draws=draws)

    def _batch(self, prompts: list[Any], params: Any, options: Mapping[str, Any]) -> list[Request]:
        params = self.default_sampling_params() if params is None else params
        check_generates(params)
        prompts = [self._images.prompt(prompt) for prompt in prompts]
        return make_requests(prompts, params, **self._with_adapters(options))

    @takes_options
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Complete one prompt; iterate over what it returns for outputs as they come.

        Each has what is new, unless `sampling_params.output_kind` is FINAL_ONLY. Leaving the loop
        early aborts the request.

        Args:
            prompt, sampling_params: as for `generate`.
            options: `RequestOptions`.

        Raises:
            RequestError, OverloadedError: prompt or parameters are wrong, or too many wait.
        """
        return self._stream(prompt, sampling_params, options)

    def _stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        options: Mapping[str, Any],
    ) -> OutputStream:
        extras = make_extras(**self._with_adapters(options))
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        check_generates(params)
        if (
            isinstance(params, SamplingParams)
            and params.output_kind is RequestOutputKind.CUMULATIVE
        ):
            params = with_output_kind(params, RequestOutputKind.DELTA)
        return open_stream(self._calls, (self._images.prompt(prompt), params, extras))

    def generate_unordered(
        self, requests: Iterable[tuple[Prompt, SamplingParams | None]]
    ) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Complete any number of prompts; yield each output once it is finished.

        Prompts are taken from the iterable when the engine has room for them. Leaving the loop
        early aborts those that run.

        Args:
            requests: prompts with their parameters; None is what the model's files recommend.

        Yields:
            The position of a prompt, and its output; or its error, if it is refused.

        Raises:
            EnginePausedError, EngineDeadError: as `generate`.
        """
        default = self.default_sampling_params()

        def request(prompt: Prompt, params: SamplingParams | None) -> Request:
            own = with_output_kind(params or default, RequestOutputKind.FINAL_ONLY)
            return self._images.prompt(prompt), own, RequestExtras()

        window = 2 * self.config.scheduler.max_num_seqs
        given = (request(prompt, params) for prompt, params in requests)
        return UnorderedCall(self._calls, given, window).outputs()

    @takes_options
    def open_conversation(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        keep_last: bool = True,
        **options: Unpack[ConversationOptions],
    ) -> Conversation:
        """Open a conversation, whose prompt goes on after each answer.

        Args:
            sampling_params: parameters of its turns, until one has others; None is what the model's
                files recommend.
            keep_last: whether the last token of an answer is part of the conversation; its keys and
                values are computed with the next turn.
            options: `ConversationOptions`: `RequestOptions` of each turn, and tools.

        Raises:
            RequestError: parameters or options are wrong for a conversation.
            OverloadedError: `conversations.max_open` are open.
        """
        check_options(options)
        _, of_turns = Chat.taken_from(options)
        return Conversation(
            functools.partial(self._conversations.open, keep_last=keep_last),
            self._engine.parts.model_config.vocab_size,
            self.default_sampling_params(),
            sampling_params,
            encode=self._encode,
            stream=lambda prompt, params: self._stream(prompt, params, of_turns),
        )

    def _encode(self, text: str, is_first: bool) -> list[int]:
        with self._engine.lock:
            return self.tokenizer.encode(text, add_special_tokens=is_first)

    @takes_options
    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> OutputStream:
        """Answer one conversation; iterate over what it returns for outputs as they come.

        Args:
            messages: as for `chat`.
            sampling_params: as for `stream`.
            options: `ChatOptions` and `RequestOptions`.

        Raises:
            RequestError, OverloadedError: as `chat` and `stream`.
        """
        chat, of_request = Chat.taken_from(options)
        prompt = self._rendered(messages, chat)
        return self._stream(prompt, sampling_params, of_request)

    @takes_options
    def apply_chat_template(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids.

        Args:
            messages: as for `chat`.
            options: `ChatOptions`, of which `parallel_tool_calls` changes nothing.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        return self._rendered(messages, Chat(**options))

    def _rendered(self, messages: Messages, chat: Chat) -> Mapping[str, Any]:
        return chat.rendered(self.tokenizer, messages, self._images, self._engine.lock)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for programs that add requests and step it themselves.

        Not together with `generate`, `chat` and `stream`, which step it too and drop outputs of
        other requests.
        """
        return self._engine

    def health(self) -> Health:
        """Return the faults of plugins, their effects, and the quarantined plugins."""
        return self._engine.health()

    def metrics(self) -> str:
        """Return the metrics that sinks such as "prometheus" export, as Prometheus reads them.

        Empty without such a sink, and once closed. It waits for its turn, as every call does.
        """
        return self._engine.metrics()

    def is_paused(self) -> bool:
        """Return whether the engine is paused; also of an engine that is closed."""
        return self._engine.is_paused

    def close(self) -> None:
        """Release model, cache and processes. Closing twice does nothing."""
        self._conversations.end_all("the engine was closed")
        self._engine.close()
        self._weight_files.keep(())

    def __enter__(self) -> LLM:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _run(self, ids: list[str], *, draws: bool) -> list[RequestOutput]:
        """Step until all are finished; return them in the order of `ids`."""
        results: dict[str, RequestOutput] = {}
        outputs = self._calls.outputs(ids)
        if draws:
            outputs = draw_outputs(outputs, len(ids))
        try:
            # The outputs of the engine never end, so the last one is known by counting.
            while len(results) < len(ids):
                output = next(outputs)
                results[output.request_id] = output
        finally:
            del outputs  # stops drawing
            self._calls.drop(ids)
        return [results[request_id] for request_id in ids]

    def _call_utility(self, method: str, *args: Any) -> Any:
        answer = self._engine.call_utility(method, *args)
        return joined_states(answer, self._engine.states()) if method == "plugin_states" else answer
