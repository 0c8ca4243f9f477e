"""`hardpoint generate`: continue prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.plugins import (
    Command,
    CommandContext,
    CompletionOutput,
    Logprob,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from hardpoint.plugins.commands import Generator

from .sampling import add_sampling_options, sampling_params


@dataclass
class _Completion:
    """One completion, assembled from its outputs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    last: CompletionOutput | None = None

    def add(self, new: CompletionOutput) -> None:
        self.text += new.text
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs or []
        self.last = new


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] PROMPT [PROMPT ...]"
    parser.description = (
        "Continue prompts and print the text as it comes. The prompt goes to the model as it is; "
        "with --chat it goes through the model's chat template, as a user's message."
    )
    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help="a text; - reads it from standard input")
    add("--chat", action="store_true", help="use the model's chat template")
    add("--json", action="store_true", help="print one JSON object per completion")
    add_sampling_options(parser, max_tokens=256)
    add("--n", type=int, metavar="N", help="completions per prompt (default: 1)")
    add("--logprobs", type=int, metavar="N", help="the N likeliest per position; needs --json")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    params = sampling_params(options)
    if options.logprobs is not None and not options.json:
        raise RequestError("--logprobs: it is printed as JSON only; add --json")
    prompts = _prompts(options.prompts)
    config, config_sources = context.load_config()
    generator = context.open_model(config, config_sources)
    failed = False
    try:
        for number, prompt in enumerate(prompts):
            if number and not options.json:
                print()
            outputs = _stream(generator, prompt, params, chat=options.chat)
            completions = _print_json(prompt, outputs) if options.json else _print_text(outputs)
            failed |= _report_errors(completions)
    finally:
        generator.close()
    return 1 if failed else 0


def _prompts(given: Sequence[str]) -> list[str]:
    if given.count("-") > 1:
        raise RequestError("prompt: - reads standard input, which can be read only once")
    return [sys.stdin.read() if prompt == "-" else prompt for prompt in given]


def _stream(
    generator: Generator, prompt: str, params: SamplingParams, *, chat: bool
) -> Iterator[RequestOutput]:
    if chat:
        return generator.stream_chat([{"role": "user", "content": prompt}], params)
    return generator.stream(prompt, params)


def _print_text(outputs: Iterator[RequestOutput]) -> list[_Completion]:
    """Print the first completion as it comes and the others after it."""
    completions: dict[int, _Completion] = {}
    for output in outputs:
        for new in output.outputs:
            completions.setdefault(new.index, _Completion(new.index)).add(new)
            if new.index == 0 and new.text:
                print(new.text, end="", flush=True)
    ordered = [completions[index] for index in sorted(completions)]
    print()
    for completion in ordered[1:]:
        print(f"\n{completion.text}")
    return ordered


def _print_json(prompt: str, outputs: Iterator[RequestOutput]) -> list[_Completion]:
    completions: dict[int, _Completion] = {}
    prompt_tokens = 0
    for output in outputs:
        prompt_tokens = len(output.prompt_token_ids) or prompt_tokens
        for new in output.outputs:
            completions.setdefault(new.index, _Completion(new.index)).add(new)
    ordered = [completions[index] for index in sorted(completions)]
    for completion in ordered:
        line = _as_json(prompt, completion, prompt_tokens)
        print(msgspec.json.encode(line).decode(), flush=True)
    return ordered


def _as_json(prompt: str, completion: _Completion, prompt_tokens: int) -> dict[str, Any]:
    last = completion.last
    line: dict[str, Any] = {
        "prompt": prompt,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": last and last.finish_reason,
        "stop_reason": last and last.stop_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(completion.token_ids),
        },
    }
    if completion.logprobs:
        line["logprobs"] = [
            [
                {"token_id": token, "token": p.decoded_token, "logprob": p.logprob, "rank": p.rank}
                for token, p in position.items()
            ]
            for position in completion.logprobs
        ]
    if last and last.error:
        line["error"] = last.error
    return line


def _report_errors(completions: Sequence[_Completion]) -> bool:
    """Print the errors that ended completions; return whether there were any."""
    ended = [c.last for c in completions if c.last and c.last.finish_reason == "error"]
    for last in ended:
        print(f"hardpoint: error: {last.error or 'the request failed'}", file=sys.stderr)
    return bool(ended)


COMMAND = Command("generate", "Continue prompts.", _configure, _run)
