"""`hardpoint generate --file`: answer all prompts of a file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from hardpoint.plugins import (
    CommandContext,
    HardpointError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from hardpoint.plugins.commands import Generator, Prompt
from hardpoint.typed import shown

from .answer_file import AnswerFile, StandardOutput
from .completions import assemble
from .conversation import is_dumb_terminal
from .prompt_file import BatchRequest, PromptFile


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for prompts of a file."""
    group = parser.add_argument_group("prompts of a file")
    add = group.add_argument
    add(
        "--file",
        metavar="PATH",
        help="answer each line: a JSON text, or an object with prompt or messages, and if wanted "
        "an id and sampling parameters; - is standard input",
    )
    add("--format", choices=("jsonl", "text"), help="text: each line is a prompt (default: jsonl)")
    add("--output", metavar="PATH", help="where the answers go, as JSON lines (default: -)")
    either = group.add_mutually_exclusive_group()
    add = either.add_argument
    add("--resume", action="store_true", help="keep the answers that --output has; do the others")
    add("--overwrite", action="store_true", help="remove the answers that --output has")


def run_batch(options: argparse.Namespace, params: SamplingParams, context: CommandContext) -> int:
    """Answer the prompts of `options.file`; return the exit code.

    Raises:
        HardpointError: a file or one of its lines is wrong; a regular file is read to its end
            before the model is loaded.
    """
    config, config_sources = context.load_config()
    with contextlib.ExitStack() as stack:
        is_text = options.format == "text"
        prompts = PromptFile(options.file, params, is_text=is_text, chat=options.chat)
        stack.callback(prompts.close)
        answers = _open_answers(options, config.model)
        stack.callback(answers.close)
        if isinstance(answers, AnswerFile):
            answers.check_is_not(prompts)
        total, left = _count(prompts, answers) if prompts.is_regular else (None, None)
        generator = None
        if left != 0:
            generator = context.open_model(config, config_sources)
            stack.callback(generator.close)
        if removed := answers.begin():
            _remark(context, removed)
        if generator is None:
            _remark(context, f"{answers.name} has all {total} answers")
            return 0
        return _Batch(prompts, answers, generator, context, config.model, total).run()


def _count(prompts: PromptFile, answers: AnswerFile | StandardOutput) -> tuple[int, int]:
    """Return the number of prompts, and of those without an answer."""
    total = left = 0
    for request in prompts.requests():
        total += 1
        left += not answers.has(request, prompts)
    return total, left


def _remark(context: CommandContext, text: str) -> None:
    if not context.quiet:
        print(f"hardpoint: {text}", file=sys.stderr)


def _open_answers(options: argparse.Namespace, model: str) -> AnswerFile | StandardOutput:
    if options.output in (None, "-"):
        return StandardOutput()
    return AnswerFile(options.output, model, resume=options.resume, overwrite=options.overwrite)


class _Batch:
    """One run over the prompts of a file."""

    def __init__(
        self,
        prompts: PromptFile,
        answers: AnswerFile | StandardOutput,
        generator: Generator,
        context: CommandContext,
        model: str,
        total: int | None,
    ) -> None:
        self._prompts, self._answers, self._generator = prompts, answers, generator
        self._context, self._model, self._total = context, model, total
        self._open: dict[int, BatchRequest] = {}
        self._problem: HardpointError | None = None
        self._earlier = self._done = self._failed = self._tokens = 0
        self._first_error = ""
        self._began = time.perf_counter()
        self._progress = _Progress(answers, quiet=context.quiet)

    def run(self) -> int:
        """Answer the prompts; return the exit code."""
        try:
            try:
                for position, result in self._generator.generate_unordered(self._requests()):
                    self._write(self._open.pop(position), result)
                    self._progress.show(self._state())
            finally:
                self._progress.clear()
            if self._problem is not None:
                raise self._problem
        except (HardpointError, KeyboardInterrupt):
            if self._done:
                _remark(self._context, f"stopped: {self._summary()}{self._how_to_go_on()}")
            raise
        _remark(self._context, self._summary())
        if not self._failed:
            return 0
        failed = f"{_prompts(self._failed)} failed; the first one: {self._first_error}"
        self._context.show_error(failed)
        return 1

    def _requests(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        """Yield what is to be run; of a line that is wrong, end and note why."""
        position = 0
        for request in self._wanted():
            prompt: Prompt
            if request.messages is None:
                prompt = request.given["prompt"]
            else:
                try:
                    prompt = self._generator.apply_chat_template(request.messages)
                except RequestError as error:
                    self._write(request, error)
                    continue
            self._open[position] = request
            position += 1
            yield prompt, request.params

    def _wanted(self) -> Iterator[BatchRequest]:
        try:
            for request in self._prompts.requests():
                if self._answers.has(request, self._prompts):
                    self._earlier += 1
                else:
                    yield request
        except HardpointError as error:  # in a pipe; the requests before it still end
            self._problem = error

    def _write(self, request: BatchRequest, result: RequestOutput | RequestError) -> None:
        line: dict[str, Any] = {
            "id": request.id,
            "request": f"{request.digest:016x}",
            "model": self._model,
            **request.given,
        }
        if isinstance(result, RequestError):
            line["error"] = str(result)
        else:
            completions = assemble([result])
            self._tokens += sum(len(completion.token_ids) for completion in completions)
            if request.params.n == 1:
                line |= completions[0].as_json()
            else:
                line["completions"] = [completion.as_json() for completion in completions]
            errors = [completion.error for completion in completions if completion.error]
            line |= {"error": errors[0]} if errors else {}
        self._answers.write(line)
        self._done += 1
        if "error" in line:
            self._failed += 1
            self._first_error = self._first_error or f"id {shown(request.id)}: {line['error']}"

    @property
    def _finished(self) -> int:
        """Prompts that have an answer or failed, those of earlier runs included."""
        return self._earlier + self._done

    def _state(self) -> str:
        """Return progress as one line, of which a narrow terminal shows the beginning."""
        if self._total is None:
            return f"{_prompts(self._finished)}, {self._rates()}"
        seconds = time.perf_counter() - self._began
        left = round(seconds * (self._total - self._finished) / self._done)
        time_left = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        return f"{self._finished}/{self._total}, {time_left}, {self._rates()}"

    def _rates(self) -> str:
        """Return output tokens per second, and how many prompts failed."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._tokens / seconds:.0f} tokens/s{failed}"

    def _summary(self) -> str:
        """Return the progress so far, as one line."""
        if self._total in (None, self._finished):
            done = _prompts(self._finished)
        else:
            done = f"{self._finished} of {self._total} prompts"
        earlier = f" ({self._earlier} before)" if self._earlier else ""
        return f"{done} finished{earlier}, {self._rates()}"

    def _how_to_go_on(self) -> str:
        if not self._answers.is_regular:
            return ""
        return f"; the same command with --resume goes on with {self._answers.name}"


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count} prompts"


class _Progress:
    """One line on standard error, drawn again and again.

    Nothing is drawn elsewhere than on a terminal, nor between answers on the same one.
    """

    def __init__(self, answers: AnswerFile | StandardOutput, *, quiet: bool) -> None:
        self._is_on = not quiet and sys.stderr.isatty() and not is_dumb_terminal()
        if isinstance(answers, StandardOutput) and sys.stdout.isatty():
            self._is_on = False
        self._next = 0.0

    def show(self, text: str) -> None:
        """Replace the line, at most ten times a second."""
        now = time.perf_counter()
        if self._is_on and now >= self._next:
            self._next = now + 0.1
            self._write(text)

    def clear(self) -> None:
        """Remove the line."""
        if self._is_on:
            self._write("")

    def _write(self, text: str) -> None:
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"\r\x1b[K{text[: columns - 1]}")
            sys.stderr.flush()
        except OSError:  # the terminal is gone; the answers still come
            self._is_on = False
