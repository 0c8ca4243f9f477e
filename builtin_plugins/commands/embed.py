"""`hardpoint embed`: vectors of texts, given or in a file."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from hardpoint.builtin_plugins.server.batches.text_lines import line_of
from hardpoint.plugins import Command, CommandContext, RequestError, SamplingParams
from hardpoint.plugins.params import PoolingParams

from .prompt_file import LineFile, PromptFile
from .records.new_file import new_file

if TYPE_CHECKING:
    from hardpoint.plugins.server.commands import Generator

_AT_ONCE = 256
"""Lines of a file that are embedded together; no more are in memory."""

_INDEX = re.compile(r"^prompts\[(\d+)\]")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] TEXT [TEXT ...]\n       %(prog)s [options] --file PATH"
    parser.description = (
        "Print the vector of each text as a line of JSON: its id (the number of the text, or the "
        "id of its line in a file), the tokens of its prompt, and its embedding."
    )
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="a text")
    add("--file", metavar="PATH", help="embed each line: a JSON text, or an object with prompt "
        "(a text or token ids) and if wanted an id; - is standard input")  # fmt: skip
    add("--format", choices=("jsonl", "text"), help="text: each line is a text (default: jsonl)")
    add("--output", metavar="PATH", help="a new file for the lines (default: standard output)")
    add("--pooler", metavar="NAME", help="such as last, cls or mean (default: the model's)")
    add("--dimensions", type=int, metavar="N", help="size of vectors that are cut")
    add("--raw", action="store_true", help="do not scale vectors to length 1")
    add("--prompt-name", metavar="NAME", help="the model's text before texts, such as query")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    if bool(options.texts) == (options.file is not None):
        raise RequestError("text: expected at least one TEXT, or --file PATH")
    if options.format and options.file is None:
        raise RequestError("--format: it is for texts of a file; add --file PATH")
    params = PoolingParams(
        task="embed",
        dimensions=options.dimensions,
        normalize=False if options.raw else None,
        pooler=options.pooler,
    )
    with contextlib.ExitStack() as stack:
        texts = _texts(options, stack)
        output = _output(options.output, stack)
        config, config_sources = context.load_config()
        generator = context.open_model(config, config_sources)
        stack.callback(generator.close)
        while some := list(itertools.islice(texts, _AT_ONCE)):
            _embed(generator, some, params, options.prompt_name, output)
    return 0


class _NamedText(NamedTuple):
    """A text or its token ids; `place` is its name in errors."""

    place: str
    id: str | int
    prompt: Any


def _embed(
    generator: Generator,
    texts: list[_NamedText],
    params: PoolingParams,
    prompt_name: str | None,
    output: IO[str],
) -> None:
    try:
        results = generator.embed([text.prompt for text in texts], params, prompt_name)
    except RequestError as error:
        message = _INDEX.sub(lambda match: texts[int(match[1])].place, str(error))
        raise type(error)(message) from None
    for text, result in zip(texts, results, strict=True):
        tokens = len(result.prompt_token_ids)
        line = {"id": text.id, "prompt_tokens": tokens, "embedding": result.outputs.tolist()}
        output.write(line_of(line).decode())
    output.flush()


def _texts(options: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[_NamedText]:
    """Return the texts.

    Raises:
        RequestError: the file cannot be read; or, while it is read, a line is wrong.
    """
    if options.file is None:
        texts = enumerate(options.texts)
        return (_NamedText(f"prompts[{index}]", index + 1, text) for index, text in texts)
    is_text = options.format == "text"
    file = LineFile(options.file)
    stack.callback(file.close)
    return _lines(file, PromptFile(file, SamplingParams(), is_text=is_text, chat=False))


def _lines(file: LineFile, prompts: PromptFile) -> Iterator[_NamedText]:
    for request in prompts.requests():
        place = f"{file.name}:{request.line}"
        if request.messages is not None:
            raise RequestError(f"{place}: messages: expected a prompt")
        yield _NamedText(place, request.id, request.fields["prompt"])


def _output(path: str | None, stack: contextlib.ExitStack) -> IO[str]:
    if path is None or path == "-":
        return sys.stdout
    return stack.enter_context(new_file(path, "--output", keeps_lines=True))


COMMAND = Command("embed", "print vectors of texts", _configure, _run)
