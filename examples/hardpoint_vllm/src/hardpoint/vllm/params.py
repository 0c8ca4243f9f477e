"""vLLM's parameters of requests, which become Hardpoint's where a request is made."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from hardpoint import LoRARequest as NativeLoRARequest
from hardpoint import PoolingParams as NativePoolingParams
from hardpoint import RequestOutputKind as RequestOutputKind
from hardpoint import SamplingParams as NativeSamplingParams
from hardpoint.errors import RequestError
from hardpoint.typed import convert

from .structured import GuidedDecodingParams as GuidedDecodingParams
from .structured import GuidedDecodingRequest
from .structured import StructuredOutputsParams as StructuredOutputsParams

_GREEDY = 1e-5
_SAME = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
    "output_kind",
    "thinking_token_budget",
    "skip_reading_prefix_cache",
]
"""Fields of SamplingParams that have one name in both engines."""


class SamplingType(IntEnum):
    """How tokens are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass
class RepetitionDetectionParams:
    """When to end an output that loops."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def native(self) -> dict[str, int] | None:
        """Return the fields of RepetitionDetection; None for the value that is off in vLLM."""
        if not self.max_pattern_size:
            return None
        return {
            "max_pattern": self.max_pattern_size,
            "min_pattern": max(1, self.min_pattern_size),
            "min_count": self.min_count or 2,
        }


class BeamSearchParams(msgspec.Struct, dict=True):
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None


class SamplingParams(msgspec.Struct, dict=True):
    """vLLM's sampling parameters: fields may be None where that is a default, and be assigned.

    Values are checked by the constructor and again where a request is made.

    Raises:
        ValueError: a value is wrong, or a field changes tokens and Hardpoint has no counterpart.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | dict[str, Any] | None = None
    logits_processors: list[Any] | None = None
    logit_bias: dict[int, float] | dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | dict[str, int] | None = None
    watermarking: bool | None = None
    routed_experts_prompt_start: int = 0
    plugin_args: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in defaults, and check the values."""
        for name, value in _FILLED.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.seed == -1:
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        if 0 < self.temperature < _GREEDY:
            self.temperature = 0.0
        if self.temperature == 0.0:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self.native()

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return parameters of these fields; None is a field's default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def sampling_type(self) -> SamplingType:
        """How tokens are chosen."""
        if self.temperature < _GREEDY:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def all_stop_token_ids(self) -> set[int]:
        """The tokens of `stop_token_ids`; the model's own end an output, too."""
        return set(self.stop_token_ids or ())

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """None: the engine tokenizes `bad_words`."""
        return None

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return copy.deepcopy(self) if self.logits_processors is None else copy.copy(self)

    def native(self, processors: Sequence[str] = ()) -> NativeSamplingParams:
        """Return Hardpoint's object.

        Args:
            processors: names of enabled logits processors of vLLM, which read `extra_args`.

        Raises:
            RequestError, a ValueError: a value is wrong.
        """
        self._refuse()
        values = {name: getattr(self, name) for name in _SAME}
        values = {name: value for name, value in values.items() if value is not None}
        if self.max_tokens is None:
            values["max_tokens"] = None
        bias = {int(token): min(100.0, max(-100.0, float(b)))
                for token, b in (self.logit_bias or {}).items()}  # fmt: skip
        plugin_args = {name: {"extra_args": self.extra_args} for name in processors}
        if self.extra_args is None:
            plugin_args = {}
        repetition = self._repetition()
        checked = convert(
            {**values, "logit_bias": bias, "repetition_detection": repetition},
            NativeSamplingParams,
            path="",
            error=RequestError,
        )
        form = self.structured_outputs or self.guided_decoding
        if isinstance(form, Mapping):
            form = StructuredOutputsParams(**form)
        return msgspec.structs.replace(
            checked,
            structured=None if form is None else form.native(),
            logits_processors=list(self.logits_processors or []),
            plugin_args={**plugin_args, **self.plugin_args},
        )

    def _repetition(self) -> dict[str, int] | None:
        detection = self.repetition_detection
        if isinstance(detection, Mapping):
            detection = RepetitionDetectionParams(**detection)
        return None if detection is None else detection.native()

    def _refuse(self) -> None:
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of: expected {self.n}, the value of n, got {self.best_of}; ask for n "
                f"completions with logprobs, and choose among them"
            )
        for name, why in _REFUSED.items():
            if getattr(self, name):
                raise RequestError(f"{name}: expected none, got {getattr(self, name)!r}; {why}")


_FILLED = {
    parameter.name: parameter.default
    for parameter in msgspec.structs.fields(SamplingParams)
    if parameter.name in {*_SAME, "n", "flat_logprobs"}
    and parameter.default is not None
    and parameter.name != "max_tokens"
}
"""Defaults of fields whose None means the default."""
_REFUSED = {
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "prompt_logprob_start": "prompt_logprobs has all positions",
    "watermarking": "examples/acme_watermark is a sampler with a watermark",
    "routed_experts_prompt_start": "routed experts have all positions",
}


class PoolingParams(msgspec.Struct, dict=True):
    """vLLM's parameters of pooling."""

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    truncate_prompt_tokens: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    late_chunking_params: Any = None
    late_interaction_params: Any = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    pooler: str | None = None

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return copy.deepcopy(self)

    def native(self, task: str | None = None) -> NativePoolingParams:
        """Return Hardpoint's parameters of a task.

        Raises:
            RequestError: a field has no counterpart.
        """
        for field_name in ("step_tag_id", "returned_token_ids", "late_chunking_params",
                     "late_interaction_params", "extra_kwargs"):  # fmt: skip
            if getattr(self, field_name) is not None:
                raise RequestError(
                    f"{field_name}: expected none, got {getattr(self, field_name)!r}; a pooler "
                    f"reads arguments of requests (docs/write-an-activation-tap.md)"
                )
        flags = (self.use_activation, self.activation, self.softmax)
        use = next((flag for flag in flags if flag is not None), None)
        task_name = task or self.task or "embed"
        name = TASKS.get(task_name, task_name)
        if name == "embed" and self.normalize is None:
            return NativePoolingParams(
                task="embed", dimensions=self.dimensions, normalize=use, pooler=self.pooler
            )
        return NativePoolingParams(
            task=name,  # type: ignore[arg-type]
            dimensions=self.dimensions,
            normalize=self.normalize,
            use_activation=use,
            pooler=self.pooler,
        )


TASKS = {
    "encode": "token_embed",
    "embedding": "embed",
    "token_classify": "classify",
    "classification": "classify",
    "reward": "score",
}
"""Tasks of vLLM by other names."""


class LoRARequest(msgspec.Struct, dict=True, eq=False):
    """vLLM's adapter of a request."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        """Check the id.

        Raises:
            ValueError: it is below 1.
        """
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id: expected 1 or more, got {self.lora_int_id}")
        self.lora_path = self.lora_path or self.lora_local_path or ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    @property
    def name(self) -> str:
        """Its name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Its id."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Its folder."""
        return self.lora_path

    @classmethod
    def of(cls, adapter: NativeLoRARequest) -> LoRARequest:
        """Return an adapter of Hardpoint as one of vLLM."""
        return cls(adapter.name, adapter.id, adapter.path)

    def native(self) -> NativeLoRARequest:
        """Return Hardpoint's object."""
        return NativeLoRARequest(self.lora_name, self.lora_int_id, self.lora_path)


def native_lora(lora_request: Any) -> Any:
    """Return the adapters that Hardpoint takes: of one request, or of several."""
    if isinstance(lora_request, Sequence):
        return [native_lora(item) for item in lora_request]
    return lora_request.native() if isinstance(lora_request, LoRARequest) else lora_request


_FORMER_OPTIONS = {
    "prompt_adapter_request": "prompt adapters are not supported; use lora_request",
}
"""Options of requests before vLLM 0.10, and their counterparts."""


def request_options(
    params: Any,
    lora_request: Any,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return Hardpoint's options of a request, or of several, without options that are None.

    Args:
        params: parameters of the request or of each, which may have `truncate_prompt_tokens`.
        lora_request: adapter of the request or of each.
        tokenization_kwargs: may have `truncate_prompt_tokens`, or `truncation` and `max_length`.
        options: options that have one name in both engines.

    Raises:
        RequestError: another key of `tokenization_kwargs`, or an option that vLLM had.
    """
    options["lora_request"] = native_lora(lora_request)
    tokenization = dict(tokenization_kwargs or {})
    length = tokenization.pop("max_length", None)
    if tokenization.pop("truncation", False):
        tokenization.setdefault("truncate_prompt_tokens", -1 if length is None else length)
    for name, value in tokenization.items():
        if name != "truncate_prompt_tokens":
            raise RequestError(
                f"tokenization_kwargs.{name}: expected truncate_prompt_tokens, got {value!r}"
            )
        options[name] = value
    for name, hint in _FORMER_OPTIONS.items():
        if options.get(name) is not None:
            raise RequestError(f"{name}: expected none, got {options[name]!r}; {hint}")
    if (cut := _truncation(params)) is not None:
        options["truncate_prompt_tokens"] = cut
    return {name: value for name, value in options.items() if value is not None}


def with_guided_options(params: Any, request: Any) -> Any:
    """Return copies of parameters that have the form of a GuidedDecodingRequest or of its fields.

    Raises:
        RequestError: the parameters have a form of their own, or a field is unknown.
    """
    if isinstance(params, Sequence):
        return [with_guided_options(item, request) for item in params]
    if params.structured_outputs or params.guided_decoding:
        raise RequestError(
            f"guided_options_request: expected none with parameters that have structured_outputs, "
            f"got {request!r}"
        )
    if isinstance(request, Mapping):
        try:
            request = GuidedDecodingRequest(**request)
        except TypeError as error:
            raise RequestError(f"guided_options_request: {error}") from None
    changed = params.clone()
    changed.structured_outputs = request.form()
    return changed


def _truncation(params: Any) -> Any:
    if isinstance(params, Sequence):
        cuts = [_truncation(item) for item in params]
        return cuts if any(cut is not None for cut in cuts) else None
    return getattr(params, "truncate_prompt_tokens", None)


def sampling_params(params: NativeSamplingParams | None) -> SamplingParams:
    """Return parameters of Hardpoint as vLLM's; without any, vLLM's defaults."""
    if params is None:
        return SamplingParams()
    values = {name: getattr(params, name) for name in _SAME}
    if values["max_tokens"] is not None:
        values["max_tokens"] = int(values["max_tokens"])  # the default is a value of its own
    return SamplingParams(**values)
