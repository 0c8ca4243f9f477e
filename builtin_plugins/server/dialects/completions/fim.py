"""Fill-in-the-middle prompts for `suffix`, of tokenizers that have the tokens for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hardpoint.plugins import RequestError


@dataclass(frozen=True)
class _Format:
    """The order of the parts of a fill-in-the-middle prompt.

    Attributes:
        before_first, before_second, last: tokens before the first and the second text, and at the
            end; an empty `last` is no token.
        is_suffix_first: whether the first text is the suffix.
    """

    before_first: str
    before_second: str
    last: str = ""
    is_suffix_first: bool = False

    @property
    def tokens(self) -> list[str]:
        """The texts of the tokens."""
        return [text for text in (self.before_first, self.before_second, self.last) if text]


_FORMATS = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Format("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Format("[SUFFIX]", "[PREFIX]", is_suffix_first=True),  # Codestral
)


@dataclass(frozen=True)
class FillInFormat:
    """The fill-in-the-middle format of a tokenizer, by its token ids."""

    before_first: int
    before_second: int
    last: int | None
    is_suffix_first: bool

    @classmethod
    def of_tokenizer(cls, special_tokens: Mapping[str, int]) -> FillInFormat:
        """Return the format of a tokenizer.

        Args:
            special_tokens: ids of its special tokens, by their texts.

        Raises:
            RequestError: it has no tokens of a known format.
        """
        for known in _FORMATS:
            if all(token in special_tokens for token in known.tokens):
                first, second, *last = (special_tokens[token] for token in known.tokens)
                return cls(first, second, last[0] if last else None, known.is_suffix_first)
        examples = ", ".join(_FORMATS[0].tokens)
        raise RequestError(
            "suffix: not supported: the tokenizer of this model has no tokens to fill in the "
            f"middle, such as {examples}"
        )

    def prompt(
        self, start: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            start: tokens at the beginning of each prompt.
            prefix: tokens of the text before the gap.
            suffix: tokens of the text after the gap.
        """
        first, second = (suffix, prefix) if self.is_suffix_first else (prefix, suffix)
        last = [] if self.last is None else [self.last]
        return [*start, self.before_first, *first, self.before_second, *second, *last]
