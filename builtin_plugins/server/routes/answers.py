"""Parts of answers that several families share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.errors import AnswerError, answer_error, for_clients
from hardpoint.builtin_plugins.server.operations.traffic import count_tokens_of
from hardpoint.plugins import CompletionOutput, Logprob, RequestError, RequestOutput, Tokenizer


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens, those that were cached."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Of the completion's tokens, those of the reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class UsageCount:
    """Counts the tokens of a request as its outputs come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start at zero."""
        self._tokenizer = tokenizer
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self._prompts: dict[int, tuple[int, int]] = {}
        self._reasoning: list[str] = []
        count_tokens_of(self)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(tokens for tokens, _ in self._prompts.values())

    def add(self, output: RequestOutput, prompt: int = 0) -> None:
        """Count an output that holds what is new, of one of several prompts."""
        cached = output.num_cached_tokens
        before = self._prompts.get(prompt, (0, 0))[1]
        self._prompts[prompt] = len(output.prompt_token_ids), before if cached is None else cached
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)
            if completion.reasoning:
                self._reasoning.append(completion.reasoning)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)

    def usage(self, *, whole: bool = True) -> Usage:
        """Return the counts.

        Args:
            whole: with details, which are counted at the end alone.
        """
        prompt = self.prompt_tokens
        usage = Usage(prompt, self.completion_tokens, prompt + self.completion_tokens)
        if whole:
            cached = sum(cached for _, cached in self._prompts.values())
            usage.prompt_tokens_details = PromptDetails(cached)
            if self._reasoning:
                ids = self._tokenizer.encode("".join(self._reasoning), add_special_tokens=False)
                usage.completion_tokens_details = CompletionDetails(len(ids))
        return usage


def check_ended(completion: CompletionOutput) -> None:
    """Raise the error of a completion that ended with one.

    Raises:
        AnswerError: it names the plugin or the model, or the grammar that is wrong.
    """
    if completion.finish_reason != "error":
        return
    message = completion.error or "the engine gave no reason"
    if message.startswith("structured."):  # a grammar is compiled while the request waits
        raise answer_error(RequestError(message))
    raise AnswerError(
        500,
        for_clients(message),
        kind="generation_error",
        headers={"x-should-retry": "false"},
    )


class WhiteSpace:
    """Holds back white space that is no text: between reasoning and calls, for example."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._held = ""

    def text_of(self, completion: CompletionOutput, *, is_open: bool) -> str:
        """Return the new text of a completion, after what was held back.

        Args:
            is_open: whether there is text before it, without anything between them.
        """
        text = self._held + (completion.content or "")
        self._held = ""
        if text.isspace() and not is_open:
            self._held, text = text, ""
        return text

    def rest(self, *, has_calls: bool) -> str:
        """Return at the end what is still held back: the text of an answer without calls."""
        return "" if has_calls else self._held


def whole_text(completion: CompletionOutput) -> str:
    """Return the text of a whole completion; white space next to calls is none."""
    text = completion.content or ""
    return "" if text.isspace() and completion.tool_calls else text


def new_id(prefix: str, asked: str | None = None) -> str:
    """Return the id of an answer: what the request asks for, or a random one."""
    return f"{prefix}{asked or secrets.token_hex(12)}"


def token_text(logprob: Logprob, token: int) -> str:
    """Return the text of a token in log-probabilities."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def prompt_positions(output: RequestOutput) -> list[Mapping[int, Logprob] | None]:
    """Return the log-probabilities of a prompt's positions; empty if the output has none.

    Where outputs of several completions were merged, each has brought its own.
    """
    return (output.prompt_logprobs or [])[: len(output.prompt_token_ids)]


def prompt_logprobs(output: RequestOutput) -> list[Any] | None:
    """Return the log-probabilities of a prompt: by position, token id to its logprob."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): msgspec.structs.replace(logprob, logprob=finite(logprob.logprob))
            for token, logprob in position.items()
        }
        for position in prompt_positions(output)
    ]


def likeliest(
    position: Mapping[int, Logprob], count: int, chosen: int
) -> Sequence[tuple[int, Logprob]]:
    """Return the `count` likeliest tokens of a position, and the chosen one if it is none of them.

    Args:
        chosen: the position's own token.
    """
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    kept = ranked[:count]
    if all(token != chosen for token, _ in kept):
        kept.append((chosen, position[chosen]))
    return kept


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can hold it: OpenAI's -9999 for an impossible one."""
    return max(logprob, -9999.0)
