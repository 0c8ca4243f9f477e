"""LLM: a model for scripts and bigger programs that call and wait."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hardpoint.configuration.handed_over import handed_over
from hardpoint.configuration.loading import config_from
from hardpoint.core.engine.utility_calls import ControlCalls
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.host.registry.discovery import InstalledPlugin
from hardpoint.host.system.control_calls import SyncCaller
from hardpoint.plugins import EngineConfig, RequestError, RequestOutput, SamplingParams, Tokenizer
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.request_options import ChatRequestOptions, RequestOptions
from hardpoint.plugins.requests import PoolingRequestOutput, Prompt

from .calls.adapters import AdapterGroup
from .calls.debug import DebugGroup
from .calls.engines import EngineGroup
from .calls.groups import open_engine, sync_groups
from .calls.model import ModelGroup, ShownModel, chat_params
from .calls.plugins import PluginGroup
from .calls.pooling import (
    paired_scores,
    prefixed_prompts,
    score_prompts,
    similarity_scores,
    text_pairs,
    with_task,
)
from .calls.reloading import watching_plugins
from .calls.streams import OutputStream
from .calls.weights import WeightFiles, WeightUpdateGroup
from .chat import Chat, Messages
from .conversations.parts import ConversationOptions, check_options
from .conversations.states import open_conversations
from .conversations.turns import Conversation
from .old_names.members import SYNC_NAMES, ModelClass, old_member
from .progress import check_progress, shows_progress
from .requests import (
    BatchOptions,
    ChatBatchOptions,
    GenerateOptions,
    conversation_list,
    draws_progress,
    prompt_list,
    takes_options,
)

__all__ = ["LLM", "open_resolved"]


class LLM(ShownModel, SyncCaller, metaclass=ModelClass):
    """A model that generates text, or vectors of texts.

    | Member | Use |
    |---|---|
    | `generate`, `chat` | complete prompts, or answer conversations, in one batch |
    | `stream`, `stream_chat` | the same for one prompt; iterate over the outputs as they come |
    | `generate_unordered` | complete any number of prompts; yield each output once it is finished |
    | `open_conversation` | open a conversation whose prompt goes on after each answer |
    | `encode`, `embed`, `classify`, `score` | pool prompts: vectors, classes, similarity scores |
    | `model` | tasks, default parameters, chat template |
    | `adapters` | LoRA adapters: `add`, `remove`, `list`, `pin`, `resolve` |
    | `engines` | engines by rank: `pause`, `resume`, `scale`, `retire`, `load`, `settings` |
    | `weights` | weights: `update`, `version` |
    | `plugins` | plugins: `enable`, `disable`, `change`, `set_policy`, `health`, `meters` |
    | `debug` | `trace` of tokens, profiles |
    | `sleep`, `wake_up` | release memory, and allocate it again |
    | `reset_prefix_cache` | clear the prefix cache |
    | `collective_rpc` | call a method of every worker |
    | `metrics` | the metrics of the stat sinks, in Prometheus's text format |
    | `config`, `tokenizer` | the configuration; the model's tokenizer |
    | `llm_engine` | the engine, for programs that step it themselves |
    | `close` | release model, cache and processes |

    The engine runs in this process, or in a process of its own with
    `config={"engine": {"in_process": False}}`; results and errors are the same. Several engines
    (`parallel.data`), and those that are restarted (`engine.restart`), have processes of their own.
    Usable as a context manager. Several threads may use it: their requests share a batch, and each
    gets the outputs of its own. A fork of the process cannot use it: every call there raises
    HardpointError.

    Example:
        with LLM("smollm2") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)
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
        progress: bool | None = None,
        reload_plugins: bool = False,
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
            reload_plugins: replace plugins when their files are saved, for development.

        Raises:
            ConfigError, PluginError, ModelError: before any weight is read, where that is possible.
        """
        overrides = {"model": model, "dtype": dtype, "seed": seed, "tokenizer.path": tokenizer}
        overrides["max_model_len"] = max_model_len
        check_progress(progress)
        passed_plugins = handed_over(plugins, "LLM")
        resolved, config_sources = config_from(config, overrides, passed_plugins=passed_plugins)
        with watching_plugins(enabled=reload_plugins) as watch:
            self._open(resolved, config_sources, progress, passed_plugins)
            watch(self.plugins)

    def _open(
        self,
        config: EngineConfig,
        config_sources: ConfigSources,
        progress: bool | None,
        installed: Sequence[InstalledPlugin] = (),
    ) -> None:
        self._draws_progress = shows_progress(sys.stderr) if progress is None else progress
        self._engine = open_engine(config, config_sources, installed, draws=self._draws_progress)
        parts = self._engine.parts
        self._files = WeightFiles(parts.config.load.updates)
        self._requests, self._groups = sync_groups(self._engine, self._files)
        self._conversations = open_conversations(parts.config, parts.clock)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return old_member(self, "LLM", name, SYNC_NAMES)

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
            sampling_params: one for all, or one per prompt; None: `model.default_sampling_params`.
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
        return self._requests.complete(prompt_list(prompts), sampling_params, options, draws=draws)

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
        conversations = conversation_list(messages)
        draws = draws_progress(options, default=self._draws_progress)
        chat, of_requests = Chat.taken_from(options)
        prompts = [self._requests.rendered(conversation, chat) for conversation in conversations]
        params = chat_params(sampling_params, self._engine.default_sampling_params())
        return self._requests.complete(prompts, params, of_requests, draws=draws)

    @takes_options
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Complete one prompt; return an iterator over outputs as they come.

        Each has what is new, unless `sampling_params.output_kind` is FINAL_ONLY. Leaving the loop
        early aborts the request.

        Args:
            prompt, sampling_params: as for `generate`.
            options: `RequestOptions`.

        Raises:
            RequestError, OverloadedError: prompt or parameters are wrong, or too many wait.
        """
        return self._requests.stream(prompt, sampling_params, options)

    def generate_unordered(
        self, requests: Iterable[tuple[Prompt, SamplingParams | None]]
    ) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Complete any number of prompts; yield each output once it is finished.

        Prompts are taken from the iterable when the engine has room for them; unless it is a list
        or a tuple, in a thread, so that a slow iterable delays no output. Leaving the loop early
        aborts those that run.

        Args:
            requests: prompts with their parameters; None is the model's recommendation.

        Yields:
            The position of a prompt, and its output; or its error, if it is refused.

        Raises:
            EnginePausedError, EngineDeadError: as `generate`.
        """
        return self._requests.unordered(requests)

    @takes_options
    def open_conversation(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        keep_last: bool = True,
        **options: Unpack[ConversationOptions],
    ) -> Conversation:
        """Open a conversation: a prompt that continues after each answer.

        Args:
            sampling_params: parameters of its turns, until one has others; None is what the model's
                files recommend.
            keep_last: whether the last token of an answer is part of the conversation; its keys and
                values are computed with the next turn.
            options: `ConversationOptions`: `RequestOptions` of each turn, and tools.

        Raises:
            RequestError: parameters or options are wrong for a conversation.
            OverloadedError: `conversations.max_open` are open.
            EngineDeadError, EngineClosedError: the engine has ended, or was closed.
        """
        self._engine.check_open()
        check_options(options)
        _, of_turns = Chat.taken_from(options)
        return Conversation(
            functools.partial(self._conversations.open, keep_last=keep_last),
            self._engine.parts.model_config.vocab_size,
            self.model.default_sampling_params(),
            sampling_params,
            encode=self._requests.encode_text,
            stream=lambda prompt, params: self._requests.stream(prompt, params, of_turns),
        )

    @takes_options
    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> OutputStream:
        """Answer one conversation; return an iterator over outputs as they come.

        Args:
            messages: as for `chat`.
            sampling_params: as for `stream`.
            options: `ChatOptions` and `RequestOptions`.

        Raises:
            RequestError, OverloadedError: as `chat` and `stream`.
        """
        chat, of_request = Chat.taken_from(options)
        prompt = self._requests.rendered(messages, chat)
        params = chat_params(sampling_params, self._engine.default_sampling_params())
        return self._requests.stream(prompt, params, of_request)

    @takes_options
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the results of prompts by `PoolingParams.task`, by default vectors.

        All prompts share running batches. No token is generated, so that a prompt may be as long as
        the model's context.

        Args:
            prompts: as for `generate`; at least one.
            pooling_params: one for all, or one per prompt.
            options: `RequestOptions`, each one for all, or a list of one per prompt.

        Returns:
            One output per prompt, in the order asked: `outputs` is a float32 array [dimensions],
            or of the task "token_embed" [tokens, dimensions].

        Raises:
            RequestError: a prompt or its parameters are wrong, or the model cannot do the task; the
                message has the prompt's index. None of them runs.
            PluginFaultError: a pooler failed.
            EnginePausedError, EngineDeadError: as `generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        return self._requests.pool(prompt_list(prompts), params, options)

    @takes_options
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return a vector for each prompt: `encode` with the task "embed".

        Args:
            prompts, pooling_params: as for `encode`.
            prompt_name: name of the model's text that is put before texts, such as "query"; None is
                the default one of the model's folder, mostly none.
            options: `RequestOptions`.

        Raises:
            RequestError: the model has no prompt of that name; or as `encode`.
        """
        params = with_task("embed", pooling_params)
        prefixed = prefixed_prompts(prompts, prompt_name, self.model, self.plugins)
        return self.encode(prefixed, params, **options)

    @takes_options
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the probability of each class for each prompt: `encode` with "classify".

        A prompt may be a pair of texts, `{"text": text, "text_pair": text}`.

        Raises:
            As `encode`.
        """
        return self.encode(prompts, with_task("classify", pooling_params), **options)

    @takes_options
    def score(
        self,
        texts_1: Prompt | Sequence[Prompt],
        texts_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return similarity scores of pairs of texts.

        A model with one class reads the texts in pairs; the score is the output of its head. For
        other models it is the cosine of the vectors.

        Args:
            texts_1: one text, which is compared with each of `texts_2`, or as many as these.
            texts_2: one text or several.
            pooling_params: parameters of all texts, of the task "score" or "embed".
            options: `RequestOptions`.

        Returns:
            One output per text of `texts_2`: `outputs` is a number.

        Raises:
            RequestError: the numbers of texts do not fit; or as `encode`.
        """
        first, second = score_prompts(texts_1, texts_2, self.model, self.plugins)
        if "embed" not in self.model.supported_tasks:
            params = with_task("score", pooling_params)
            return paired_scores(self.encode(text_pairs(first, second), params, **options))
        params = with_task("embed", pooling_params)
        outputs = self.encode([*first, *second], params, **options)
        return similarity_scores(outputs[: len(first)], outputs[len(first) :])

    @property
    def adapters(self) -> AdapterGroup:
        """The adapters (LoRA)."""
        return self._groups.adapters

    @property
    def engines(self) -> EngineGroup:
        """The engines by rank (`parallel.data`): control calls, number, load and settings."""
        return self._groups.engines

    @property
    def weights(self) -> WeightUpdateGroup:
        """The weights."""
        return self._groups.weights

    @property
    def plugins(self) -> PluginGroup:
        """The plugins."""
        return self._groups.plugins

    @property
    def debug(self) -> DebugGroup:
        """Traces and profiles."""
        return self._groups.debug

    @property
    def model(self) -> ModelGroup:
        """The model: tasks, default parameters, chat template."""
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

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for programs that add requests and step it themselves.

        `generate`, `chat` and `stream` step it too, and drop outputs of other requests.
        """
        return self._engine

    def metrics(self) -> str:
        """Return the metrics that sinks such as "prometheus" export, as Prometheus reads them.

        Empty without such a sink, and once closed. It waits for its turn, as every call does.
        """
        return self._engine.metrics()

    def close(self) -> None:
        """Release model, cache and processes. Closing twice does nothing."""
        self.plugins.end_watch()
        self._conversations.end_all("the engine was closed")
        self._engine.close()
        self._files.keep(())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call_utility(self, method: str, *args: Any) -> Any:
        return self._engine.call_utility(method, *args)


def open_resolved(
    config: EngineConfig,
    config_sources: ConfigSources,
    *,
    progress: bool | None = None,
    cls: type[LLM] = LLM,
) -> LLM:
    """Open an LLM with a configuration that was read elsewhere, with its sources."""
    llm = cls.__new__(cls)
    llm._open(config, config_sources, progress)
    return llm
