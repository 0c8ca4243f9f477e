"""The program that compiles grammars with xgrammar, in a process of its own.

Regular expressions of 30 characters can keep xgrammar busy for minutes, in code that no thread of
Python can interrupt. So the process is limited, and can be ended. It reads requests and writes
answers in msgpack, each after its length. The first request is the vocabulary.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import re
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

MAX_GRAMMAR = 32 << 20
"""Of a serialised grammar; in the engine it uses about ten times as much memory."""

LENGTH = struct.Struct("<Q")

_PR_SET_PDEATHSIG = 1

# Followed by its id, this is the text of a special token. It is not UTF-8, so no character matches
# it; texts between tags, which match any bytes, exclude the part after the first byte.
SENTINEL = "\ufdd0\ufdef\ufdd0"
_LOCATION = re.compile(r"^(\[[\d:]+\] \S+:\d+: )?(Warning: |Check failed: .* is false: )?")


class Job(msgspec.Struct):
    """A grammar to compile.

    Attributes:
        form: what the text is: `json`, `regex`, `ebnf` or `structural_tag`.
        text: a schema or a structural tag as JSON, a regular expression or a grammar.
        any_whitespace: whether JSON has any white space between its parts.
        strict_mode: whether JSON has only properties and items that the schema describes.
    """

    form: str
    text: str
    any_whitespace: bool = True
    strict_mode: bool = False


class Start(msgspec.Struct):
    """The facts about the engine that the process needs."""

    tokens: list[bytes]
    special: list[int]
    vocab_size: int
    threads: int
    max_bytes: int


class CompilerAnswer(msgspec.Struct):
    """A compiled grammar, or its error.

    Attributes:
        grammar: serialised.
        warnings: what xgrammar reported as ignored.
        error: why there is no grammar.
    """

    grammar: str = ""
    warnings: list[str] = []
    error: str = ""


def tokenizer_info(tokens: Sequence[bytes], special: Sequence[int], vocab_size: int) -> Any:
    """Return a vocabulary as xgrammar has it, the same in all processes.

    It has no stop tokens: the engine allows them where a text may end.
    """
    xgrammar = importlib.import_module("xgrammar")
    encoded = list(tokens)
    for token in special:
        encoded[token] = b"\xff" + f"{SENTINEL}{token}".encode()
    return xgrammar.TokenizerInfo(
        encoded, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[]
    )


def compile_grammar(compiler: Any, job: Job) -> Any:
    """Return a compiled grammar.

    Raises:
        RuntimeError: it is wrong.
    """
    match job.form:
        case "json":
            return compiler.compile_json_schema(
                job.text, any_whitespace=job.any_whitespace, strict_mode=job.strict_mode
            )
        case "regex":
            return compiler.compile_regex(job.text)
        case "ebnf":
            return compiler.compile_grammar(job.text)
        case _:
            return compiler.compile_structural_tag(job.text)


def answer(
    compiler: Any, request: bytes, read_warnings: Callable[[], str], max_bytes: int
) -> CompilerAnswer:
    """Return the answer to a request.

    Args:
        compiler: an xgrammar.GrammarCompiler.
        request: a `Job`, encoded.
        read_warnings: returns what was written to the standard error since its last call.
        max_bytes: memory that the process may use for it.
    """
    job = msgspec.msgpack.decode(request, type=Job)
    try:
        grammar = compile_grammar(compiler, job).serialize_json()
    except Exception as error:  # of the library, whose errors have no common class
        read_warnings()
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return CompilerAnswer(error=memory_error(max_bytes))
        return CompilerAnswer(error=reason(str(error)) or type(error).__name__)
    if len(grammar) > MAX_GRAMMAR:
        size, limit = len(grammar) >> 20, MAX_GRAMMAR >> 20
        return CompilerAnswer(error=f"it has {size} MiB when it is compiled, more than {limit} MiB")
    warnings = [reason(line) for line in read_warnings().splitlines() if "Warning:" in line]
    return CompilerAnswer(grammar=grammar, warnings=sorted(set(warnings)))


def memory_error(max_bytes: int) -> str:
    """Return the error of a grammar that needs too much memory."""
    return (
        f"compiling it with xgrammar needs more than {max_bytes >> 20} MiB of memory (the option "
        f"max_bytes of xgrammar)"
    )


def reason(message: str) -> str:
    """Return an error or warning of the library without the place in its source."""
    return _LOCATION.sub("", message.strip(), count=1)[:1000]


def main(seconds: float) -> None:
    """Answer requests until the standard input ends.

    Args:
        seconds: after which a request that is still being compiled ends the process.
    """
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's
    _continue_after_parent()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    read_warnings = _redirect_stderr()
    start = msgspec.msgpack.decode(read_frame(requests), type=Start)
    xgrammar = importlib.import_module("xgrammar")
    compiler = xgrammar.GrammarCompiler(
        tokenizer_info(start.tokens, start.special, start.vocab_size),
        max_threads=start.threads,
        cache_enabled=False,
    )
    compiler.compile_regex("a")  # loads what compiling needs
    _limit_memory(start.max_bytes)
    read_warnings()
    write_frame(answers, msgspec.msgpack.encode(CompilerAnswer()))
    while request := read_frame(requests):
        _alarm(math.ceil(seconds) + 1)  # the caller ends it earlier, unless it has ended itself
        reply = answer(compiler, request, read_warnings, start.max_bytes)
        write_frame(answers, msgspec.msgpack.encode(reply))
        _alarm(0)


def read_frame(stream: IO[bytes]) -> bytes:
    """Return the bytes that `write_frame` wrote; nothing if the stream ends before."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return b""
    (length,) = LENGTH.unpack(header)
    content = stream.read(length)
    return content if len(content) == length else b""


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Write bytes after their length."""
    stream.write(LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def _redirect_stderr() -> Callable[[], str]:
    """Keep the text written to standard error; return a function that reads and empties it."""
    create = getattr(os, "memfd_create", None)
    file = create("warnings") if create else os.dup(tempfile.TemporaryFile().fileno())  # noqa: SIM115
    os.dup2(file, 2)

    def read() -> str:
        size = os.lseek(file, 0, os.SEEK_END)
        os.lseek(file, 0, os.SEEK_SET)
        text = os.read(file, size).decode(errors="replace")
        os.lseek(file, 0, os.SEEK_SET)
        os.ftruncate(file, 0)
        return text

    return read


def _limit_memory(max_bytes: int) -> None:
    """Limit the memory to the present use of the process and `max_bytes` more."""
    try:
        import resource  # noqa: PLC0415
    except ImportError:  # another system than Unix
        return
    psutil = importlib.import_module("psutil")
    within = psutil.Process().memory_info().vms + max_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        within = min(within, hard)
    resource.setrlimit(resource.RLIMIT_AS, (within, hard))


def _continue_after_parent() -> None:
    """Let the system continue this process, if it is stopped, when its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def _alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings.pop("path")
    main(**settings)
