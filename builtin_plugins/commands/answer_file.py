"""The answers of `hardpoint generate --file`, and how a run that was stopped goes on."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hardpoint.builtin_plugins.server.batches.text_lines import line_of
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.typed import shown

from .batch_forms.form import EarlierAnswer, FileRequest
from .completions import print_json
from .prompt_file import LineFile

_BEGINNING = b'{"id":'


class StandardOutput:
    """Answers on standard output, without earlier answers."""

    name = "standard output"
    is_regular = False

    def has(self, request: FileRequest, prompts: LineFile) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def begin(self) -> str:
        """Do nothing."""
        return ""

    def write(self, line: Mapping[str, Any]) -> None:
        """Print an answer."""
        print_json(line, sys.stdout)

    def close(self) -> None:
        """Do nothing."""


class AnswerFile:
    """A file with one line per answer, for one process at a time."""

    def __init__(
        self,
        path: str,
        model: str,
        read: Callable[[bytes], EarlierAnswer],
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        """Open and lock the file; nothing in it is changed before `begin`.

        Args:
            path: path of the file; created if it does not exist.
            read: reads a line of the file; raises ValueError if it is no answer.
            resume: whether answers that are there count.
            overwrite: whether they are removed.

        Raises:
            HardpointError: it cannot be opened, is in use, or has answers that neither option is
                for.
        """
        self.name = path
        self._overwrite = overwrite
        self._lines: dict[str | int, int] = {}
        self._digests = array.array("Q")
        self._failed: set[int] = set()
        self._end = 0
        self._held: list[int] = []
        self._is_locked = False
        self._fd = self._open()
        try:
            self._lock(self._fd)
            if resume and not self.is_regular:
                raise RequestError(
                    f"--resume: expected a regular file as --output, got {self.name!r}"
                )
            if self.is_regular and os.fstat(self._fd).st_size:
                if not resume and not overwrite:
                    raise RequestError(
                        f"--output: {self.name!r} exists; add --resume to go on with it, or "
                        f"--overwrite to begin again"
                    )
                if resume:
                    self._read_answers(model, read)
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        try:
            self._path = os.path.realpath(self.name)
            self._is_new = not os.path.exists(self._path)
            self.is_regular = self._is_new or os.path.isfile(self._path)
            access = os.O_RDWR if self.is_regular else os.O_WRONLY
            return os.open(self._path, access | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RequestError(f"--output: {self.name!r} cannot be opened: {reason}") from None

    def _lock(self, fd: int) -> None:
        """Lock a file until `close`, unless it is a device or a pipe."""
        self._held.append(fd)
        if not self.is_regular:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                self._is_locked = True
                return
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:  # a file system without locks
            raise HardpointError(
                f"--output: {self.name!r} cannot be locked: {error.strerror}"
            ) from None
        raise HardpointError(f"--output: {self.name!r} is in use by another process")

    def check_is_not(self, prompts: LineFile) -> None:
        """Check that this is not the file of the prompts.

        Raises:
            RequestError: it is.
        """
        if prompts.stat and self.is_regular and os.path.samestat(prompts.stat, os.fstat(self._fd)):
            raise RequestError(f"--output: expected another file than --file, got {self.name!r}")

    def _read_answers(self, model: str, read: Callable[[bytes], EarlierAnswer]) -> None:
        """Note which requests have an answer.

        Raises:
            HardpointError: a line is no answer, or one of another model.
        """
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                try:
                    answer = read(line)
                    self._digests.append(answer.digest)
                except (ValueError, OverflowError, RecursionError):
                    if line.endswith(b"\n") or not _is_half_an_answer(line):
                        raise RequestError(
                            f"{self.name}:{number}: expected an answer that --file wrote, got "
                            f"{shown(line[:60].decode(errors='replace'))}"
                        ) from None
                    return  # `begin` removes it
                self._end += len(line)
                if answer.model not in (None, model):
                    raise RequestError(
                        f"{self.name}:{number}: this answer is of the model {answer.model!r}, and "
                        f"--resume with {model!r} would mix them"
                    )
                if answer.failed or answer.id is None:
                    self._failed.add(number)
                else:
                    self._lines[answer.id] = number

    def has(self, request: FileRequest, prompts: LineFile) -> bool:
        """Return whether a request has an answer; failures do not count.

        Raises:
            RequestError: the answer is to another request of the same id.
        """
        line = None if request.id is None else self._lines.get(request.id)
        if line is None:
            return False
        if self._digests[line - 1] != request.digest:
            raise RequestError(
                f"{prompts.name}:{request.line}: the id {shown(request.id)} has the answer to "
                f"another prompt, or with other parameters, in {self.name}:{line}; undo the change "
                f"or use another --output"
            )
        return True

    def begin(self) -> str:
        """Begin the file: remove failed answers and a half-written last line.

        Returns:
            A note for the user.
        """
        if not self.is_regular:
            return ""
        is_half = not self._overwrite and os.fstat(self._fd).st_size > self._end
        with self._reporting():
            os.ftruncate(self._fd, 0 if self._overwrite else self._end)
            if self._failed:
                self._remove_failed()
            end = os.lseek(self._fd, 0, os.SEEK_END)
            if end and os.pread(self._fd, 1, end - 1) != b"\n":
                os.write(self._fd, b"\n")
        if not is_half:
            return ""
        line = len(self._digests) + 1
        return f"{self.name}:{line}: the line is half-written; its prompt runs again"

    def _remove_failed(self) -> None:
        """Replace the file by one without the answers that failed; an interrupt loses nothing."""
        copy = f"{self._path}.{os.getpid()}.tmp"
        try:
            fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._held.append(fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with (
                open(self._fd, "rb", closefd=False) as old,
                open(fd, "wb", closefd=False) as new,
            ):
                old.seek(0)
                new.writelines(
                    line for number, line in enumerate(old, 1) if number not in self._failed
                )
            shutil.copymode(self._path, copy)
            os.replace(copy, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(copy)
            raise
        self._fd = fd

    def write(self, line: Mapping[str, Any]) -> None:
        """Append an answer, whole or not at all.

        Raises:
            HardpointError: it cannot be written.
        """
        data = memoryview(line_of(line))
        begin = os.lseek(self._fd, 0, os.SEEK_CUR) if self.is_regular else 0
        with self._reporting():
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except BaseException:  # an interrupt too leaves no half of it
                if self.is_regular:
                    os.ftruncate(self._fd, begin)
                raise

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise HardpointError(
                f"--output: {self.name!r} cannot be written: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Close the file, which releases its lock; remove it if it is new and empty."""
        if self._is_new and self._is_locked and not os.fstat(self._fd).st_size:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for fd in self._held:
            os.close(fd)
        self._held, self._is_locked = [], False


def _is_half_an_answer(line: bytes) -> bool:
    """Return whether a last line without an end can be the beginning of an answer.

    A file system may leave zeros at the end of a file when the machine fails.
    """
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line) or not line.strip(b"\0")
