"""The outputs of one request of an LLM as they come, and copies of it that go on otherwise."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from hardpoint import typed
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.errors import EnginePausedError
from hardpoint.plugins import EngineCoreRequest, RequestError, RequestOutput, SamplingParams
from hardpoint.plugins.requests.resumed import ResumedOutputs
from hardpoint.requests import OpenCalls, Request, make_extras

__all__ = ["OutputStream", "RequestForks", "open_stream"]


class RequestForks:
    """A request that may be forked, and its forks."""

    def __init__(
        self,
        request: EngineCoreRequest,
        params: object,
        extras: RequestExtras,
        clock: Callable[[], float],
    ) -> None:
        """Begin with a request that was sent now.

        Args:
            params: its parameters as they were given, with arguments that no plugin has prepared.
            extras: its extras.
            clock: seconds.
        """
        self._extras = make_extras(tools=extras.tools, calls=extras.calls)
        plugin_args = params.plugin_args if isinstance(params, SamplingParams) else {}
        self._plugin_args = copy.deepcopy(plugin_args)
        self._request, self._clock, self._since = request, clock, clock()
        self._indices = itertools.count(request.params.n)

    def fork(self, token_ids: Sequence[int]) -> tuple[EngineCoreRequest, RequestExtras]:
        """Return a copy of the request with an index of its own, which has these outputs.

        Its extras come with it: the tools, whose calls are read from its output.

        Raises:
            RequestError: the tokens are no list of numbers.
        """
        request = self._request
        outputs = typed.convert(token_ids, list[int], path="token_ids", error=RequestError)
        left = None
        if request.timeout is not None:
            left = max(request.timeout - (self._clock() - self._since), math.ulp(0.0))
        scored = request.params.prompt_logprobs is not None
        fork = msgspec.structs.replace(
            request,
            params=msgspec.structs.replace(request.params, n=1),
            plugin_args=self._plugin_args,  # which are prepared again
            child_index=next(self._indices),
            resumed=ResumedOutputs(
                outputs, num_prompt_logprobs=len(request.prompt_token_ids) if scored else 0
            ),
            timeout=left,
            arrival_time=0.0,
            kv_transfer_params=None,  # what it names was for the source alone
            external_req_id=None,
            reasoning_markers=None,
        )
        return fork, self._extras


class OutputStream(Iterator[RequestOutput]):
    """The outputs of one request as they come.

    It aborts its request when it is closed, collected, or fails; not when the engine is paused,
    after which it goes on.
    """

    def __init__(self, calls: OpenCalls, request_id: str, family: RequestForks) -> None:
        self._family = family
        self._calls, self._id = calls, request_id
        self._outputs = calls.outputs([request_id])
        self._is_open = True

    def __next__(self) -> RequestOutput:
        """Return the next output.

        Raises:
            EnginePausedError: there is none before the engine is resumed; ask again then.
            HardpointError: the engine rejected the request, or is dead.
        """
        with self._calls.lock:  # of several threads that iterate, each gets some of the outputs
            return self._next()

    def _next(self) -> RequestOutput:
        if not self._is_open:
            raise StopIteration
        try:
            output = next(self._outputs)
        except EnginePausedError:
            self._outputs = self._calls.outputs([self._id])
            raise
        except BaseException:
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def fork(self, token_ids: Sequence[int]) -> OutputStream:
        """Go on with other outputs in a copy of the request; iterate over the outputs of the copy.

        The copy is one more completion of the same prompt, as those of `n`: with the same
        parameters and a number of its own, `outputs[0].index`. Logits processors and grammars get
        `token_ids` as if they had been sampled; the prefix cache shares full blocks of them that
        the source has computed. Closing either stream ends its own request alone.

        Args:
            token_ids: all output tokens before the new ones. May be empty.

        Raises:
            RequestError: tokens are wrong, or end the request; a logits processor cannot go on
                after outputs.
            OverloadedError, EngineDeadError, EngineClosedError: as `LLM.stream`.
        """
        fork, extras = self._family.fork(token_ids)
        return open_stream(self._calls, (fork, None, extras), self._family)

    def close(self) -> None:
        """End the request, if it has not ended. Closing twice does nothing."""
        if self._is_open:
            self._is_open = False
            self._calls.drop_soon([self._id])

    def __del__(self) -> None:
        self.close()


def open_stream(
    calls: OpenCalls, request: Request, family: RequestForks | None = None
) -> OutputStream:
    """Add a request; return its outputs.

    Args:
        calls: the open calls of an LLM.
        family: source of the fork; None begins a family.

    Raises:
        RequestError, OverloadedError: it is wrong, or too many wait.
    """
    sent: list[EngineCoreRequest] = []
    (request_id,) = calls.add([request], sent=sent.append)
    if family is None:
        _, params, extras = request
        family = RequestForks(sent[0], params, extras, calls.clock)
    return OutputStream(calls, request_id, family)
