"""Published patterns with which byte-level tokenizers split a text before byte merges.

Patterns come from the models' tokenizer.json files and from tiktoken; names are llama.cpp's
(`tokenizer.ggml.pre`, in src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, pre_tokenizers


class Split(NamedTuple):
    """Cuts of a text before its bytes are merged.

    Attributes:
        patterns: each splits the rest of the earlier ones.
        is_gpt2: whether the parts are split as GPT-2 does.
        cuts_digits: whether each digit is a part.
        composes: whether characters are composed first (NFC).
        keeps_tokens: whether a part that is a token stays whole, whatever the merges are.
        begins: whether a text begins with a token of its own, where a GGUF file leaves that out.
    """

    patterns: tuple[str, ...] = ()
    is_gpt2: bool = False
    cuts_digits: bool = False
    composes: bool = False
    keeps_tokens: bool = False
    begins: bool = False

    def pre_tokenizer(self) -> Any:
        """Return it for the library."""
        parts: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        if self.cuts_digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.is_gpt2))
        return pre_tokenizers.Sequence(parts)


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|{_SPACES}"
)
_ONE_DIGIT = _THREE_DIGITS.replace(r"\p{N}{1,3}", r"\p{N}")
_MARKS = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


def _cased(others: str, numbers: str, after: str, short: str) -> str:
    """Return a pattern that cuts before upper case letters.

    Args:
        others: letters that are cut off.
        numbers: pattern of numbers.
        after: pattern behind other characters, besides ends of lines.
        short: pattern behind letters, such as 's.
    """
    both = rf"\p{{Lm}}\p{{Lo}}\p{{M}}{others}]"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{both}", rf"[\p{{Ll}}{both}"
    parts = [rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{n}{lower}{m}{short}" for n, m in ("*+", "+*")]
    return "|".join([*parts, numbers, rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{after}]*", _SPACES])


_O200K = _cased("", r"\p{N}{1,3}", "/", f"{_SHORT}?")
_TEKKEN = _cased("", r"\p{N}", "/", "")
_KIMI = r"[\p{Han}]+|" + _cased(r"&&[^\p{Han}]", r"\p{N}{1,3}", "", f"{_SHORT}?")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001 - these are meant
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
)

LLAMA3 = Split((_THREE_DIGITS,), keeps_tokens=True, begins=True)
QWEN2 = Split((_ONE_DIGIT,), composes=True)
KIMI = Split((_KIMI,))
GLM4 = Split((_THREE_DIGITS,))
_GPT2 = Split(is_gpt2=True)
_DIGITS = Split(is_gpt2=True, cuts_digits=True)

SPLITS: Mapping[str, Split] = {
    "chatglm-bpe": GLM4,
    "command-r": _DIGITS,
    "dbrx": Split((_THREE_DIGITS,)),
    "deepseek-llm": Split(_DEEPSEEK, cuts_digits=True),
    "deepseek-r1-qwen": QWEN2,
    "deepseek-v3": Split(_DEEPSEEK_3),
    "default": _GPT2,
    "glm4": GLM4,
    "gpt-2": _GPT2,
    "gpt-4o": Split((_O200K,)),
    "kimi-k2": KIMI,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "olmo": _GPT2,
    "qwen2": QWEN2,
    "qwen35": Split((_MARKS,), composes=True),
    "refact": _DIGITS,
    "smaug-bpe": Split((_THREE_DIGITS,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": Split((_TEKKEN,), keeps_tokens=True, begins=True),
}
"""By `tokenizer.ggml.pre`."""
