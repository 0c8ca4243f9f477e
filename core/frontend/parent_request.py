"""A prompt and its `n` completions."""

from __future__ import annotations

import copy

import msgspec

from hardpoint.plugins import CompletionOutput, EngineCoreRequest

__all__ = ["ParentRequest"]


class ParentRequest:
    """Gathers the completions of one prompt.

    Attributes:
        request_id: the user's.
    """

    def __init__(self, request_id: str, n: int) -> None:
        """Expect `n` completions."""
        self.request_id = request_id
        self._n = n
        self._finished: dict[int, CompletionOutput] = {}

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return len(self._finished) == self._n

    def children(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """Return one request per completion; a single one keeps the user's id."""
        if self._n == 1:
            return [request]
        return [
            msgspec.structs.replace(
                request,
                request_id=f"{index}_{self.request_id}",
                child_index=index,
                # Hooks may change a completion's lists; the others keep theirs.
                prompt_token_ids=list(request.prompt_token_ids),
                plugin_args=copy.deepcopy(request.plugin_args),
            )
            for index in range(self._n)
        ]

    def gather(self, completion: CompletionOutput, *, final_only: bool) -> list[CompletionOutput]:
        """Take a child's completion; return those that are to be shown now, by index.

        With `final_only`, nothing until every completion has ended, then all of them.
        """
        if completion.finish_reason is not None:
            self._finished[completion.index] = completion
        if not final_only:
            return [completion]
        if not self.finished:
            return []
        return [self._finished[index] for index in sorted(self._finished)]
