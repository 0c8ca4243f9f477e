"""A prompt and its `n` completions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec

from hardpoint.plugins import (
    CompletionOutput,
    EngineCoreRequest,
    PoolingRequestOutput,
    RequestOutput,
)

__all__ = ["AnyOutput", "OutputSink", "ParentRequest"]

AnyOutput = RequestOutput | PoolingRequestOutput
"""What users get."""

OutputSink = Callable[[AnyOutput | Exception], None]
"""Takes a request's outputs, or the error that ends it."""


class ParentRequest:
    """Gathers the completions of one prompt.

    Attributes:
        request_id: the user's.
        internal_id: unique among live requests.
        sink: where its outputs go; None is back to who asked for the step.
    """

    def __init__(
        self, request_id: str, internal_id: str, n: int, sink: OutputSink | None = None
    ) -> None:
        """Expect `n` completions."""
        self.request_id = request_id
        self.internal_id = internal_id
        self.sink = sink
        self._n = n
        self._finished: dict[int, CompletionOutput] = {}

    def children(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """Return one request per completion; a single one has the internal id itself."""
        if self._n == 1:
            request.request_id, request.external_req_id = self.internal_id, self.request_id
            return [request]
        return [
            msgspec.structs.replace(
                request,
                request_id=f"{index}_{self.internal_id}",
                external_req_id=self.request_id,
                child_index=index,
                # Hooks may change a completion's lists; the others keep theirs.
                prompt_token_ids=list(request.prompt_token_ids),
                plugin_args=copy.deepcopy(request.plugin_args),
            )
            for index in range(self._n)
        ]

    def gather(
        self, completion: CompletionOutput, *, ended: bool, final_only: bool
    ) -> tuple[list[CompletionOutput], bool]:
        """Take a child's completion.

        Args:
            ended: nothing of it follows.

        Returns:
            Those that are to be shown now, by index: with `final_only`, nothing until every
            completion has ended, then all of them. And whether every one has ended.
        """
        if self._n == 1:
            return [completion], ended
        if ended:
            self._finished[completion.index] = completion
        all_ended = len(self._finished) == self._n
        if not final_only:
            return [completion], all_ended
        if not all_ended:
            return [], False
        return [self._finished[index] for index in sorted(self._finished)], True
