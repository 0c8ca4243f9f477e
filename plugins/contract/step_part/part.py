"""Step parts: features that take part in the step of the engine and of its workers.

A part completes requests in the frontend, gates them, counts resources, puts data on the plan,
masks logits, reads results, and is notified of plans that are lost; in a worker it may run the
model in another way. There is a protocol for each of these, `engine_hooks` and `worker_hooks`, and
the half of a part in the engine or in a worker implements the protocols that it needs. The
engine collects the methods of all halves when it starts; undefined methods are not called, and no
of the engine's half is called in a step without a request that uses the part.

The frontend half, `FrontendHalf`, checks requests and reads answers. It completes a request before
the engine gets it, with data of the frontend: the tokenizer, and the classes of components
that the engine drives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from hardpoint.errors import HardpointError, RequestError, shown
from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import PIECE, returns
from hardpoint.plugins.config.engine import EngineConfig
from hardpoint.plugins.config.model_files import ModelConfig, ModelFiles
from hardpoint.plugins.requests.markers import ReasoningMarkers
from hardpoint.plugins.requests.params import EngineCoreRequest, Prompt
from hardpoint.plugins.requests.stats import IterationStats
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.plugins.text.output_parser import OutputFormat, RequestedCalls
from hardpoint.plugins.text.output_parser import ToolCalls as ToolCalls
from hardpoint.plugins.text.tokenizer import Tokenizer
from hardpoint.plugins.text.vocabulary import Vocabulary

from .components import ComponentFactory, FaultCounter
from .engine import EngineHalfContext
from .engine_hooks import EngineHooks
from .halves import EngineHalf, WorkerHalf
from .observer import OutputObserver, PreparedPartChange
from .worker import WorkerHalfContext
from .worker_hooks import WorkerHooks

__all__ = [
    "FrontendHalf",
    "FrontendHalfContext",
    "GivenPrompt",
    "StepPart",
    "StepPartContext",
]


def _no_tokens(text: str) -> Sequence[int]:  # noqa: ARG001
    raise RuntimeError("there is no tokenizer")


@dataclass(frozen=True, kw_only=True)
class FrontendHalfContext:
    """Context of the half in the frontend.

    Attributes:
        components: components of other kinds; always of the newest generation.
        vocabulary: returns the vocabulary of the tokenizer, or raises NotImplementedError with the
            reason where it has none. `EngineHalfContext` has it if a frontend half has asked.
        vocab_size: vocabulary size of the model.
        encode: returns the tokens of a text, without special ones before and after it.
        tokenizer: tokenizer of the model; None if the context was made by hand.
        faults: counts faults of components that the half drives; None if the context was made by
            hand.
        clock: clock of the frontend, in seconds.
        send_stats: sends figures to another process, which has the components that get them; None
            if this process has them.
    """

    components: ComponentFactory
    vocabulary: Callable[[], Vocabulary]
    vocab_size: int
    encode: Callable[[str], Sequence[int]] = _no_tokens
    tokenizer: Tokenizer | None = None
    faults: FaultCounter | None = None
    clock: Callable[[], float] = time.monotonic
    send_stats: Callable[[IterationStats], None] | None = None


@dataclass(frozen=True, kw_only=True)
class GivenPrompt:
    """A prompt, whatever form it was given in.

    Attributes:
        token_ids: one per position; checked later. None if `text` is to be tokenized.
        text: text of the prompt, if it is known.
        cache_salt: used if the request has none.
        arrival_time: seconds on the frontend's clock, used if the request has none.
        fields: fields of its request that a step part has read, among the ones that it uses
            (`StepPart.request_fields`). With some, the prompt is not cut, but by `cut`.
        cut: `cut(limit)` returns the prompt with at most that many tokens, if it has more;
            or raises a RequestError. None keeps the last ones of a prompt without `fields`.
    """

    token_ids: Any = None
    text: str | None = None
    cache_salt: str | None = None
    arrival_time: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    cut: Callable[[int], GivenPrompt] | None = None


class PromptReader(Protocol):
    """Converts a part's own form of prompt with the readers of other forms."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Raises:
            RequestError: it cannot be encoded.
        """

    def read(self, prompt: Prompt) -> GivenPrompt:
        """Return a prompt with its `token_ids`, whichever form it has: one of others, too.

        Raises:
            RequestError: it is malformed.
        """


class FrontendHalf:
    """The half of a step part in the frontend; called by one thread at a time.

    But `read_prompt` may be called in another one at the same time, as prompts may take long, and
    `read_media` in several.

    Every method is optional, and should be fast: other requests wait, but for `read_media`. A
    fault ends the request that it is about, whatever the `fault_scope` of the part.

    Attributes:
        prompt_keys: keys of a prompt that is a mapping; with any of them `read_prompt` reads it;
            read once. A key is of one part; a prompt with keys of several is read by the first.
        for_fields: fields of `EngineCoreRequest`. With these or `for_parameters`, `output_format`,
            `prepare`, `reads_answer` and `validate` are called for requests alone in which one of
            the fields has another value than its default, and `output_format` also for all that
            have tools; read once.
        for_parameters: fields of `SamplingParams`, likewise.
        media_tokens: tokens that stand for an item of media, or for parts of one, by its modality;
            the first one is its placeholder, which prompts have. Read once. Texts of users never
            become one of them.
        named_components: by kind that requests name components of, which the half drives: the name
            of the component of other requests, which may give it arguments; None without one.
    """

    prompt_keys: Collection[str] = ()
    for_fields: Collection[str] = ()
    for_parameters: Collection[str] = ()
    media_tokens: Mapping[str, Sequence[int]] = {}
    named_components: Mapping[str, str | None] = {}

    @property
    def components(self) -> Sequence[Component]:
        """Components of the half; the utility `plugin_states` returns their states."""
        return ()

    def observer(self) -> OutputObserver | None:
        """Return the observer of all outputs; None, the default, for none. Called once."""
        return None

    def prepare_change(
        self,
        components: ComponentFactory,  # noqa: ARG002
        config: EngineConfig,  # noqa: ARG002
    ) -> PreparedPartChange | None:
        """Build replacements of this half's components for a hot reconfiguration of other plugins.

        Called in another thread while the half serves.

        Args:
            components: components of the next generation.
            config: the next configuration.

        Returns:
            The replacements; None if the half stays as it is.

        Raises:
            HardpointError: the change cannot be made; nothing is left of it.
        """
        return None

    def read_prompt(
        self,
        prompt: Mapping[str, Any],
        reader: PromptReader,  # noqa: ARG002
    ) -> GivenPrompt:
        """Return the ids of a prompt of the part's own form, and fields of its request.

        May be called in another thread, one call at a time. `prepare` is called with the request
        later.

        Args:
            prompt: as the caller gave it, with one of `prompt_keys`.
            reader: reads texts, and the prompt without the part's own keys.

        Raises:
            RequestError: it is rejected; names the key, its value and the expected one.
        """
        raise RequestError(f"prompt: the part reads none, got the keys {sorted(prompt)}")

    def read_media(
        self,
        modality: str,
        items: Sequence[tuple[str, Any]],
    ) -> Sequence[Any]:
        """Return items of media as `read_prompt` takes them; of a part with `media_tokens`.

        Called in any thread, several times at once: it may wait, for other hosts too.

        Args:
            modality: one of `media_tokens`.
            items: each with its place, which names it in messages; unchecked.

        Raises:
            RequestError: one is rejected; names its place, its value and the expected one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read_media")

    def output_format(
        self,
        request: EngineCoreRequest,  # noqa: ARG002
        calls: RequestedCalls | None,  # noqa: ARG002
    ) -> OutputFormat | None:
        """Return the format of a new request's outputs; None, the default, if it is text alone.

        Called before `prepare_calls`, and again if a hook has changed inputs of the format.
        The formats of several parts are used together, in the order of the parts; the `markers` and
        `calls` of the first one that has some count.

        Args:
            request: has the arguments of `named_components` in `plugin_args`.
            calls: its tools; None without any.

        Raises:
            RequestError: the request is rejected.
        """
        return None

    def prepare_calls(self, request: EngineCoreRequest, calls: ToolCalls) -> None:
        """Complete a new request that has tools; called before `prepare`.

        Raises:
            RequestError: it is rejected.
        """

    def prepare(self, request: EngineCoreRequest, reasoning: ReasoningMarkers | None) -> None:
        """Check a new request, and complete it before the engine gets it.

        Called again, with the same request, if a hook has changed its parameters.

        Args:
            request: its fields may be set; `params` is read-only, and may be replaced.
            reasoning: marks where the answer begins; None if the request's output has no reasoning.

        Raises:
            RequestError: it is rejected; names the field, its value and the expected one.
        """

    def members(
        self,
        request: EngineCoreRequest,  # noqa: ARG002
        arguments: Mapping[str, Any],  # noqa: ARG002
    ) -> Sequence[GivenPrompt]:
        """Return the prompts of hidden requests that run together with a new request.

        Each gets the tokens of the request after its own prompt, and `ModelLogits.combine` of the
        part gets the logits of all. Called after `prepare`, for each of `n` completions; of a part
        with `named_only`, for requests with arguments for it.

        Args:
            request: checked and completed.
            arguments: its arguments for the part, as plain data; empty if it gives none.

        Returns:
            A prompt for each member. `fields` may have `lora`, its adapter.

        Raises:
            RequestError: the request is rejected.
        """
        return ()

    def reads_answer(self, request: EngineCoreRequest) -> bool:  # noqa: ARG002
        """Return whether `validate` gets the answer of a request."""
        return False

    @returns(PIECE)
    def validate(self, request: EngineCoreRequest, answer: str) -> str | None:  # noqa: ARG002
        """Return the flaw of a finished answer, for `CompletionOutput.validation_error`.

        Args:
            request: a request that `reads_answer` chose.
            answer: whole, without reasoning and calls of tools.

        Returns:
            None if it has no flaw. Of several parts, the first flaw counts.
        """
        return None

    def close(self) -> None:
        """Release resources; called once."""


@dataclass(frozen=True, kw_only=True)
class StepPartContext(Context["StepPart"]):
    """Context of a step part, in the frontend, in the engine and in each worker.

    Attributes:
        config: configuration of the engine.
        model_config: configuration of the model; None if the context was made by hand.
        files: files of the model; likewise.
    """

    config: EngineConfig
    model_config: ModelConfig | None = None
    files: ModelFiles | None = None


class StepPart(ComponentWithArguments):
    """A feature of the engine's step, with halves in the frontend, the engine and each worker.

    If a class has `Arguments`, the arguments of a request that gives some, checked, are
    `plugin_args["step_parts/NAME"]` of its `EngineCoreRequest`, as plain data.

    Attributes:
        fault_scope: scope of a fault of a half: the requests of the plan that use the part, its
            work in this step, or the engine.
        before, after: names of parts with methods that are called after, and before, this part's.
        changes_live: whether it may be enabled, replaced and disabled while an engine runs; its
            requests finish with the part, and the options, that they were admitted with. A half
            that takes part in the start of an engine or of its workers can not be changed.
        releases_blocks: whether it calls `EngineHalfContext.release_blocks`. The start fails with a
            scheduler without `releases_blocks`, a KV connector, or a model with sliding windows
            or recurrent layers.
    """

    context: StepPartContext
    changes_live: ClassVar[bool] = False
    releases_blocks: ClassVar[bool] = False
    fault_scope: ClassVar[Literal["request", "step", "engine"]] = "request"
    before: ClassVar[Sequence[str]] = ()
    after: ClassVar[Sequence[str]] = ()

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:  # noqa: ARG003
        """Return the optional fields of `EngineCoreRequest` that the part makes use of.

        Of `REQUEST_FIELDS`. A request that sets one of these is rejected unless an enabled part
        uses it, which checks the value.
        """
        return ()

    @classmethod
    def merge_answers(cls, method: str, answers: Sequence[Any]) -> Any:
        """Merge the results of `plugins.call_part` of several engines (`parallel.data`).

        The default is the answer that all of them give.

        Args:
            method: the call.
            answers: results of `ProgramCalls.call` in each engine, in the order of their ranks,
                none of them None: an engine that answers None is asked again.

        Raises:
            HardpointError: there is no such answer.
        """
        if any(answer != answers[0] for answer in answers):
            raise HardpointError(f"{method}: the engines answered differently: {shown(answers)}")
        return answers[0]

    @property
    def moves_blocks(self) -> str | None:
        """The setting that makes worker halves read and write blocks of the KV cache, for messages.

        The halves are started with the cache, its blocks get an identity, and each rank reports.
        None, the default, is a part that touches no blocks.
        """
        return None

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf | None:  # noqa: ARG002
        """Return the half in the frontend; None, the default, if there is none. Called once."""
        return None

    def engine_half(self, context: EngineHalfContext) -> EngineHooks | EngineHalf | None:  # noqa: ARG002
        """Return the half in the engine; None, the default, if there is none. Called once.

        It is an object with the members of some protocols: `AdmissionGate`, `ResourceCost` and the
        others of `engine_hooks`.
        """
        return None

    def worker_half(self, context: WorkerHalfContext) -> WorkerHooks | WorkerHalf | None:  # noqa: ARG002
        """Return the half in a worker; None if there is none. Called once per worker.

        It is an object with the members of some protocols: `WorkerStep`, `ModelLogits` and the
        others of `worker_hooks`.
        """
        return None
