"""Checked access to the fields of Hugging Face configs, for models and loaders."""

from __future__ import annotations

import importlib.util
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hardpoint.errors import ModelError, RequestError
from hardpoint.plugins import ModelConfig
from hardpoint.plugins.params import SamplingParams

__all__ = [
    "LARGEST_FLOAT",
    "ConfigFields",
    "architecture",
    "default_sampling",
    "model_config",
    "short",
    "token_ids",
]

_LARGEST = 2**31 - 1
LARGEST_FLOAT = 3e38
"""Of float32, in which models compute."""
_SHORT = reprlib.Repr()
vars(_SHORT).update(maxstring=200, maxother=200, maxlong=200)

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def short(value: Any) -> str:
    """Return the text of a value for a message; a long or deep value is cut."""
    return _SHORT.repr(value)


class ConfigFields:
    """The fields of a config; a null field counts as missing, as in transformers."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the file or model in error messages."""
        self._values = values
        self._source = source

    def whole(
        self, name: str, default: int | None = None, at_most: int = _LARGEST, at_least: int = 1
    ) -> int:
        """Return a field that is a whole number.

        Raises:
            ModelError: it is not one, is too small or too large, or is missing and there is no
                default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.error(name, f"expected a whole number >= {at_least}, got {short(value)}")
        if value > at_most:
            raise self.error(name, f"expected at most {at_most}, got {short(value)}")
        return value

    def optional_whole(self, name: str) -> int | None:
        """Return a field that is a whole number of at least 1; None if it is missing."""
        return None if self._values.get(name) is None else self.whole(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a field that is a number above 0.

        Raises:
            ModelError: it is not one, or is missing and there is no default.
        """
        return self.positive(name, self._get(name, default))

    def positive(self, name: str, value: Any) -> float:
        """Return a value of the field `name` as a number above 0.

        Raises:
            ModelError: it is not one.
        """
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= LARGEST_FLOAT:
            raise self.error(name, f"expected a number > 0, got {short(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false.

        Raises:
            ModelError: it is neither.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, got {short(value)}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Return a field that is a table; an empty one if it is missing.

        Raises:
            ModelError: it is not a table.
        """
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, f"expected a table, got {short(value)}")
        return dict(value)

    def rope_parameters(self) -> dict[str, Any]:
        """Return the RoPE parameters: `rope_scaling`, else `rope_parameters`, as transformers does.

        Raises:
            ModelError: they are not a table.
        """
        return self.table("rope_scaling") or self.table("rope_parameters")

    def error(self, name: str, message: str) -> ModelError:
        """Return an error about a field."""
        return ModelError(f"{self._source}: {name}: {message}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing, and it has no default")
        return value


def architecture(hf: Mapping[str, Any], source: str) -> str:
    """Return the first name in a Hugging Face config's `architectures`.

    Args:
        hf: the config's fields.
        source: names the file in error messages.

    Raises:
        ModelError: there is none.
    """
    fields = ConfigFields(hf, source)
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise fields.error(
            "architectures",
            f'expected a list such as ["LlamaForCausalLM"], got {short(architectures)}',
        )
    if not isinstance(architectures[0], str):
        raise fields.error("architectures[0]", f"expected a string, got {short(architectures[0])}")
    return architectures[0]


_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "max_seq_len"),
    *("model_max_length", "max_target_positions", "seq_length", "max_seq_length", "context_length"),
)
"""Names of the longest context."""

_UNLIMITED = 1 << 20
"""Longest context of models that have none: biases by distance and states end nowhere."""

_FULL = "full_attention"
_STATES_EXTENDED = "gemma3"
"""In the type of models with a config that states the context extended by `rope_scaling`."""

_PADDED_POSITIONS = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Types of models with positions that begin after the padding position."""


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
        hf: the config's fields; the result has the fields of a `text_config` among them.
        source: names the file in error messages.
        eos_token_ids: end-of-sequence tokens.
        dtype: dtype of the weights on disk; None if mixed or unknown.
        sampling: recommended values of fields of SamplingParams.

    Raises:
        ModelError: `architectures`, `vocab_size` or the longest context is invalid.
    """
    text = hf.get("text_config")
    hf = {**text, **hf} if isinstance(text, Mapping) else hf
    hf = {**hf, **_left_out(hf, text if isinstance(text, Mapping) else hf)}
    fields = ConfigFields(hf, source)
    length = next((name for name in _LENGTHS if hf.get(name) is not None), _LENGTHS[0])
    is_known = importlib.util.find_spec("transformers") is not None  # has the defaults
    positions = fields.whole(length, _UNLIMITED if is_known else None)
    if hf.get("model_type") in _PADDED_POSITIONS:
        positions -= fields.whole("pad_token_id", 1, at_least=0) + 1
    return ModelConfig(
        architecture=architecture(hf, source),
        hf=dict(hf),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=_extended(hf, positions),
        eos_token_ids=tuple(eos_token_ids),
        dtype=dtype,
        default_sampling=sampling or {},
    )


def _extended(hf: Mapping[str, Any], positions: int) -> int:
    """Return the maximum context length after RoPE scaling.

    Parameters that are wrong extend nothing here: the model rejects them.
    """
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope.get(_FULL, rope) if isinstance(rope, Mapping) else {}
    if not isinstance(rope, Mapping) or _STATES_EXTENDED in str(hf.get("model_type")):
        return positions
    kind, factor = rope.get("rope_type") or rope.get("type"), cast("Any", rope.get("factor"))
    is_scaled = kind == "linear" or (kind == "yarn" and "long_factor" not in rope)
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not (is_scaled and is_number and 1 < factor <= LARGEST_FLOAT):
        return positions
    stated = (table.get("original_max_position_embeddings") for table in (hf, rope))
    original = next((value for value in stated if type(value) is int), positions)
    return max(positions, min(int((original if kind == "yarn" else positions) * factor), _LARGEST))


def _left_out(hf: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a config omits: the defaults of the config class in transformers."""
    has_length = any(hf.get(name) is not None for name in _LENGTHS)
    if has_length and hf.get("vocab_size") is not None:
        return {}
    try:
        from transformers import CONFIG_MAPPING  # noqa: PLC0415 - rare, and takes a second

        usual = CONFIG_MAPPING[text.get("model_type")]()
    except Exception:  # there is none of that type, it has fields without defaults, or no library
        return {}
    lengths = () if has_length else (name for name in _LENGTHS if hasattr(usual, name))
    names = [*[*lengths][:1], "vocab_size"]
    sizes = {name: getattr(usual, name, None) for name in names if hf.get(name) is None}
    return {name: value for name, value in sizes.items() if isinstance(value, int) and value > 0}


def default_sampling(generation: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of SamplingParams that a generation_config.json sets, checked.

    Raises:
        ModelError: a value is not valid for a request.
    """
    values = {name: generation.get(name) for name in _RECOMMENDED}
    fields: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    try:
        params = SamplingParams(**fields).checked()
    except RequestError as error:
        raise ModelError(f"{source}: {error}") from None
    return {name: getattr(params, name) for name in fields}


def token_ids(value: Any, name: str, source: str) -> tuple[int, ...]:
    """Return the token ids of a field that is one id, a list of ids or missing (None).

    Raises:
        ModelError: it is something else.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _LARGEST for i in ids):
        raise ModelError(
            f"{source}: {name}: expected a token id or a list of them, got {short(value)}"
        )
    return tuple(ids)
