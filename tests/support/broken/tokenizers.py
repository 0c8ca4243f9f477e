"""Tokenizers with one typical mistake each."""

from __future__ import annotations

import itertools

from hardpoint import RequestError
from hardpoint.plugins import Tokenizer
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.text.tokenizer import EncodedPair
from support.samples import Sample, spend

EOS = 256
BYTES = [bytes([byte]) for byte in range(256)]


class ByteStream:
    def __init__(self, skip):
        self.skip, self.held = skip, b""

    def step(self, token):
        if token >= EOS:
            return "" if self.skip or token > EOS else self.flush() + "<eos>"
        self.held += bytes([token])
        try:
            text = self.held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return None
            text = self.held.decode(errors="replace")
        self.held = b""
        return text

    def flush(self):
        text, self.held = self.held.decode(errors="replace"), b""
        return text


class Bytes(Sample, Tokenizer, contract=1):
    """Correct: one token per byte, and one for the end of a text."""

    vocab_size = 257
    eos_token_ids = (EOS,)

    def vocabulary(self):
        return Vocabulary(tokens=(*BYTES, b"<eos>"), special=(EOS,))

    def encode(self, text, *, add_special_tokens=True):
        return [*text.encode()]

    def decode(self, token_ids, *, skip_special_tokens=True):
        stream = ByteStream(skip_special_tokens)
        return "".join(stream.step(token) or "" for token in token_ids) + stream.flush()

    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        stream = ByteStream(skip_special_tokens)
        for token in prompt_token_ids[-4:]:
            stream.step(token)
        return stream

    def apply_chat_template(self, messages, *, add_generation_prompt=True, template=None):
        try:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        except (TypeError, LookupError) as cause:
            raise RequestError(f"messages: expected role and content: {cause}") from cause
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


class WithoutContract(Bytes, contract=None):
    """States no contract of its own."""


class SmallVocabulary(Bytes):
    vocab_size = 100


class OneTooFew(Bytes):
    vocab_size = 256
    eos_token_ids = ()

    def encode(self, text, **options):
        parts = text.split("<eos>")
        return [*itertools.chain(*([*part.encode(), EOS] for part in parts))][:-1]


class LargeVocabulary(Bytes):
    vocab_size = 32_000


class ShiftsIds(Bytes):
    def encode(self, text, **options):
        return [token + 300 for token in super().encode(text)]

    def decode(self, token_ids, **options):
        ids = [token - 300 if token >= 300 else token for token in token_ids]
        return super().decode(ids, **options)


class ReturnsBytes(Bytes):
    def encode(self, text, **options):
        return text.encode()


class CharactersAsBytes(Bytes):
    """Its vocabulary has the UTF-8 of characters that stand for bytes."""

    def vocabulary(self):
        tokens = [chr(byte).encode() for byte in range(256)]
        return Vocabulary(tokens=(*tokens, b"<eos>"), special=(EOS,))


class ReversesBytes(Bytes):
    """Its vocabulary reverses the bytes of longer characters."""

    def vocabulary(self):
        return Vocabulary(tokens=(*BYTES[:128], *BYTES[:127:-1], b"<eos>"), special=(EOS,))


class PaddedVocabulary(Bytes):
    def vocabulary(self):
        return Vocabulary(tokens=(*BYTES, b"<eos>", *[b""] * 63), special=(EOS,))


class NothingIsSpecial(OneTooFew):
    vocab_size = 257
    special_tokens = {"<eos>": EOS}

    def vocabulary(self):
        return Vocabulary(tokens=(*BYTES, b"<eos>"))


class TextIsSpecial(Bytes):
    def vocabulary(self):
        return Vocabulary(tokens=(*BYTES, b"<eos>"), special=(60, EOS))


class Ascii(Bytes):
    def encode(self, text, **options):
        return [*text.encode("ascii", "ignore")]


class Strips(Bytes):
    def decode(self, token_ids, **options):
        return super().decode(token_ids, **options).strip()


class TokenByToken(Bytes):
    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        return Stateless(self, skip_special_tokens)


class Stateless:
    def __init__(self, tokenizer, skip):
        self.tokenizer, self.skip = tokenizer, skip

    def step(self, token):
        return self.tokenizer.decode([token], skip_special_tokens=self.skip)


class IgnoresThePrompt(Bytes):
    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        return ByteStream(skip_special_tokens)


class ShowsSpecials(Bytes):
    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        return super().decode_stream(prompt_token_ids, skip_special_tokens=False)


class HidesSpecials(Bytes):
    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        return super().decode_stream(prompt_token_ids)


class RepeatsThePrompt(Bytes):
    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        stream = ByteStream(skip_special_tokens)
        stream.held = bytes(token for token in prompt_token_ids[-4:] if token < EOS)
        return stream


class OneStream(Bytes):
    def decode_stream(self, prompt_token_ids, **options):
        self.stream = super().decode_stream(prompt_token_ids, **options)
        return self

    def step(self, token):
        return self.stream.step(token)


class RaisesForUnknown(Bytes):
    def decode(self, token_ids, **options):
        return super().decode([[*range(257)][token] for token in token_ids], **options)


class ShowsUnknown(Bytes):
    def decode(self, token_ids, **options):
        return super().decode([token % 257 for token in token_ids], **options)


class Random(Bytes):
    turns = itertools.count()

    def decode(self, token_ids, **options):
        return super().decode(token_ids, **options) + " " * (next(self.turns) % 2)


class Buffered(Bytes):
    """Gathers tokens in an attribute."""

    def encode(self, text, **options):
        self.ids = []
        for byte in text.encode():
            self.ids.append(byte)
        return self.ids


class RaisesForChat(Bytes):
    def apply_chat_template(self, messages, **options):
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class ReturnsIdsForChat(Bytes):
    def apply_chat_template(self, messages, **options):
        return [1, 2]


class EndsAtNewlines(Bytes):
    eos_token_ids = (10,)


class EndsBeyond(Bytes):
    eos_token_ids = (300,)


class NamesText(Bytes):
    """Its special tokens are ordinary text."""

    special_tokens = {"<think>": 60}


class ClearsIds(Bytes):
    def decode(self, token_ids, **options):
        text = super().decode(token_ids, **options)
        token_ids.clear()
        return text


class FillsMessages(Bytes):
    def apply_chat_template(self, messages, **options):
        for message in messages:
            if isinstance(message, dict):
                message.setdefault("name", "someone")
        return super().apply_chat_template(messages, **options)


class Remembers(Bytes):
    def __init__(self, context):
        super().__init__(context)
        self.known = {}

    def encode(self, text, **options):
        self.known[text] = super().encode(text)
        return [*self.known[text]]


class DecodesAllAgain(Bytes):
    def decode_stream(self, prompt_token_ids, **options):
        return Quadratic(super().decode_stream(prompt_token_ids, **options))


class Quadratic:
    def __init__(self, stream):
        self.stream, self.count = stream, 0

    def step(self, token):
        self.count += 1
        spend(1e-6 * self.count)
        return self.stream.step(token)


class JoinsPairs(Bytes):
    """It gives all tokens to the first text."""

    def encode_pair(self, first, second):
        ids = self.encode(first + second)
        return EncodedPair(ids, range(len(ids)), range(len(ids), len(ids)), len(ids))


class PairsAsLists(Bytes):
    def encode_pair(self, first, second):
        return [*self.encode(first), *self.encode(second)]
