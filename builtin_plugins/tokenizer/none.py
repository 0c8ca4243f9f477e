"""No tokenizer: prompts are token ids, and so are outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hardpoint.plugins import (
    RequestError,
    Tokenizer,
)

if TYPE_CHECKING:
    from hardpoint.plugins.text.tokenizer import DecodeStream

_WHY = 'for the engine has no tokenizer (tokenizer.use = "none")'

_CHECKS_WITH_TEXT = (
    *("test_vocabulary", "test_round_trip", "test_stream", "test_streams_apart"),
    *("test_deterministic", "test_threads", "test_reads_only", "test_memory", "test_speed"),
    *("test_resources", "test_close"),
)


class NoTokenizer(Tokenizer):
    """Of engines without a tokenizer, which read none of its files.

    Prompts of token ids run, and give vectors, or token ids with `detokenize=False`. Features that
    need texts are rejected.
    """

    contract = 1
    expected_failures = dict.fromkeys(_CHECKS_WITH_TEXT, "it refuses all texts")

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """None but the model's own."""
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NoReturn:  # noqa: ARG002
        """Refuse a text.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"prompt: expected token ids, {_WHY}, got a text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        """Return no text, as for tokens in log-probabilities."""
        return ""

    def decode_stream(
        self,
        prompt_token_ids: Sequence[int],  # noqa: ARG002
        *,
        skip_special_tokens: bool = True,  # noqa: ARG002
    ) -> DecodeStream:
        """Refuse a request that wants text.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"detokenize: expected false, {_WHY}, got true")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],  # noqa: ARG002
        *,
        add_generation_prompt: bool = True,  # noqa: ARG002
        template: str | None = None,  # noqa: ARG002
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002
        continue_final_message: bool = False,  # noqa: ARG002
        variables: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> NoReturn:
        """Refuse a conversation.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"messages: expected a prompt of token ids, {_WHY}")
