"""Completions: assembled from the outputs of a request, and as JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from hardpoint.builtin_plugins.server.batches.text_lines import line_of
from hardpoint.plugins import CompletionOutput, Logprob, RequestOutput


@dataclass
class AssembledCompletion:
    """One completion, assembled from its outputs."""

    index: int
    prompt_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    last: CompletionOutput | None = None

    def add(self, new: CompletionOutput) -> None:
        """Append the contents of an output."""
        self.text += new.text
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs or []
        self.last = new

    @property
    def error(self) -> str | None:
        """The error that ended it, if it failed."""
        if self.last is None or self.last.finish_reason != "error":
            return None
        return self.last.error or "the request failed"

    def as_json(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        last = self.last
        line: dict[str, Any] = {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": last and last.finish_reason,
            "stop_reason": last and last.stop_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
            },
        }
        if self.logprobs:
            line["logprobs"] = [
                [
                    {
                        "token_id": token,
                        "token": p.decoded_token,
                        "logprob": p.logprob,
                        "rank": p.rank,
                    }
                    for token, p in position.items()
                ]
                for position in self.logprobs
            ]
        if last and last.error:
            line["error"] = last.error
        return line


def assemble(outputs: Iterable[RequestOutput]) -> list[AssembledCompletion]:
    """Return the completions of one request, by index."""
    completions: dict[int, AssembledCompletion] = {}
    prompt_tokens = 0
    for output in outputs:
        prompt_tokens = len(output.prompt_token_ids) or prompt_tokens
        for new in output.outputs:
            completions.setdefault(new.index, AssembledCompletion(new.index)).add(new)
    for completion in completions.values():
        completion.prompt_tokens = prompt_tokens
    return [completions[index] for index in sorted(completions)]


def print_json(line: Mapping[str, Any], stream: TextIO) -> None:
    """Print one line of JSON, escaped where the encoding of the stream lacks a character."""
    text = line_of(line).decode().removesuffix("\n")
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(line)
    print(text, file=stream, flush=True)
