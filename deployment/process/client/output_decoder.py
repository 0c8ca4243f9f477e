"""Decoder of an engine's outputs that reports the fields that few outputs have.

Nearly every output has a request id and one new token, and nothing else. Testing the other fields
of each output takes longer than decoding them, so the decoder notes the rare fields that it meets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from hardpoint.host.system.encoding import Buffer, Decoder
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, FinishReason
from hardpoint.process.protocol import UtilityOutput

_LOGPROBS = ("logprobs", "prompt_logprobs", "observed_logprobs")
"""Not rare, because they are long: converting them takes several times as long as decoding."""

RARE_FIELDS = {
    field.name: field.default
    for field in msgspec.structs.fields(EngineCoreOutput)
    if field.name not in ("request_id", "new_token_ids", *_LOGPROBS)
}
"""Defaults of the fields that few outputs have and that the decoder reports."""


class RareField(type):
    """Type of a rare field: unknown to msgspec, so that the decoder converts each value.

    Attributes:
        holder: struct whose only field, `value`, has the type of the field of `EngineCoreOutput`:
            msgspec reads the types of a struct once, and those of a call of `convert` each time.
        numbers: returns what some numbers stand for, None for others. The first and the last output
            of a request have such fields, and a conversion takes as long as the check of 30 tokens.
    """

    holder: type[msgspec.Struct]
    numbers: Callable[[int], Any]

    def __instancecheck__(cls, _value: object) -> bool:
        """Accept every value: the decoder has converted it."""
        return True


class OutputDecoder(Decoder[EngineCoreOutputs | UtilityOutput]):
    """Decodes the messages of one engine; accepts token ids of its vocabulary.

    Attributes:
        rare_fields: names of the rare fields that an output of the last message has.
    """

    def __init__(self, vocab_size: int) -> None:
        """Prepare the types of messages with token ids below `vocab_size`."""
        self.rare_fields: set[str] = set()
        super().__init__(_message_type(vocab_size))

    def decode(self, frames: Buffer | Sequence[Buffer]) -> EngineCoreOutputs | UtilityOutput:
        """Return the message of a frame or of a list of frames, the main one first.

        Raises:
            WireError: it is malformed or not of the type.
        """
        self.rare_fields = set()
        return super().decode(frames)

    def convert(self, type_: Any, value: Any) -> Any:
        """Convert the value of a rare field, and note the field."""
        if type(type_) is not RareField:
            return super().convert(type_, value)
        self.rare_fields.add(type_.__name__)
        if type(value) is int and (number := type_.numbers(value)) is not None:
            return number
        try:
            holder: Any = msgspec.convert({"value": value}, type_.holder, dec_hook=super().convert)
        except msgspec.ValidationError as cause:
            text, _, _ = str(cause).partition(" - at ")  # msgspec adds the path of the field
            raise ValueError(text) from None
        return holder.value


def _no_number(_value: int) -> None:
    """Convert no number: the type of the field decides."""


_NUMBERS: Mapping[str, Callable[[int], Any]] = {
    "finish_reason": {int(reason): reason for reason in FinishReason}.get,
    "num_cached_tokens": int,
    "stop_reason": int,
}
"""Conversions of numbers in fields of ordinary outputs."""


@functools.lru_cache(maxsize=8)
def _message_type(vocab_size: int) -> Any:
    """Return the type of messages with token ids below `vocab_size`."""
    hints = get_type_hints(EngineCoreOutput, include_extras=True)
    token_ids = list[Annotated[int, Meta(ge=0, lt=vocab_size)]]
    fields: list[tuple[str, Any, Any]] = [("new_token_ids", token_ids, [])]
    for name, default in RARE_FIELDS.items():
        holder = msgspec.defstruct(name, [("value", hints[name])])
        known = {"holder": holder, "numbers": _NUMBERS.get(name, _no_number)}
        fields.append((name, RareField(name, (), known), default))
    output: Any = msgspec.defstruct(
        "EngineCoreOutput",
        fields,
        bases=(EngineCoreOutput,),
        namespace={"__eq__": _is_equal},
        omit_defaults=True,
        kw_only=True,
        gc=False,
    )
    message: Any = msgspec.defstruct(
        "EngineCoreOutputs",
        [("outputs", list[output], [])],
        bases=(EngineCoreOutputs,),
        namespace={"__eq__": _is_equal},
        omit_defaults=True,
        kw_only=True,
        tag="EngineCoreOutputs",
        gc=False,
    )
    return message | UtilityOutput


def _is_equal(struct: msgspec.Struct, other: object) -> Any:
    """Compare a decoded struct with another, which may be an instance of its contract class."""
    if not isinstance(other, msgspec.Struct) or not isinstance(other, type(struct).__base__ or ()):
        return NotImplemented
    return msgspec.structs.astuple(struct) == msgspec.structs.astuple(other)
