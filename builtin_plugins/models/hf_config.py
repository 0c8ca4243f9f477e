"""Reading the fields of a Hugging Face config, with errors that say which one is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.plugins import ModelConfig, ModelError, RequestError, SamplingParams

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ConfigFields:
    """A config's fields. A field that is null counts as absent, as it does for transformers."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the file or model in messages."""
        self._values = values
        self._source = source

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1.

        Raises:
            ModelError: if it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"expected a whole number >= 1, got {value!r}")
        return value

    def optional_whole(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None where the field is absent."""
        return None if self._values.get(name) is None else self.whole(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0.

        Raises:
            ModelError: if it is something else, or absent without a default.
        """
        return self.positive(name, self._get(name, default))

    def positive(self, name: str, value: Any) -> float:
        """Return a value that `name` was found to have, as a number above 0.

        Raises:
            ModelError: if it is something else.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, f"expected a number > 0, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ModelError: if it is neither.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, got {value!r}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Return a table; an empty one where the field is absent.

        Raises:
            ModelError: if it is no table.
        """
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, f"expected a table, got {value!r}")
        return dict(value)

    def error(self, name: str, words: str) -> ModelError:
        """Return an error about a field."""
        return ModelError(f"{self._source}: {name}: {words}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing, and it has no default")
        return value


def model_config(
    hf: Mapping[str, Any],
    source: str,
    *,
    eos_token_ids: Sequence[int],
    dtype: str | None,
    sampling: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face config.

    Args:
        hf: the config's fields.
        source: names the file in messages.
        eos_token_ids: end-of-sequence tokens.
        dtype: of the weights on disk; None if mixed or unknown.
        sampling: fields of SamplingParams that the model's files recommend.

    Raises:
        ModelError: if `architectures`, `vocab_size` or `max_position_embeddings` is wrong.
    """
    fields = ConfigFields(hf, source)
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise fields.error(
            "architectures",
            f'expected a list such as ["LlamaForCausalLM"], got {architectures!r}',
        )
    if not isinstance(architectures[0], str):
        raise fields.error("architectures[0]", f"expected a string, got {architectures[0]!r}")
    return ModelConfig(
        architecture=architectures[0],
        hf=dict(hf),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        eos_token_ids=tuple(eos_token_ids),
        dtype=dtype,
        default_sampling=sampling or {},
    )


def default_sampling(generation: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return what a generation_config.json recommends of what SamplingParams has, checked.

    Raises:
        ModelError: if a value is none that a request may ask for.
    """
    given = {name: generation.get(name) for name in _RECOMMENDED}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        params = SamplingParams(**fields).checked()
    except RequestError as error:
        raise ModelError(f"{source}: {error}") from None
    return {name: getattr(params, name) for name in fields}


def token_ids(value: Any, name: str, source: str) -> tuple[int, ...]:
    """Return token ids from a field that may be absent, one id or a list of ids.

    Raises:
        ModelError: if it is something else.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{source}: {name}: expected a token id or a list of them, got {value!r}")
    return tuple(ids)
