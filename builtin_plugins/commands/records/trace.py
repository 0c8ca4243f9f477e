"""`hardpoint trace`: how each token of an answer was chosen."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from typing import TYPE_CHECKING, Any

from hardpoint.builtin_plugins.commands.sampling import (
    GREEDY,
    add_sampling_options,
    prompt_params,
    sampling_params,
)
from hardpoint.plugins import Command, CommandContext, RequestError
from hardpoint.toolkit.trace import asking_for_trace

from .new_file import new_file
from .served_trace import API_KEY, served_trace

if TYPE_CHECKING:
    from hardpoint.plugins.server.commands import PromptTrace


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] PROMPT"
    parser.description = (
        "Continue a prompt as `hardpoint generate` does, and show how each token was chosen: the "
        "candidates with their logits after each plugin, the changes by plugin, the draw, and the "
        "steps of the engine. Without --json and --html it prints a table. With --url, a server "
        "that runs does it."
    )
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="a text; - reads it from standard input")
    add("--chat", action="store_true", help="use the model's chat template")
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="write a page that loads nothing to a new file")
    add("--candidates", type=int, metavar="N", help="tokens that are shown for a position, 1 to 20")
    add(
        "--url",
        metavar="URL",
        help="a server that allows traces: http://HOST:PORT, https://HOST:PORT or unix:PATH; "
        f"{API_KEY} has the key, which needs trace = true unless server.trace is set",
    )
    add_sampling_options(parser, max_tokens=16, temperature="as the model recommends, else 0")
    add("--n", type=int, metavar="N", help="completions (default: 1)")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    sampling_params(options, GREEDY)  # refuses wrong ones before a model is loaded
    if options.json and options.html is not None:
        raise RequestError("--json: expected one of --json and --html, got both")
    if options.candidates is not None and not 1 <= options.candidates <= 20:
        raise RequestError(f"--candidates: expected 1 to 20, got {options.candidates}")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with contextlib.ExitStack() as stack:
        page = None
        if options.html is not None:
            page = stack.enter_context(new_file(options.html, "--html"))
        if options.url is None:
            trace = _traced_here(options, context, prompt)
        else:
            trace = served_trace(options, prompt)
        if page is not None:
            page.write(trace.html())
        else:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
            print(trace.json() if options.json else trace.table(width))
        for error in trace.errors:
            context.show_error(error)
    return 1 if trace.errors else 0


def _traced_here(options: argparse.Namespace, context: CommandContext, prompt: Any) -> PromptTrace:
    config, config_sources = context.load_config()
    with contextlib.closing(context.open_model(config, config_sources)) as generator:
        params = asking_for_trace(prompt_params(options, generator), options.candidates)
        if options.chat:
            prompt = generator.model.apply_chat_template([{"role": "user", "content": prompt}])
        return generator.debug.trace(prompt, params)


COMMAND = Command("trace", "show how each token of an answer was chosen", _configure, _run)
