"""`hardpoint generate`: continue prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import (
    Command,
    CommandContext,
    RequestError,
    RequestOutput,
    SamplingParams,
)

from .batch import add_batch_options, run_batch
from .completions import AssembledCompletion, assemble, print_json
from .sampling import GREEDY, add_sampling_options, prompt_params, sampling_params

if TYPE_CHECKING:
    from hardpoint.plugins.server.commands import Generator


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] PROMPT [PROMPT ...]\n       %(prog)s [options] --file PATH"
    parser.description = (
        "Continue prompts and print the text as it comes. The prompt goes to the model as it is; "
        "with --chat it goes through the model's chat template, as a user's message."
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a text; - reads it from standard input")
    add("--chat", action="store_true", help="use the model's chat template")
    add("--json", action="store_true", help="print one JSON object per completion")
    default = "as the model recommends, else 0; 0 for prompts of a file"
    add_sampling_options(parser, max_tokens=256, temperature=default)
    add("--n", type=int, metavar="N", help="completions per prompt (default: 1)")
    add("--logprobs", type=int, metavar="N", help="the N likeliest per position; needs --json")
    add_batch_options(parser)


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    params = sampling_params(options, GREEDY)  # refuses wrong ones before a model is loaded
    _check_combination(options)
    if options.file is not None:
        defaults = argparse.ArgumentParser()
        _configure(defaults)
        return run_batch(options, defaults.parse_args([]), params, context)
    if options.logprobs is not None and not options.json:
        raise RequestError("--logprobs: it is printed as JSON only; add --json")
    prompts = _prompts(options.prompts)
    config, config_sources = context.load_config()
    generator = context.open_model(config, config_sources)
    failed = False
    try:
        params = prompt_params(options, generator)
        streams = _open_streams(generator, prompts, params, chat=options.chat)
        for number, (prompt, outputs) in enumerate(zip(prompts, streams, strict=True)):
            if number and not options.json:
                print()
            completions = _print_json(prompt, outputs) if options.json else _print_text(outputs)
            failed |= _report_errors(completions, context)
    finally:
        generator.close()
    return 1 if failed else 0


def _check_combination(options: argparse.Namespace) -> None:
    """Check which options are given together.

    Raises:
        RequestError: they exclude each other, or one needs another.
    """
    if options.file is None:
        if not options.prompts:
            raise RequestError("prompt: expected at least one PROMPT, or --file PROMPTS.jsonl")
        for name in ("output", "format", "resume", "overwrite"):
            if getattr(options, name):
                raise RequestError(f"--{name}: it is for prompts of a file; add --file PATH")
    elif options.prompts:
        raise RequestError(f"prompt: expected none besides --file, got {options.prompts[0][:40]!r}")
    elif options.output in (None, "-"):
        for name in ("resume", "overwrite"):
            if getattr(options, name):
                raise RequestError(f"--{name}: it needs an answer file; add --output PATH")


def _prompts(arguments: Sequence[str]) -> list[str]:
    if arguments.count("-") > 1:
        raise RequestError("prompt: - reads standard input, which can be read only once")
    return [sys.stdin.read() if prompt == "-" else prompt for prompt in arguments]


def _open_streams(
    generator: Generator, prompts: Sequence[str], params: SamplingParams, *, chat: bool
) -> list[Iterator[RequestOutput]]:
    """Add all prompts, before any output is read, so that they share a batch.

    Raises:
        RequestError: one is refused.
    """
    streams = []
    for number, prompt in enumerate(prompts, 1):
        try:
            streams.append(_stream(generator, prompt, params, chat=chat))
        except RequestError as error:
            where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise RequestError(f"{where}{error}") from error
    return streams


def _stream(
    generator: Generator, prompt: str, params: SamplingParams, *, chat: bool
) -> Iterator[RequestOutput]:
    if chat:
        return generator.stream_chat([{"role": "user", "content": prompt}], params)
    return generator.stream(prompt, params)


def _print_text(outputs: Iterator[RequestOutput]) -> list[AssembledCompletion]:
    def printed() -> Iterator[RequestOutput]:
        for output in outputs:
            for new in output.outputs:
                if new.index == 0 and new.text:
                    print(new.text, end="", flush=True)
            yield output

    ordered = assemble(printed())
    print()
    for completion in ordered[1:]:
        print(f"\n{completion.text}")
    return ordered


def _print_json(prompt: str, outputs: Iterator[RequestOutput]) -> list[AssembledCompletion]:
    ordered = assemble(outputs)
    for completion in ordered:
        print_json({"prompt": prompt, **completion.as_json()}, sys.stdout)
    return ordered


def _report_errors(completions: Sequence[AssembledCompletion], context: CommandContext) -> bool:
    errors = [completion.error for completion in completions if completion.error]
    for error in errors:
        context.show_error(error)
    return bool(errors)


COMMAND = Command("generate", "continue prompts", _configure, _run)
