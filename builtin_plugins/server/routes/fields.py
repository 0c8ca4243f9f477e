"""Fields that requests of several families share, and the sampling parameters that they make."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.field_names import is_of_request, own_names, with_own_path
from hardpoint.builtin_plugins.server.requests.limit_errors import too_many
from hardpoint.plugins import (
    RepetitionDetection,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.requests import AdapterScale
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.toolkit.trace import asking_for_trace
from hardpoint.typed import Strict, shown

from .compatibility_fields import CompatibilityFields, thinking_variables
from .request_limits import check_limits
from .response_formats import ResponseFormat, structured_fields

_ANY_CASE = "it is for the provider's own platform"

IGNORED = {
    "guided_decoding_backend": "grammars are compiled by the first backend that takes them",
    "length_penalty": "there is no beam search",
    "metadata": _ANY_CASE,
    "prompt_cache_key": "cached prompts are found by their content",
    "prompt_cache_retention": "cached prompts are kept while there is room",
    "safety_identifier": _ANY_CASE,
    "service_tier": _ANY_CASE,
    "session_id": "cached prompts are found by their content",
    "spaces_between_special_tokens": "the tokenizer decides",
    "stream_interval": "tokens are sent as they come, and together where a client reads slowly",
    "user": _ANY_CASE,
}
"""Fields that clients send and that change nothing, with the reason."""

REFUSED = {
    "chat_template": "templates come from the operator alone",
    "documents": "give them in the messages",
    "guided_whitespace_pattern": "say it in the grammar",
    "logits_processors": "the operator enables them as plugins; use plugin_args",
    "logprob_token_ids": "ask for them at /v1/chat/completions or /v1/completions",
    "media_io_kwargs": "the model reads text alone",
    "mm_processor_kwargs": "the model reads text alone",
    "return_tokens_as_token_ids": "ask for ids with return_token_ids",
    "thinking": "use enable_thinking",
    "truncate_prompt_tokens": "cut the prompt before you send it",
    "truncation_side": "cut the prompt before you send it",
    "use_beam_search": "completions are sampled",
}
"""Fields that are known and not supported, with the reason; false or empty ones ask for nothing."""

SAMPLING_REFUSED = {name: why for name, why in REFUSED.items() if name != "logprob_token_ids"}
"""The same of sampling parameters."""

_OF_TEXTS = ("return_tokens_as_token_ids", "truncate_prompt_tokens", "truncation_side")
TEXT_REFUSED = {name: why for name, why in SAMPLING_REFUSED.items() if name not in _OF_TEXTS}
"""The same of OpenAI's routes for conversations and prompts."""

NO_TEMPLATE = dict.fromkeys(
    ("enable_thinking", "thinking"), "prompts are read as they are; send /v1/chat/completions"
)
"""Fields that routes without a chat template refuse, with the reason."""


class StreamOptions(Strict):
    """The contents of a stream besides the answer.

    Attributes:
        include_usage: a last chunk with the usage.
        continuous_usage_stats: with `include_usage`, the usage so far in every chunk.
        include_obfuscation: ignored: chunks are not padded.
        include_progress: chunks with how much of the prompt is computed, before the answer.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    include_progress: bool = False


Number = Annotated[float, Meta(ge=-100, le=100)]


class GenerationFields(CompatibilityFields):
    """Fields of every route that generates text; unset fields have the model's defaults.

    Attributes:
        model: name of the model.
        stream: send the answer as it comes.
        stream_options: what the stream holds besides the answer.
        response_format: any text, any JSON object, or JSON of a schema; `structured_outputs` has
            more forms.
        timeout: seconds after which the request ends with finish reason "timeout".
        priority: smaller is more important; within the bounds of the key.
        tags: labels for policies and sinks; those of the key win.
        cache_salt: requests with different salts share no cached prompts.
        session: name of the conversation, for `retain_seconds`.
        retain_seconds: how long, from the end of the answer on, what was computed for it is to be
            kept in the prefix cache; the outcome is in `part_figures` of the answer.
        lora_scale: factor of what the adapter changes that `model` names; 1.0 by default.
        request_id: id of the answer, in place of a random one.
        plugin_args, vllm_xargs: arguments of plugins by name; two names of one thing.
        structured_outputs: what the answer must be, see `StructuredOutputs`.
    """

    ignored: ClassVar[Mapping[str, str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = REFUSED
    limit_name: ClassVar[str] = "max_tokens"

    model: str | None = None
    stream: bool = False
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    min_tokens: int | UnsetType = UNSET
    stop_token_ids: list[int] | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    logit_bias: dict[str, Number] | UnsetType = UNSET
    bad_words: list[str] | UnsetType = UNSET
    allowed_token_ids: list[int] | UnsetType = UNSET
    skip_special_tokens: bool | UnsetType = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    repetition_detection: RepetitionDetection | UnsetType = UNSET
    thinking_token_budget: int | UnsetType = UNSET
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    tags: dict[str, str] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    retain_seconds: Annotated[float, Meta(gt=0)] | None = None
    lora_scale: AdapterScale | None = None
    request_id: Annotated[str, Meta(pattern=r"\A[\x21-\x7e]{1,128}\Z")] | None = None
    plugin_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def sampling_params(
        self, defaults: SamplingParams, limits: ServerLimits, **fields: Any
    ) -> SamplingParams:
        """Return the parameters: the given ones, `fields`, and `defaults` for all others.

        Raises:
            RequestError: a field is wrong, or more than the server allows.
        """
        check_limits(self, limits)
        if self.n_predict == -1:
            defaults = defaults.for_chat()
        same_fields = {name: getattr(self, name, UNSET) for name in _SAME_NAME}
        same_fields = {name: value for name, value in same_fields.items() if value is not UNSET}
        if self.logit_bias is not UNSET:
            same_fields["logit_bias"] = _by_token(self.logit_bias)
        if (structured := self._structured()) is not None:
            same_fields["structured"] = structured
        if self.plugin_args is not None and self.vllm_xargs is not None:
            raise RequestError("plugin_args and vllm_xargs: expected one of them, got both")
        arguments = self.plugin_args or self.vllm_xargs
        if others := self.compatibility_arguments():
            for name in others.keys() & (arguments or {}).keys():
                raise RequestError(f"{name} and plugin_args.{name}: expected one of them, got both")
            arguments = {**(arguments or {}), **others}
        if arguments is not None:
            same_fields["plugin_args"] = arguments
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = msgspec.structs.replace(defaults, **{**same_fields, "output_kind": kind, **fields})
        limit = limits.max_tokens
        if limit is not None:
            given_tokens = fields.get("max_tokens")  # the model's default is no fault of theirs
            if given_tokens is not None and given_tokens > limit:
                raise too_many(self.limit_field, limit, given_tokens)
            limit = min(params.max_tokens or limit, limit)
            params = msgspec.structs.replace(params, max_tokens=limit)
        return params

    @property
    def limit_field(self) -> str:
        """The field that has the maximum number of tokens."""
        return self.limit_name if self.n_predict is None else "n_predict"

    def own_names(self, message: str) -> str:
        """Return an error of the engine with the names that the fields of the request have."""
        prompts = (name for name in ("messages", "input") if name in self.__struct_fields__)
        # Without one, the grammar is of calls whose tools are strict or required.
        form, constraint = next(
            iter(self.answer_forms().items()), ("tools", {"structural_tag": None})
        )
        return own_names(
            self.with_compatibility_names(message),
            form=form,
            prompt=next(prompts, "prompt"),
            limit=self.limit_field,
            with_calls="structural_tag" not in constraint,
        )

    def answer_forms(self) -> dict[str, dict[str, Any]]:
        """Return the fields for the form of the answer, as fields of `StructuredOutputs`.

        Raises:
            RequestError: one of them is wrong.
        """
        forms = self.compatibility_forms()
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs
        return forms

    def _structured(self) -> StructuredOutputs | None:
        """Return the form of the answer, from the one field that gives it.

        Raises:
            RequestError: several fields do, or the one that does is wrong.
        """
        forms = self.answer_forms()
        if len(forms) > 1:
            raise RequestError(f"{' and '.join(forms)}: expected one of them, got both")
        for name, value in forms.items():
            members = {key: item for key, item in value.items() if item is not None}
            try:
                return StructuredOutputs.checked(members, name)
            except RequestError as error:
                raise RequestError(with_own_path(str(error), name)) from None
        return None


class TraceOptions(Strict):
    """How much a trace holds.

    Attributes:
        candidates: tokens that are shown for a position, and for a change; `plugin.trace` has how
            many there are by default.
    """

    candidates: Annotated[int, Meta(ge=1, le=20)] | None = None


class SamplingFields(GenerationFields):
    """Fields of routes that have OpenAI's names for them.

    Attributes:
        guided_json, guided_regex, guided_choice, guided_grammar: older names of parts of
            `structured_outputs`.
        stream_options: what a stream holds besides the answer.
        return_progress: the same as `stream_options.include_progress`.
        prompt_logprobs: likeliest tokens for each prompt position after the first.
        logprob_token_ids: tokens that each position's log-probabilities hold besides; without
            `logprobs`, these and the chosen one.
        return_token_ids: whether choices hold token ids.
        include: names of step parts, such as "speculation", whose figures choices hold, as
            `part_figures`.
        trace: whether choices hold how each token was chosen, and why, or how much of it; for
            clients that may.
        kv_transfer_params: for the KV connector; from keys that may.
    """

    refused: ClassVar[Mapping[str, str]] = SAMPLING_REFUSED

    stream_options: StreamOptions | None = None
    return_progress: bool = False
    n: int | UnsetType = UNSET
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | UnsetType = UNSET
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    logprob_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool = False
    include: list[str] | UnsetType = UNSET
    trace: bool | TraceOptions = False
    kv_transfer_params: dict[str, Any] | None = None

    def answer_forms(self) -> dict[str, dict[str, Any]]:
        """Return the fields for the form of the answer; see the base."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        forms = {
            f"guided_{name}": {name: value} for name, value in guided.items() if value is not None
        }
        forms |= super().answer_forms()
        if (answer_format := structured_fields(self.response_format)) is not None:
            forms["response_format"] = answer_format
        return forms

    def sampling_params(
        self, defaults: SamplingParams, limits: ServerLimits, **fields: Any
    ) -> SamplingParams:
        """Return the parameters; see the base.

        Raises:
            RequestError: a field is wrong, or more than the server allows.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: expected stream to be true with it")
        params = super().sampling_params(defaults, limits, **fields)
        if self.trace is False:
            return params
        trace_options = TraceOptions() if self.trace is True else self.trace
        return asking_for_trace(params, trace_options.candidates)

    @property
    def wants_logprobs(self) -> bool:
        """Whether choices hold log-probabilities."""
        of_route = getattr(self, "logprobs", None)  # how many, 0 too; or whether there are any
        has_some = of_route is not None and of_route is not False
        return has_some or self.logprob_token_ids is not None

    @property
    def wants_progress(self) -> bool:
        """Whether the stream begins with how much of the prompt is computed."""
        options = self.stream_options
        return self.return_progress or (options is not None and options.include_progress)


class TextFields(SamplingFields):
    """Fields of routes with prompts as text.

    Attributes:
        return_tokens_as_token_ids: whether log-probabilities name tokens as "token_id:17", since
            several tokens may have one text.
        truncate_prompt_tokens: last tokens of the prompt that are kept; -1 keeps those that leave
            room for `max_tokens`.
        truncation_side: "left", with `truncate_prompt_tokens`.
    """

    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "repetition_detection",
    "thinking_token_budget",
    "prompt_logprobs",
    "logprob_token_ids",
    "include",
)
"""Fields that SamplingParams has under the same names."""


def check_known(name: str, known: Sequence[Any], path: str) -> None:
    """Check that a choice is of a tool that the request has.

    Args:
        known: names of the tools.
        path: path of the choice's name.

    Raises:
        RequestError: it is not.
    """
    if name not in known:
        listed = ", ".join(shown(known_name, 100) for known_name in known[:20]) or "none"
        raise RequestError(f"{path}: expected one of the tools ({listed}), got {shown(name, 100)}")


def reasoning_variables(
    template: str | None,
    effort: str | None,
    variables: Mapping[str, Any] | None,
    **thinking: Any,
) -> dict[str, Any] | None:
    """Return the variables of a chat template, including the variables of a reasoning effort.

    Args:
        effort: "none" asks for no reasoning; None leaves it to the template.
        variables: by the request; they win.
        thinking: the fields for thinking, see `thinking_variables`; they win over the effort.

    Raises:
        RequestError: the template has no variable for thinking, and a field for it is given.
    """
    variables = thinking_variables(template, variables, **thinking)
    if effort is not None and template is not None:
        if "reasoning_effort" in template and effort != "none":
            variables.setdefault("reasoning_effort", effort)
        if "enable_thinking" in template:
            variables.setdefault("enable_thinking", effort != "none")
    return variables or None


Renaming = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of the paths at the beginning of errors, and what they are replaced by."""


async def renamed(
    outputs: AsyncGenerator[RequestOutput, None],
    names: Renaming,
    body: GenerationFields | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield outputs; name the fields in errors as the route does that calls the engine.

    Args:
        names: field names of the route.
        body: the request, whose own fields give the form and the length of the answer.

    Raises:
        RequestError: raised by the outputs, with the path of the field as the route names it.
    """
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    # A grammar is compiled while the request waits.
                    if completion.error and is_of_request(completion.error):
                        raise RequestError(completion.error)
                yield output
    except RequestError as error:
        message = str(error)
        for pattern, name in names:
            message = pattern.sub(name, message)
        if body is not None:
            message = body.own_names(message)
        raise type(error)(message) from error


_MOST_NAMES = 20


def _by_token(bias: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        names = ", ".join(shown(key, 100) for key in wrong[:_MOST_NAMES])
        more = f" and {len(wrong) - _MOST_NAMES} others" if len(wrong) > _MOST_NAMES else ""
        raise RequestError(f"logit_bias: expected token ids as keys, got {names}{more}")
    return {int(key): value for key, value in bias.items()}
