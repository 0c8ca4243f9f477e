"""LLM: a model for scripts and bigger programs that call and wait."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from hardpoint.core.build import build_engine
from hardpoint.core.config import config_from
from hardpoint.core.error_kinds import error_of
from hardpoint.core.frontend.input_processor import NO_EXTRAS, Prompt, RequestExtras
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.plugin_health import Health
from hardpoint.plugins import (
    EngineConfig,
    Manifest,
    Origins,
    PluginMeter,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    Tokenizer,
)

from .progress import ProgressDisplay

__all__ = ["LLM"]

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that generates text.

    It runs in this process, or in one of its own with `config={"engine": {"in_process": False}}`;
    results and errors are the same. Usable as a context manager; `close` gives its memory back.
    Not for use from several threads at once.

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
        progress: bool | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
            config: everything else: the path of a TOML file, a mapping or an EngineConfig. Nothing
                else is read: `hardpoint.toml` and the environment are the command line's.
            dtype, max_model_len, seed: short for the configuration fields of the same names.
            tokenizer: short for `tokenizer.path`.
            progress: draw progress bars; None draws them on a terminal.

        Raises:
            ConfigError, PluginError, ModelError: before any weight is read, where that is possible.
        """
        named = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "tokenizer": None if tokenizer is None else {"path": tokenizer},
        }
        self._open(*config_from(config, named), progress)

    @classmethod
    def from_resolved(
        cls, config: EngineConfig, origins: Origins, *, progress: bool | None = None
    ) -> LLM:
        """Load a model from a configuration that was read elsewhere, with its origins."""
        llm = cls.__new__(cls)
        llm._open(config, origins, progress)
        return llm

    def _open(self, config: EngineConfig, origins: Origins, progress: bool | None) -> None:
        self._progress = progress
        self._requests = 0
        self._inboxes: dict[str, collections.deque[RequestOutput]] = {}
        with ProgressDisplay(progress) as display:
            self._engine: LLMEngine = build_engine(config, origins, progress=display.report)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        tags: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one running batch.

        Args:
            prompts: one prompt or a list. A prompt is text, token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: one for all, or one per prompt; never changed.
            priority: smaller is more important. This and the following: one for all, or one
                per prompt.
            timeout: seconds after which a prompt ends with finish reason "timeout" and what it
                has so far; None is never.
            tags: free words for policies and sinks, such as {"tenant": "acme"}.
            cache_salt: prompts with different salts never share cached beginnings.

        Returns:
            One output per prompt, in the order asked.

        Raises:
            RequestError: a prompt or its parameters are wrong; then none of them runs.
            OverloadedError: more would wait than `scheduler.max_waiting`; then none of them runs.
            EngineDeadError: the engine's process is gone.
        """
        listed = _as_list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each(given, len(listed), "sampling_params")
        final = [_with_kind(p, RequestOutputKind.FINAL_ONLY) for p in params]
        said = {"priority": priority, "timeout": timeout, "tags": tags, "cache_salt": cache_salt}
        extras = _extras(said, len(listed))
        ids = self._add(zip(listed, final, extras, strict=True))
        return self._run(ids)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, by the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a list of such lists.
            sampling_params: one for all, or one per conversation.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        return self.generate([self._templated(each) for each in conversations], sampling_params)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yield outputs as they come, each with what is new.

        Leaving the loop early aborts the request. Outputs are deltas unless
        `params.output_kind` is FINAL_ONLY.
        """
        params = params or SamplingParams()
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            params = _with_kind(params, RequestOutputKind.DELTA)
        (request_id,) = self._add([(prompt, params, NO_EXTRAS)])
        try:
            finished = False
            while not finished:
                output = _accepted(self._next([request_id]))
                yield output
                finished = output.finished
        finally:
            self._drop([request_id])

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one conversation; yield outputs as they come, each with what is new."""
        return self.stream(self._templated(messages), params)

    def encode(self, *_: object, **__: object) -> NoReturn:
        """Refuse: this version of Hardpoint runs models that generate, none that pool.

        Raises:
            RequestError: always.
        """
        raise _not_yet("encode")

    def embed(self, *_: object, **__: object) -> NoReturn:
        """Refuse, as `encode`."""
        raise _not_yet("embed")

    def classify(self, *_: object, **__: object) -> NoReturn:
        """Refuse, as `encode`."""
        raise _not_yet("classify")

    def score(self, *_: object, **__: object) -> NoReturn:
        """Refuse, as `encode`."""
        raise _not_yet("score")

    @property
    def config(self) -> EngineConfig:
        """The configuration, with what was left open filled in."""
        return self._engine.parts.config

    @property
    def manifest(self) -> Manifest:
        """The plugins that are on."""
        return self._engine.parts.plugins.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.parts.tokenizer

    def set_policy(self, use: str, options: Mapping[str, Any] | None = None) -> None:
        """Put another scheduling policy in the place of the one there is; no request is lost.

        Args:
            use: entry-point name or FQCN.
            options: the policy's own.

        Raises:
            ConfigError, PluginError: the policy cannot be had; the old one stays.
        """
        self._engine.set_policy(use, options)

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Forget what is kept for prompts that begin alike.

        Args:
            recompute_running: also compute anew what runs, for example after weights changed.
        """
        self._engine.reset_prefix_cache(recompute_running=recompute_running)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how many requests run and wait, and what the KV cache holds and found."""
        return self._engine.scheduler_stats()

    def health(self) -> Health:
        """Return which plugins failed, what that ended, and which are quarantined."""
        return self._engine.health()

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name: steps, rows, seconds, faults."""
        return self._engine.plugin_meters()

    def close(self) -> None:
        """Give model, cache and processes back. Closing twice does nothing."""
        self._engine.close()

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

    def _add(self, requests: Any) -> list[str]:
        """Add requests; if one is refused, none runs."""
        ids: list[str] = []
        try:
            for prompt, params, extras in requests:
                request_id = str(self._requests)
                self._requests += 1
                self._engine.add_request(request_id, prompt, params, extras)
                ids.append(request_id)
                self._inboxes[request_id] = collections.deque()
        except BaseException:
            self._drop(ids)
            raise
        return ids

    def _next(self, ids: Sequence[str]) -> RequestOutput:
        """Return the next output of some requests, stepping the engine until there is one.

        Calls may be open side by side (a `generate` inside a loop over `stream`), so each output
        goes to the inbox of its own request.
        """
        while True:
            for request_id in ids:
                if inbox := self._inboxes[request_id]:
                    return inbox.popleft()
            for output in self._engine.step():
                self._inboxes[output.request_id].append(output)

    def _drop(self, ids: Sequence[str]) -> None:
        """Forget requests; abort what is left of them."""
        self._engine.abort_requests(ids)
        for request_id in ids:
            self._inboxes.pop(request_id, None)

    def _run(self, ids: list[str]) -> list[RequestOutput]:
        """Step until all are finished; return them in the order of `ids`."""
        results: dict[str, RequestOutput] = {}
        began, tokens = time.perf_counter(), 0
        try:
            with ProgressDisplay(self._progress) as display:
                while len(results) < len(ids):
                    output = _accepted(self._next(ids))
                    results[output.request_id] = output
                    tokens += sum(len(each.token_ids) for each in output.outputs)
                    speed = tokens / (time.perf_counter() - began)
                    note = f"{speed:.0f} tokens/s" if tokens else ""
                    display.report("Generating", len(results), len(ids), note)
        finally:
            self._drop(ids)
        return [results[request_id] for request_id in ids]

    def _templated(self, messages: Messages) -> Prompt:
        text = self.tokenizer.apply_chat_template(messages)
        # The template writes the special tokens itself.
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}


def _not_yet(call: str) -> RequestError:
    return RequestError(
        f"{call}: this version of Hardpoint has no pooling models; use generate, chat or stream"
    )


def _accepted(output: RequestOutput) -> RequestOutput:
    """Return an output.

    Raises:
        HardpointError: it says that the engine refused the request; as if the engine were here.
    """
    for completion in output.outputs:
        if completion.error_kind is not None:
            raise error_of(completion.error_kind, completion.error)
    return output


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts: expected a prompt or a list, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def _extras(said: Mapping[str, Any], count: int) -> list[RequestExtras]:
    """Return what each prompt says beside its parameters; what is None is left at its default."""
    columns = {name: _one_each(value, count, name) for name, value in said.items()}
    return [
        RequestExtras(**{name: v[i] for name, v in columns.items() if v[i] is not None})
        for i in range(count)
    ]


def _one_each(value: Any, count: int, what: str) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise RequestError(f"{what}: expected one or {count}, one per prompt, got {len(value)}")
        return list(value)
    return [value] * count


def _with_kind(params: Any, kind: RequestOutputKind) -> Any:
    if not isinstance(params, SamplingParams):
        return params  # the engine refuses it with its own words
    return msgspec.structs.replace(params, output_kind=kind)
