"""The interface of the forms of files: their requests, and the lines of the answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from hardpoint.plugins import CommandContext, EngineConfig
from hardpoint.plugins.commands import ConfigSources

RequestT = TypeVar("RequestT", bound="FileRequest")


class FileRequest(Protocol):
    """One line of a file."""

    @property
    def line(self) -> int:
        """Its number, from 1."""

    @property
    def id(self) -> str | int | None:
        """Id of its answer; None if it has none."""

    @property
    def digest(self) -> int:
        """64 bits of a hash of the request."""


class EarlierAnswer(NamedTuple):
    """A line of an answer file.

    Attributes:
        id: id of the request; None if it has none.
        digest: hash of the request.
        model: name of the model that answered; None if the digest includes it.
        failed: whether the request is to run again.
    """

    id: str | int | None
    digest: int
    model: str | None
    failed: bool


class Answered(NamedTuple):
    """An answer as a line, with the number of its tokens, and the error if it failed."""

    line: Mapping[str, Any]
    num_tokens: int
    error: str | None


class BatchFile(Protocol[RequestT]):
    """The requests of one file.

    Attributes:
        noun: word for a request, such as "prompt".
    """

    noun: str

    def requests(self) -> Iterator[RequestT]:
        """Yield the requests; from the first one each time, if the file is regular.

        Raises:
            RequestError: the file is wrong.
        """

    def read_answer(self, line: bytes) -> EarlierAnswer:
        """Return the request of a line of an answer file.

        Raises:
            ValueError: it is no answer of this form.
        """

    def open(
        self,
        context: CommandContext,
        config: EngineConfig,
        sources: ConfigSources,
        stack: contextlib.ExitStack,
    ) -> None:
        """Load the model; the stack closes it."""

    def run(self, wanted: Iterator[RequestT], write: Callable[[RequestT, Answered], None]) -> None:
        """Answer requests, after `open`, in any order.

        Args:
            wanted: taken when there is room for one.
            write: gets each answer as soon as it is there.
        """
