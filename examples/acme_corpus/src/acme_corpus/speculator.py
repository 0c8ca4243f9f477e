"""A speculator that drafts from documents of the operator, after the newest tokens."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from tokenizers import Tokenizer

from hardpoint import plugins
from hardpoint.plugins import ConfigError, DraftRequest, Meta, Speculator, SpeculatorContext

from .index import CorpusIndex


class Corpus(Speculator):
    """Drafts the continuation of the newest tokens of a request in a document.

    The documents are read once, when the engine starts. They are public to all requests: one that
    measures how fast a text comes learns whether it stands in one of them. Of the requests nothing
    is kept, so that no request shows in another's drafts.
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            documents: text files, also as patterns such as `"manuals/**/*.md"`.
            tokenizer: the tokenizer.json of the model.
            max_bytes: bytes of all documents together, at most.
            shortest: tokens that have to be the same before a draft.
            longest: tokens that are compared, at most.
        """

        documents: Annotated[list[str], Meta(min_length=1)]
        tokenizer: Annotated[str, Meta(min_length=1)]
        max_bytes: Annotated[int, Meta(ge=1)] = 1 << 26
        shortest: Annotated[int, Meta(ge=1, le=32)] = 3
        longest: Annotated[int, Meta(ge=1, le=32)] = 12

        def __post_init__(self) -> None:
            """Check that the two fit together."""
            if self.shortest > self.longest:
                raise ValueError(f"expected shortest <= longest ({self.longest})")

    options: Options

    def __init__(self, context: SpeculatorContext) -> None:
        """Read the documents, and build their index.

        Raises:
            ConfigError: a file cannot be read, or the documents are too large.
        """
        super().__init__(context)
        path = f"plugin.{self.name}"
        try:
            tokenizer = Tokenizer.from_file(self.options.tokenizer)
        except Exception as error:  # the library has no class of its own
            raise ConfigError(f"{path}.tokenizer: {error}") from error
        texts = self._texts(f"{path}.documents")
        token_ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        largest = max((max(ids, default=0) for ids in token_ids), default=0)
        if largest >= context.vocab_size:
            raise ConfigError(
                f"{path}.tokenizer: expected the model's tokenizer, with ids up to "
                f"{context.vocab_size - 1}, got {largest}"
            )
        self._index = CorpusIndex(token_ids, self.options.longest)

    def _texts(self, path: str) -> Iterator[str]:
        """Yield the texts of the documents, each once."""
        left, seen = self.options.max_bytes, set[Path]()
        for pattern in self.options.documents:
            paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
            files = [file for file in paths if file.is_file()]
            if not files:
                raise ConfigError(f"{path}: {pattern!r} matches no file")
            for file in files:
                if (name := file.resolve()) in seen:
                    continue
                seen.add(name)
                left -= file.stat().st_size
                if left < 0:
                    raise ConfigError(
                        f"{path}: {str(file)!r} goes beyond max_bytes ({self.options.max_bytes})"
                    )
                try:
                    yield file.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{path}: {str(file)!r}: {error}") from error

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[Sequence[int]]:  # noqa: ARG002
        """Return the drafts of each request."""
        return [self._after(request) for request in requests]

    def _after(self, request: DraftRequest) -> Sequence[int]:
        longest = self.options.longest
        newest = request.output_token_ids[-longest:]
        if missing := longest - len(newest):
            newest = [*request.prompt_token_ids[-missing:], *newest]
        return self._index.after(newest, self.options.shortest, request.limit)

    def memory(self) -> int:
        """Return the bytes of the index, which is in the memory of the processor."""
        return self._index.num_bytes if self.context.device.type == "cpu" else 0
