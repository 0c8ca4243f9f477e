"""Tokenizers from the models of SentencePiece, which are messages of Protocol Buffers.

Only the fields that describe how text becomes tokens are read
(https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hardpoint.plugins import ModelError

__all__ = [
    "SentencePieceModel",
    "build_sentencepiece",
    "marked_spaces",
    "read_model",
    "space_decoder",
]

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_MARK = "\u2581"
_MOST_PIECES = 1 << 22
_LONGEST = 1024  # characters of a piece: each of them is a place where it may be cut


@dataclass
class SentencePieceModel:
    """The content of a model.

    Attributes:
        pieces: text, score and type of each token, by id.
        kind: 1 for unigram, 2 for BPE.
        unknown: id of the token for unknown characters.
        bos: id of the token at the beginning; negative without one. `eos` is that at the end.
        byte_fallback: whether an unknown character becomes its bytes.
        charsmap: how characters are replaced first; empty leaves them as they are.
        adds_prefix: whether a text begins with a space.
        joins_spaces: whether several spaces become one, and spaces at the ends none.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = _UNIGRAM
    unknown: int = 0
    bos: int = 1
    eos: int = 2
    byte_fallback: bool = False
    charsmap: bytes = b""
    adds_prefix: bool = True
    joins_spaces: bool = True


def read_model(data: bytes, where: str) -> SentencePieceModel:
    """Read a model.

    Args:
        data: content of the file.
        where: its name, for errors.

    Raises:
        ModelError: it is damaged, or of a kind that is not supported.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                _read_trainer(model, dict(_fields(value)), where)
            elif number == 3:
                _read_normalizer(model, dict(_fields(value)), where)
    except (ValueError, TypeError, struct.error) as cause:
        raise ModelError(f"{where}: expected a model of SentencePiece: {cause}") from cause
    if not 0 <= model.unknown < len(model.pieces) <= _MOST_PIECES:
        raise ModelError(
            f"{where}: expected up to {_MOST_PIECES} pieces, one of them for unknown text, got "
            f"{len(model.pieces)} and the id {model.unknown}"
        )
    if (longest := max(len(text) for text, _, _ in model.pieces)) > _LONGEST:
        raise ModelError(
            f"{where}: expected pieces of at most {_LONGEST} characters, got {longest}"
        )
    return model


def _piece(value: Any) -> tuple[str, float, int]:
    fields = dict(_fields(value))
    (score,) = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))
    return fields.get(1, b"").decode(), score, fields.get(3, _NORMAL)


def _read_trainer(model: SentencePieceModel, fields: Mapping[int, Any], where: str) -> None:
    model.kind = fields.get(3, _UNIGRAM)
    if model.kind not in (_UNIGRAM, _BPE):
        raise ModelError(f"{where}: model_type: expected 1 (unigram) or 2 (BPE), got {model.kind}")
    if fields.get(24):
        raise ModelError(
            f"{where}: treat_whitespace_as_suffix: expected false, got true; add the model's "
            f"tokenizer.json"
        )
    model.byte_fallback = bool(fields.get(35))
    model.unknown = _signed(fields.get(40, 0))
    model.bos, model.eos = _signed(fields.get(41, 1)), _signed(fields.get(42, 2))


def _read_normalizer(model: SentencePieceModel, fields: Mapping[int, Any], where: str) -> None:
    model.charsmap = fields.get(2, b"")
    model.adds_prefix, model.joins_spaces = bool(fields.get(3, 1)), bool(fields.get(4, 1))
    if not fields.get(5, 1):
        raise ModelError(
            f"{where}: escape_whitespaces: expected true, got false; add the model's tokenizer.json"
        )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message: an integer, or bytes."""
    if not isinstance(data, bytes):
        raise ValueError(f"a field is {data!r}, and no message")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value: Any
            value, at = _varint(data, at)
            yield number, value
            continue
        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if not number or not 0 <= size <= len(data) - at:
            raise ValueError(f"at byte {at}, there is no field of {size} bytes")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise ValueError(f"at byte {at}, a number has no end")


def build_sentencepiece(
    model: SentencePieceModel, *, prefix_everywhere: bool, where: str
) -> Tokenizer:
    """Build the tokenizer of a model; it adds no tokens around texts.

    Args:
        prefix_everywhere: whether text behind a special token gets the space at the beginning of
            texts, too.
        where: name of its file, for errors.

    Raises:
        ModelError: the library refuses it.
    """
    try:
        tokenizer = Tokenizer(_unigram(model) if model.kind == _UNIGRAM else _bpe(model))
        steps = _normalizers(model)
    except Exception as cause:  # the library raises nothing narrower
        raise ModelError(f"{where}: {str(cause)[:400]}") from cause
    if model.adds_prefix and not prefix_everywhere:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_MARK, prepend_scheme="first", split=False
        )
    else:
        steps += marked_spaces(adds_prefix=model.adds_prefix)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = space_decoder(adds_prefix=model.adds_prefix)
    special = {_UNKNOWN, _CONTROL}
    added = [
        AddedToken(text, normalized=False, special=kind in special)
        for text, _, kind in model.pieces
        if kind in {*special, _USER_DEFINED}
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    return tokenizer


def marked_spaces(*, adds_prefix: bool) -> list[Any]:
    """Return the normalizers that write spaces as marks, and one before each text if wanted."""
    prefix = [normalizers.Prepend(_MARK)] if adds_prefix else []
    return [*prefix, normalizers.Replace(" ", _MARK)]


def space_decoder(*, adds_prefix: bool) -> Any:
    """Return the decoder of marks and bytes, which removes the first space if one was added."""
    strip = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
    return decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _normalizers(model: SentencePieceModel) -> list[Any]:
    parts: list[Any] = []
    if model.charsmap:
        parts.append(normalizers.Precompiled(model.charsmap))
    if model.joins_spaces:
        parts += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return parts


def _unigram(model: SentencePieceModel) -> models.Unigram:
    lowest = min(score for _, score, _ in model.pieces) - 1e6
    vocab = [(text, lowest if kind == _UNUSED else score) for text, score, kind in model.pieces]
    return models.Unigram(vocab, unk_id=model.unknown, byte_fallback=model.byte_fallback)


def _bpe(model: SentencePieceModel) -> models.BPE:
    ids = {text: index for index, (text, _, _) in enumerate(model.pieces)}
    merges: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in model.pieces:
        if kind != _NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    return models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in sorted(merges)],
        unk_token=model.pieces[model.unknown][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )
