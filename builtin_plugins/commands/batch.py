"""`hardpoint generate --file`: answer all requests of a file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from hardpoint.builtin_plugins.server.batches.lines import is_batch_line
from hardpoint.plugins import CommandContext, EngineConfig, HardpointError, SamplingParams
from hardpoint.typed import shown

from .answer_file import AnswerFile, StandardOutput
from .batch_forms.form import Answered, BatchFile, FileRequest
from .batch_forms.openai import OpenAIRequests, check_options
from .batch_forms.prompts import Prompts
from .conversation import is_dumb_terminal
from .prompt_file import LineFile, PromptFile


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for prompts of a file."""
    group = parser.add_argument_group("prompts of a file")
    add = group.add_argument
    add(
        "--file",
        metavar="PATH",
        help="answer each line: a JSON text, or an object with prompt or messages, and if wanted "
        "an id and sampling parameters; or a file for OpenAI's batch service; - is standard input",
    )
    add("--format", choices=("jsonl", "text"), help="text: each line is a prompt (default: jsonl)")
    add("--output", metavar="PATH", help="where the answers go, as JSON lines (default: -)")
    either = group.add_mutually_exclusive_group()
    add = either.add_argument
    add("--resume", action="store_true", help="keep the answers that --output has; do the others")
    add("--overwrite", action="store_true", help="remove the answers that --output has")


def run_batch(
    options: argparse.Namespace,
    defaults: argparse.Namespace,
    params: SamplingParams,
    context: CommandContext,
) -> int:
    """Answer the requests of `options.file`; return the exit code.

    Args:
        defaults: the options of a command line without any.
        params: parameters of prompts without their own.

    Raises:
        HardpointError: a file or one of its lines is wrong; a regular file is read to its end
            before the model is loaded.
    """
    config, config_sources = context.load_config()
    with contextlib.ExitStack() as stack:
        file = LineFile(options.file)
        stack.callback(file.close)
        form = _form(file, options, defaults, params, config)
        answers = _open_answers(options, config.model, form)
        stack.callback(answers.close)
        if isinstance(answers, AnswerFile):
            answers.check_is_not(file)
        total, left = _count(form, file, answers) if file.is_regular else (None, None)
        if left != 0:
            form.open(context, config, config_sources, stack)
        if removed := answers.begin():
            _remark(context, removed)
        if left == 0:
            _remark(context, f"{answers.name} has all {total} answers")
            return 0
        return _Batch(form, file, answers, context, total).run()


def _form(
    file: LineFile,
    options: argparse.Namespace,
    defaults: argparse.Namespace,
    params: SamplingParams,
    config: EngineConfig,
) -> BatchFile[Any]:
    is_text = options.format == "text"
    if not is_text and is_batch_line(file.peek()):
        check_options(options, defaults, config)
        return OpenAIRequests(file, config.model)
    return Prompts(PromptFile(file, params, is_text=is_text, chat=options.chat), config.model)


def _count(
    form: BatchFile[Any], file: LineFile, answers: AnswerFile | StandardOutput
) -> tuple[int, int]:
    total = left = 0
    for request in form.requests():
        total += 1
        left += not answers.has(request, file)
    return total, left


def _remark(context: CommandContext, text: str) -> None:
    if not context.quiet:
        print(f"hardpoint: {text}", file=sys.stderr)


def _open_answers(
    options: argparse.Namespace, model: str, form: BatchFile[Any]
) -> AnswerFile | StandardOutput:
    if options.output in (None, "-"):
        return StandardOutput()
    return AnswerFile(
        options.output,
        model,
        form.read_answer,
        resume=options.resume,
        overwrite=options.overwrite,
    )


class _Batch:
    """One run over the requests of a file."""

    def __init__(
        self,
        form: BatchFile[Any],
        file: LineFile,
        answers: AnswerFile | StandardOutput,
        context: CommandContext,
        total: int | None,
    ) -> None:
        self._form, self._file, self._answers = form, file, answers
        self._context, self._total = context, total
        self._problem: HardpointError | None = None
        self._earlier = self._done = self._failed = self._tokens = 0
        self._first_error = ""
        self._began = time.perf_counter()
        self._progress = _Progress(answers, quiet=context.quiet)

    def run(self) -> int:
        try:
            try:
                self._form.run(self._wanted(), self._write)
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
        failed = f"{self._counted(self._failed)} failed; the first one: {self._first_error}"
        self._context.show_error(failed)
        return 1

    def _wanted(self) -> Iterator[FileRequest]:
        try:
            for request in self._form.requests():
                if self._answers.has(request, self._file):
                    self._earlier += 1
                else:
                    yield request
        except HardpointError as error:  # in a pipe; the requests before it still end
            self._problem = error

    def _write(self, request: FileRequest, answer: Answered) -> None:
        self._answers.write(answer.line)
        self._done += 1
        self._tokens += answer.num_tokens
        if answer.error is not None:
            self._failed += 1
            self._first_error = self._first_error or f"{_place(request)}: {answer.error}"
        self._progress.show(self._state())

    @property
    def _finished(self) -> int:
        return self._earlier + self._done

    def _state(self) -> str:
        if self._total is None:
            return f"{self._counted(self._finished)}, {self._rates()}"
        seconds = time.perf_counter() - self._began
        left = round(seconds * (self._total - self._finished) / self._done)
        time_left = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        return f"{self._finished}/{self._total}, {time_left}, {self._rates()}"

    def _rates(self) -> str:
        """Return output tokens per second, and how many requests failed."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._tokens / seconds:.0f} tokens/s{failed}"

    def _summary(self) -> str:
        """Return the progress so far, as one line."""
        if self._total in (None, self._finished):
            done = self._counted(self._finished)
        else:
            done = f"{self._finished} of {self._total} {self._form.noun}s"
        earlier = f" ({self._earlier} before)" if self._earlier else ""
        return f"{done} finished{earlier}, {self._rates()}"

    def _counted(self, count: int) -> str:
        return f"{count} {self._form.noun}{'' if count == 1 else 's'}"

    def _how_to_go_on(self) -> str:
        if not self._answers.is_regular:
            return ""
        return f"; the same command with --resume goes on with {self._answers.name}"


def _place(request: FileRequest) -> str:
    return f"line {request.line}" if request.id is None else f"id {shown(request.id)}"


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
        if self._is_on:
            self._write("")

    def _write(self, text: str) -> None:
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"\r\x1b[K{text[: columns - 1]}")
            sys.stderr.flush()
        except OSError:  # the terminal is gone; the answers still come
            self._is_on = False
