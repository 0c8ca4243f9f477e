"""The objects that vLLM passes to logits processors: their fields here, and errors for the rest.

A field that is not kept raises when it is read, and not an AttributeError: so
`getattr(config, "lora_config", None)` is not None by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hardpoint.plugins import Arguments, LogitsContext, SamplingParams


class AdapterArguments(Arguments):
    """Arguments of one request.

    Attributes:
        extra_args: what the external code reads as `params.extra_args`.
    """

    extra_args: dict[str, Any] = {}


class FieldNotKeptError(LookupError):
    """A field of an object of vLLM's was read that Hardpoint does not keep."""


class KeptFields:
    """Base of the objects: names the missing field and the existing ones in messages.

    Attributes:
        described: what the object is, for messages.
        available: fields that it has, for messages.
    """

    described: ClassVar[str]
    available: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the missing attribute and the existing ones.

        Raises:
            FieldNotKeptError: it is a public name.
            AttributeError: it is a private name, which Python's own protocols look for.
        """
        error = AttributeError if name.startswith("_") else FieldNotKeptError
        raise error(f"{self.described} has no {name!r}; it has {self.available}")


class NamedFields(KeptFields):
    """An object with fields by keyword, for kinds other than logits processors."""

    def __init__(self, description: str, /, **fields: Any) -> None:
        """Set the fields.

        Args:
            description: the object, for messages.
            fields: its fields; None is a value as any other.
        """
        vars(self).update(
            fields, described=f"the {description} given to classes of vLLM",
            available=", ".join(fields) or "no fields",
        )  # fmt: skip

    def __repr__(self) -> str:
        hidden = ("described", "available")
        fields = (f"{key}={value!r}" for key, value in vars(self).items() if key not in hidden)
        return f"{type(self).__name__}({', '.join(fields)})"


class SchedulerFields(KeptFields):
    """`vllm_config.scheduler_config`."""

    described = "the scheduler_config given to classes in vLLM's form"
    available = "max_num_seqs and max_model_len"

    def __init__(self, context: LogitsContext) -> None:
        """Copy the sizes of a processor's context."""
        self.max_num_seqs = context.max_num_seqs
        if context.max_model_len:
            self.max_model_len = context.max_model_len


class ModelFields(KeptFields):
    """`vllm_config.model_config`."""

    described = "the model_config given to classes in vLLM's form"
    available = "get_vocab_size(), max_model_len, model and tokenizer"

    def __init__(self, context: LogitsContext) -> None:
        """Copy the model's values in a processor's context."""
        self._vocab_size = context.vocab_size
        if context.max_model_len:
            self.max_model_len = context.max_model_len
        if context.model:
            self.model = context.model
            self.tokenizer = context.tokenizer or context.model

    def get_vocab_size(self) -> int:
        """Return the width of the logits."""
        return self._vocab_size


class VllmConfigFields(KeptFields):
    """`vllm_config`.

    Attributes:
        speculative_config: None: a class sees no drafts, also where there are some.
    """

    described = "the engine configuration given to classes in vLLM's form"
    available = (
        "scheduler_config.max_num_seqs, model_config.get_vocab_size(), .max_model_len, .model and "
        ".tokenizer, and speculative_config"
    )

    def __init__(self, context: LogitsContext) -> None:
        """Copy the values in a processor's context."""
        self.scheduler_config = SchedulerFields(context)
        self.model_config = ModelFields(context)
        self.speculative_config = None


_PARAMS_NOT_KEPT = {
    "watermarking",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "flat_logprobs",
    "spaces_between_special_tokens",
    "stream_interval",
    "skip_clone",
    "output_text_buffer_length",
    "structured_outputs",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
    "sampling_type",
    "eos_token_id",
    "all_stop_token_ids",
    "bad_words_token_ids",
    "num_logprobs",
}
"""Fields and properties of SamplingParams of vLLM 0.32 that are not kept."""


class ExternalParams:
    """Sampling parameters with the attributes that other engines add.

    Attributes:
        extra_args: arguments of the request for this plugin; None if it gave none.
    """

    def __init__(
        self,
        params: SamplingParams,
        extra_args: Mapping[str, Any],
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        """`stop_token_ids` holds every token id that ends the request, if known."""
        self._params = params
        self.extra_args = dict(extra_args) or None
        if stop_token_ids is not None:
            self.all_stop_token_ids = set(stop_token_ids)

    @property
    def stop(self) -> list[str]:
        """The stop strings, always as a list."""
        return self._params.stop_strings

    def __getattr__(self, name: str) -> Any:
        """Return a field of SamplingParams.

        Raises:
            FieldNotKeptError: vLLM's parameters have it, these do not.
            AttributeError: vLLM's parameters do not have it either.
        """
        if name.startswith("_") or not hasattr(self._params, name):
            error = FieldNotKeptError if name in _PARAMS_NOT_KEPT else AttributeError
            raise error(
                f"these sampling parameters have no {name!r}; arguments of a plugin's own are in "
                f"extra_args"
            )
        return getattr(self._params, name)
