"""States of requests, kept for logits processors and samplers."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from hardpoint.plugins import (
    Edits,
    Executor,
    Finish,
    LogitsContext,
    LogitsRequest,
    Phase,
    Rows,
    Sampler,
    SparseLogitsProcessor,
    Wrapper,
)
from hardpoint.plugins.requests import FinishedError
from hardpoint.plugins.sampling import Distribution, RequestStates
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.sampling.states import takes_distribution
from hardpoint.typed import ReadOnlyList, prepared

NUM_VERSIONS = Executor.MAX_CONCURRENT_BATCHES + 1
"""States kept per request. Results may come as many steps late as a pipeline has batches, and the
last one may be lost, so that a request may go on from a state that is some steps old."""

_NUM_LIKELIEST = 10
_encode = msgspec.msgpack.Encoder().encode


class _Version(NamedTuple):
    """A state as msgpack, and the number of output tokens after which it is that."""

    num_tokens: int
    state: bytes


class ObservedStates:
    """States that depend on logits, which outlive a preemption: the newest ones, by request.

    Attributes:
        versions: the newest states, by request and by plugin.
    """

    def __init__(self) -> None:
        self.versions: dict[str, dict[str, deque[_Version]]] = {}

    def __len__(self) -> int:
        return len(self.versions)

    def start(
        self, processor: LogitsPlugin, request: LogitsRequest, observed: Sequence[float] = ()
    ) -> Any:
        """Return the state of a request that enters the batch: new, or restored from its tokens.

        Args:
            processor: owner of the state.
            request: with its output tokens.
            observed: logprobs of the tokens that another engine has sampled.

        Raises:
            LookupError: the request has other output tokens, and no state after them is kept.
            TypeError, ValueError: the state that `start` returned is not as declared.
        """
        by_name = self.versions.setdefault(request.request_id, {})
        num_tokens = len(request.output_token_ids)
        if not num_tokens or (processor.name not in by_name and len(observed) == num_tokens):
            state = _observed(processor, request, observed if num_tokens else ())
            by_name[processor.name] = deque(maxlen=NUM_VERSIONS)
            self.record(processor, request, state)
            return state
        versions = by_name.get(processor.name, ())
        usable = [version for version in versions if version.num_tokens <= num_tokens]
        if not usable or usable[-1].num_tokens != num_tokens:
            raise LookupError(f"no state after {num_tokens} output tokens is kept")
        by_name[processor.name] = deque(usable, NUM_VERSIONS)  # later tokens were dropped
        return msgspec.msgpack.decode(usable[-1].state, type=prepared(processor.State))

    def record(self, processor: LogitsPlugin, request: LogitsRequest, state: Any) -> None:
        """Keep the state of a request after its output tokens.

        Raises:
            FinishedError: the processor ends the request.
            TypeError: it is not of the declared type.
            ValueError: it is larger than declared.
        """
        if type(state) is Finish:
            raise FinishedError(state)
        if not isinstance(state, processor.State):
            raise TypeError(
                f"expected a state of type {processor.State.__name__}, got {type(state).__name__}"
            )
        encoded = _encode(state)
        if len(encoded) > processor.max_state_bytes:
            raise ValueError(
                f"expected a state of at most max_state_bytes ({processor.max_state_bytes}), "
                f"got {len(encoded)} bytes"
            )
        version = _Version(len(request.output_token_ids), encoded)
        self.versions[request.request_id][processor.name].append(version)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended; unknown ids are ignored."""
        for request_id in request_ids:
            self.versions.pop(request_id, None)


def _observed(processor: LogitsPlugin, request: LogitsRequest, logprobs: Sequence[float]) -> Any:
    """Return the state after tokens with these logprobs, as if each had been sampled here."""
    if not logprobs:
        return processor.start(request)
    state = processor.start(replace(request, output_token_ids=ReadOnlyList()))
    for token, logprob in zip(request.output_token_ids, logprobs, strict=True):
        state = processor.observe(processor.advance(state, token), token, logprob)
    return state


def set_state(states: Any, name: str, state: Any) -> None:
    """Set the state of a processor in the states of a request.

    Raises:
        FinishedError: the processor ends the request.
    """
    if type(state) is Finish:
        raise FinishedError(state)
    dict.__setitem__(states, name, state)  # of a ReadOnlyDict, too


def observer_of(plugin: RequestStates) -> Callable[[Any, int, Distribution], Any]:
    """Return `observe` of a plugin as a function of state, token and distribution."""
    observe: Callable[..., Any] = plugin.observe
    if takes_distribution(type(plugin)):
        return lambda state, token, seen: observe(state, token, seen.logprob, distribution=seen)
    return lambda state, token, seen: observe(state, token, seen.logprob)


def distribution_tensors(
    logits: torch.Tensor, chosen: torch.Tensor, *, in_full: bool
) -> list[torch.Tensor]:
    """Return the tensors of the distribution of each row, for `distributions`.

    Args:
        logits: float32 [rows, vocab].
        chosen: int64 [rows]; the sampled tokens.
        in_full: whether more than logprobs is needed.
    """
    logprobs, ids = logits.log_softmax(-1), chosen.unsqueeze(1)
    picked = logprobs.gather(1, ids).squeeze(1)
    if not in_full:
        return [picked]
    probabilities = logprobs.double().exp()
    # Running sums, because other sums along a row round differently for other numbers of rows.
    below = probabilities.cumsum(-1) - probabilities
    entropy = torch.special.entr(probabilities).cumsum(-1)[:, -1]
    top, top_ids = logprobs.topk(min(_NUM_LIKELIEST, logits.shape[1]), dim=1)
    return [picked, entropy, top_ids, top, below.gather(1, ids).squeeze(1)]


def distributions(lists: Sequence[Sequence[Any]]) -> list[Distribution]:
    """Return the distribution of each row from the numbers of `distribution_tensors`."""
    return [Distribution(*row) for row in zip(*lists, strict=True)]


def distributions_of(logits: torch.Tensor, tokens: Sequence[int]) -> list[Distribution]:
    """Return the distribution of each token, from its row of logits [tokens, vocab]."""
    if not tokens:
        return []
    tensors = distribution_tensors(logits, torch.tensor(list(tokens)), in_full=True)
    return distributions([tensor.tolist() for tensor in tensors])


class _SamplerStates(SparseLogitsProcessor):
    """Keeps the states of the requests of a sampler in the pipeline of processors."""

    contract = 1
    phase = Phase.FORCE

    def edits(self, rows: Rows) -> Edits | None:  # noqa: ARG002
        return None


def _overrides(sampler: Any, method: str) -> bool:
    """Return whether a sampler, or its wrapped sampler, overrides a method for states."""
    member = getattr(type(sampler), method)
    if isinstance(sampler, Wrapper) and not inspect.isfunction(member):
        return _overrides(sampler.wrapped, method)
    return member is not getattr(RequestStates, method)


def sampler_states(sampler: Sampler, name: str) -> LogitsPlugin | None:
    """Return a processor for the states of a sampler; None if it has no states.

    Args:
        name: the name under which requests have its arguments.
    """
    methods = ("start", "advance", "observe", "fork")
    overridden = [method for method in methods if _overrides(sampler, method)]
    if "start" not in overridden:
        return None
    members = {method: staticmethod(getattr(sampler, method)) for method in overridden}
    attributes = ("State", "max_state_bytes", "supports_resume")
    declared = {name: getattr(sampler, name) for name in attributes}
    context = LogitsContext(
        name=name,
        options=None,
        device=sampler.context.device,
        vocab_size=sampler.context.vocab_size,
        max_num_seqs=1,
    )
    made: type[_SamplerStates] = type("SamplerStates", (_SamplerStates,), members | declared)
    return made(context)
